"""What belongs to a checkout of the suite and is not installed: the canary's training and its GGUF
file, several engines side by side, what the tolerances detect, and the generated pages of the
documentation.

`tools.commands` adds them to the command ``sm121``. ``pip install -e '.[tools]'`` installs what
they need. Nothing in `sm121` imports this package.
"""
