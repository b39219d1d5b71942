"""Run the regression level on the real vLLM.

An unchanged server must pass, and a server that is 10 % slower must fail.

`python -m meta_tests.faults.real_regression` starts vLLM on the CPU for each run, slowed in its
worker (`in_vllm/slower_worker.py`) if the run requires it, and writes
docs/tables/regression-shown.md. It takes about half an hour on an idle machine; `--runs` repeats
some of the runs.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meta_tests.faults import catalogue_rows
from meta_tests.folders import DATA, FAULTS, ROOT

TABLE = ROOT / "docs" / "tables" / "regression-shown.md"
STATE = ROOT / ".cache" / "real-regression"
#: How much longer the forward pass takes, as a fraction. The forward pass is not the whole time of
#: a token.
SLOWED = "SLOWED_BY=0.12"
PLAIN = "SLOWED_BY=0"
LEVELS = ("tests/test_performance.py", "tests/test_regression.py")
COMPARED = ("test_no_metric_is_missing", "test_no_metric_is_worse", "test_no_level_came_down")
AB = "test_b_is_not_worse_than_a"


@dataclass(frozen=True)
class Case:
    """A run with the required verdict of each test."""

    name: str
    arguments: tuple[str, ...]
    required: dict[str, tuple[str, ...]]


CASES = (
    Case("the first run", (*LEVELS, "--engine-env", PLAIN), {COMPARED[1]: ("NOT_RUN",)}),
    Case("the same again", (*LEVELS, "--engine-env", PLAIN),
         {COMPARED[0]: ("PASS",), COMPARED[1]: ("PASS", "INCONCLUSIVE")}),
    Case("10 % slower", (*LEVELS, "--engine-env", SLOWED), {COMPARED[1]: ("FAIL",)}),
    Case("A against A", (LEVELS[1], "--ab", PLAIN, PLAIN), {AB: ("PASS", "INCONCLUSIVE")}),
    Case("A against 10 % slower", (LEVELS[1], "--ab", PLAIN, SLOWED), {AB: ("FAIL",)}),
)  # fmt: skip


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Return verdict.json of the run, with its duration in seconds."""
    report = folder / case.name.replace(" ", "-").replace("%", "percent")
    started = time.monotonic()
    words = [
        *("-p", "no:cacheprovider", "--arch", "cpu", f"--report-dir={report}"),
        *(f"--profile={DATA / 'five-percent.toml'}", "--benchmark-autosave"),
        *(f"--benchmark-storage={folder / 'history'}", "--engine-env"),
        *(f"PYTHONPATH={FAULTS / 'in_vllm'}", *case.arguments),
        "--engine-arg=--worker-extension-cls=slower_worker.Slower",
    ]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    (folder / f"{report.name}.out").write_text(done.stdout + done.stderr, "utf-8")
    if not (report / "verdict.json").is_file():
        sys.exit(f"{case.name}: no verdict.json; the end of its output:\n{done.stdout[-3000:]}")
    verdict = json.loads((report / "verdict.json").read_text("utf-8"))
    return {**verdict, "seconds": time.monotonic() - started}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return docs/tables/regression-shown.md."""
    rows = []
    for case in (case for case in CASES if case.name in results):
        run = results[case.name]
        tests = {test["id"].split("::")[-1]: test for test in run["tests"]}
        for name, required in case.required.items():
            test = tests.get(name, {"verdict": "not there", "message": ""})
            rows.append((case.name, run, name, required, test))
    page = catalogue_rows.page(
        "regression-shown", rows=rows, value=_value,
        without_place=lambda text: re.sub(r"/\S+/history", "the history", text),
    )  # fmt: skip
    return page.rstrip() + "\n"


def _value(metrics: dict[str, Any], key: str) -> str:
    if (metric := metrics.get(key)) is not None:
        return f"{metric['value']:.1f} tok/s"
    if (metric := metrics.get(f"ab:{key}")) is not None:
        return f"B/A {metric['value']:.3f} [{metric['ci_low']:.3f}, {metric['ci_high']:.3f}]"
    return "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument(
        "--runs", choices=("history", "ab", "all"), default="all", help="which of the runs"
    )
    options = parser.parse_args()
    file = STATE / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    STATE.mkdir(parents=True, exist_ok=True)
    wrong = []
    with tempfile.TemporaryDirectory(dir=STATE) as folder:
        for case in CASES:
            if options.runs not in ("all", "ab" if "--ab" in case.arguments else "history"):
                continue
            result = results[case.name] = run(case, Path(folder))
            tests = {test["id"].split("::")[-1]: test["verdict"] for test in result["tests"]}
            verdicts = {name: tests.get(name, "not there") for name in case.required}
            print(f"{case.name}: {verdicts}, {result['seconds']:.0f} s", flush=True)
            wrong += [
                f"{case.name}: expected {name} {' or '.join(required)}, got {verdicts[name]}"
                for name, required in case.required.items()
                if verdicts[name] not in required
            ]
            file.write_text(json.dumps(results), "utf-8")
            options.output.write_text(table(results), "utf-8")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
