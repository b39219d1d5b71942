"""A plugin for pytest that writes the steps of the module `spine` to a file for each process."""

import logging
import os

handler = logging.FileHandler(
    os.environ["SM121_META_STEPS"] + os.environ.get("PYTEST_XDIST_WORKER", "main")
)
steps = logging.getLogger("sm121.plugin.spine")
steps.addHandler(handler)
steps.setLevel(logging.DEBUG)
