"""Write the report directories of many runs, with injected deviations."""

from pathlib import Path

import numpy as np

from meta_tests.fakes import report_runs
from sm121.core.verdict import Verdict
from sm121.run import details, stored_run, verdict_file
from sm121.run.details import Details, Samples
from sm121.run.fingerprint import Fingerprint
from sm121.run.verdict_file import MetricReport, VerdictFile

CHECK = "tests/test_correctness.py::test_known_answers"
DECODE = "tests/test_performance.py::test_decode_rate[tg32-d0]"
_LOWER = {"ttft_p50": 130.0, "ttft_p99": 140.0, "itl_p99": 19.0}
_HIGHER = {"tg32@d0": 57.0, "tg32@d4096": 55.0, "pp2048@d0": 5140.0}


def base(folder: Path) -> VerdictFile:
    """Return a run with a complete report directory."""
    return stored_run.read_run(report_runs.write("pass", folder)).file


def plant(base, folder: Path, machines: dict[str, list[dict]], seed: int = 1) -> Path:
    """Write the runs of several machines.

    Each machine is a dict of ``slow`` (a factor on its times), ``red`` (ids of failed checks) and
    ``build`` (the engine's build). The noise between runs is 0.5 %."""
    random = np.random.default_rng(seed)
    for number, (unit, runs) in enumerate(machines.items()):
        for nth, planted in enumerate(runs):
            run = base.model_copy(deep=True)
            build = planted.get("build", nth)
            run.started = f"2026-{1 + nth // 28:02}-{1 + nth % 28:02}T0{number}:14:03+00:00"
            run.engine.version = run.engine.identity = "0.33.0"
            run.environment["gpus"] = [{"name": "NVIDIA GB10", "unit": unit}]
            run.environment["git_shas"] = {"vllm": {"sha": f"{build:09x}"}}
            sources = {"vllm": f"{build}"}
            machine = {"gpu": "NVIDIA GB10"}
            run.fingerprint = Fingerprint(profile="p1", sources=sources, machine=machine)
            contents = Details()
            run.metrics = {}
            for name, level in (_LOWER | _HIGHER).items():
                factor = planted.get("slow", 1.0) * float(np.exp(random.normal(0, 0.005)))
                value = level * factor if name in _LOWER else level / factor
                _measured(run, contents, name, value)
            for test in run.tests:
                if test.id in planted.get("red", ()):
                    test.verdict = Verdict.FAIL
                    test.message = "planted"
            run.judge()
            run.reason = run.why()
            directory = folder / unit / f"{nth:04}"
            directory.mkdir(parents=True)
            (directory / "report.html").write_text("<p>the report")
            verdict_file.write(run, directory / "verdict.json")
            details.write_details(contents, directory)
    return folder


def _measured(run, contents, name, value):
    higher = name in _HIGHER
    unit = "tok/s" if name in _HIGHER else "ms"
    gated = name == "tg32@d0"
    metric = MetricReport(value=value, unit=unit, rounds=5, minimum=52.0 if gated else None)
    metric.verdict = Verdict.FAIL if gated and value < 52 else Verdict.PASS
    metric.roofline = value / 74 if name.startswith("tg") else None
    run.metrics[name] = metric
    fields = {"unit": unit, "higher_is_better": higher, "samples": [value] * 5, "taken": 5}
    contents.samples[name] = Samples(**fields, quantile=0.99 if name.endswith("p99") else 0.5)


def healthy(count: int) -> list[dict]:
    return [{} for _ in range(count)]


def sixty(run: VerdictFile, folder: Path) -> Path:
    """Write 60 runs of two machines.

    One machine is 5 % slower, builds from the 21st run on are slower, and one check is flaky."""
    runs = healthy(30)
    for number in range(4, 10):
        runs[number] = {"build": 4, "red": [CHECK] if number in (4, 9) else []}
    for number in range(20, 30):
        runs[number] = {"slow": 1.12, "red": [DECODE]}
    slow = [{"slow": 1.05 * run.get("slow", 1.0), "build": p} for p, run in enumerate(runs)]
    return plant(run, folder, {"11a2b3c4": runs, "77d8e9f0": slow})
