"""Compare runs of one engine with each other.

``--against`` must find no difference between a run and the one before it.

``python -m meta_tests.faults.honest_pairs [--pairs 10] [--plan quick] [--output FILE]``:
differences between two runs of one engine are noise, and users switch off a gate that reports them.
Each run starts its own server; leave the machine idle meanwhile.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from meta_tests.folders import ROOT
from meta_tests.texts import text_file
from sm121.cli.command import progress
from sm121.run import verdict_file

_HEAD = text_file("honest-pairs.md")


def main() -> int:
    """Run the pairs of runs. The exit status is 1 if a run was called worse."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--plan", default="quick")
    parser.add_argument("--state", type=Path, default=ROOT / ".cache" / "honest-pairs")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "tables" / "honest-pairs.md")
    options = parser.parse_args()
    before = _run(options.state / f"{time.time():.0f}-0", options.plan)
    rows = []
    engine = ""
    good = 0
    for number in range(1, options.pairs + 1):
        began = time.monotonic()
        folder = _run(options.state / f"{time.time():.0f}-{number}", options.plan, against=before)
        run = verdict_file.read(folder / "verdict.json")
        if run.against is None:
            raise SystemExit(f"{folder}: expected a run that is compared with {before}")
        engine = f"{run.engine.name} {run.engine.version}"
        good += run.exit_status == 0 and run.against.no_worse
        rows.append(_row(number, run, (time.monotonic() - began) / 60))
        progress(rows[-1])
        before = folder
    head = _HEAD.format(plan=options.plan, engine=engine, pairs=options.pairs, passed=good)
    options.output.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")
    return int(good < options.pairs)


def _run(folder: Path, plan: str, against: Path | None = None) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    typed = [sys.executable, "-m", "pytest", "--arch=cpu", f"--plan={plan}"]
    typed += [f"--report-dir={folder}", *([f"--against={against}"] if against else [])]
    with folder.with_suffix(".txt").open("w", encoding="utf-8") as output:
        subprocess.run(typed, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    if not (folder / "verdict.json").is_file():
        raise SystemExit(f"expected a run, see {folder.with_suffix('.txt')}")
    return folder


def _row(number: int, run: verdict_file.VerdictFile, minutes: float) -> str:
    against = run.against
    wrong = [*against.new, *against.changed, *against.missing, *against.path, *against.worse]
    ran = sum(test.executed for test in run.tests)
    reasons = "; ".join(item.replace("|", "\\|") for item in wrong) or "nothing"
    return (
        f"| {number} | {run.verdict.value} | {ran} | {len(against.known)} | {reasons} | "
        f"{_most(run)} | {minutes:.1f} |"
    )


def _most(run: verdict_file.VerdictFile) -> str:
    before = run.against.measured if run.against is not None else {}
    changes = {}
    for name, metric in run.metrics.items():
        if name in before and metric.value and before[name].value:
            changes[name] = 100 * (metric.value / before[name].value - 1)
    if not changes:
        return "none measured"
    name = max(changes, key=lambda each: abs(changes[each]))
    return f"{name} {changes[name]:+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
