"""Stands for an engine whose start fails as vLLM's does when the GPU has too little memory: its
core says why, and is then killed by the engine itself. A tool for the meta tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # it is started by its path

from meta_tests.folders import DATA

print((DATA / "texts" / "failing-start.log").read_text("utf-8"), end="")
sys.exit(1)
