"""On the stand-in's PYTHONPATH: the GPU's own measurement answers from a file, as no GPU is there.
`sm121 box --device-only cuda:0` multiplies matrices in a process of its own; what a GB10 would have
measured there stands in the JSON file that GB10_DEVICE names."""

import os
import sys
from pathlib import Path

if "--device-only" in sys.orig_argv and sys.orig_argv[-1].startswith("cuda"):
    sys.stdout.write(Path(os.environ["GB10_DEVICE"]).read_text("utf-8") + "\n")
    sys.stdout.flush()
    os._exit(0)
