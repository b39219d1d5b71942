"""Runs the suite on all GB10s that are not there and writes the table.

``python meta_tests/gb10 --output docs/gb10-stand-in.md``
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import catalogue_rows

HEAD = """# On a GB10 that is not there

Made by `python meta_tests/gb10 --output docs/gb10-stand-in.md` (`make catalogues`). Do not edit.

The suite was made without a GB10. This is what it says of a stand-in that behaves as one: NVML with
a GB10's answers, the arguments, choices and words of each release (as executed: docs/choices.md),
its log over a time line, tokens at the published rates, and a real vLLM on the CPU for the answers.
What runs is `pytest -m sm121 --plan quick` with the profile `sm121-gpt-oss-120b`, extended by the
canary's questions and memory. Starts are forty times as fast as on the machine.
What it cannot show: kernels, whether the profile's numbers are right, how long things take there.
"""


def page(found: list[dict[str, Any]]) -> str:
    """The table of what was kept of each case."""
    text = HEAD
    for healthy, title in ((True, "Healthy"), (False, "Sick")):
        text += f"\n## {title}\n\n| what | vLLM | verdict | seconds | what is said |\n"
        text += "|---|---|---|---|---|\n"
        for row in found:
            if row["healthy"] == healthy:
                text += (
                    f"| {row['name']} | {row['release']} | {row['verdict']} | {row['seconds']} | "
                    f"{catalogue_rows.cell(row['said'], 400)} |\n"
                )
    return text


def main() -> int:
    """Run them; 1 when a healthy one is not green, or a sick one has not its own word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    status, found = catalogue_rows.run("test_gb10.py")
    options.output.write_text(page(found), "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
