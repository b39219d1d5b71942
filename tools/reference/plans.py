"""Write the end of plans.md: the duration of each plan on a GB10, as `sm121 plan` prints it."""

import subprocess
import sys
import tempfile
from pathlib import Path

#: The part of the page above this line is written by hand.
MARK = "<!-- Made by `sm121 reference docs` from here on; do not edit it by hand. -->"
_PLAN = [sys.executable, "-m", "sm121", "plan", "--profile", "sm121-gpt-oss-120b"]


def page(docs: Path) -> str:
    """Return docs/plans.md with its end made anew, without durations measured on this machine.

    Args:
        docs: The folder ``docs`` of the checkout.

    Raises:
        CalledProcessError: `sm121 plan` has failed.
    """
    with tempfile.TemporaryDirectory() as nothing:
        done = subprocess.run(
            [
                *(*_PLAN, "--report-dir", str(Path(nothing) / "report")),
                f"--benchmark-storage={nothing}/benchmarks",
            ],
            cwd=docs.parent,
            check=True,
            capture_output=True,
            text=True,
        )
    by_hand = (docs / "plans.md").read_text("utf-8").partition(MARK)[0]
    end = done.stdout[done.stdout.index("| plan |") :]
    # The sentences on the machine that ran the command do not belong on a page.
    table = end[: end.index("The duration of a check is")]
    other = "For all other checks, "
    shipped = end[end.index(other) + len(other) :]
    return f"{by_hand}{MARK}\n\n{table}For each check, {shipped.strip()}\n"
