"""Stands for an engine whose start fails as vLLM's does when the GPU has too little memory: its
core says why, and is then killed by the engine itself. A tool for the meta tests."""

import sys
from pathlib import Path

print((Path(__file__).parent / "data" / "texts" / "failing-start.log").read_text("utf-8"), end="")
sys.exit(1)
