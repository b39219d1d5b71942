"""An engine whose start fails in the way in which vLLM's fails if the GPU has too little memory.

Its core logs the reason, and the engine then kills the core."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for its imports, as it runs as a script

from meta_tests.folders import DATA

print((DATA / "texts" / "failing-start.log").read_text("utf-8"), end="")
sys.exit(1)
