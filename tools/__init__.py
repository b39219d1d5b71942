"""Programs for a checkout, which are not part of the wheel.

They train the canary and convert it to GGUF, compare engines, compute the defects that the
tolerances detect, and generate pages of the documentation.

`tools.commands` adds them to the command ``sm121``. ``pip install -e '.[tools]'`` installs their
requirements. No package of `sm121` imports this package.
"""
