"""Replace the measurement of the GPU by values of a file.

This module is on the PYTHONPATH of the simulated machine.

`sm121 box --device-only cuda:0` measures in a separate process. The JSON file that GB10_DEVICE
names contains what a GB10 would measure."""

import os
import sys
from pathlib import Path

if "--device-only" in sys.orig_argv and sys.orig_argv[-1].startswith("cuda"):
    sys.stdout.write(Path(os.environ["GB10_DEVICE"]).read_text("utf-8") + "\n")
    sys.stdout.flush()
    os._exit(0)

if "pytest" in sys.orig_argv:
    # The suite computes the server's memory from the decrease of the machine's free memory. This
    # server has 0.07 GiB, less than what the other processes of this machine take and return. On a
    # GB10, a server has 70 GiB.
    import psutil

    _before = psutil.virtual_memory()
    psutil.virtual_memory = lambda: _before
