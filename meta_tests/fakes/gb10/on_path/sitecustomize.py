"""Replace the measurement of the GPU by values of a file; this module is on the stand-in's
PYTHONPATH. `sm121 box --device-only cuda:0` measures in a separate process. The JSON file that
GB10_DEVICE names contains what a GB10 would measure."""

import os
import sys
from pathlib import Path

if "--device-only" in sys.orig_argv and sys.orig_argv[-1].startswith("cuda"):
    sys.stdout.write(Path(os.environ["GB10_DEVICE"]).read_text("utf-8") + "\n")
    sys.stdout.flush()
    os._exit(0)

if "pytest" in sys.orig_argv:
    # The server's memory is read as the decrease of the machine's. A server of 0.07 GiB is less
    # than what the other processes of this machine take and return; on a GB10 it is 70 GiB.
    import psutil

    _before = psutil.virtual_memory()
    psutil.virtual_memory = lambda: _before
