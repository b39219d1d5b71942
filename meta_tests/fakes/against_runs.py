"""Create runs for tests of ``--against``, and compare them with a trusted run."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from sm121.core import profile
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.evidence.kernel_path import KernelPath
from sm121.run import details, verdict_file
from sm121.run.details import Details, Samples
from sm121.run.fingerprint import Fingerprint
from sm121.run.stored_run import StoredMetric
from sm121.run.verdict_file import EngineReport, MetricReport, TestReport, VerdictFile
from sm121.session import against, trusted_runs

REGRESSION = profile.load("sm121-gpt-oss-120b").regression
OWN = profile.load("cpu-tiny-gpt-oss").model_copy(update={"regression": REGRESSION})
PATH = KernelPath(attention="CPU_ATTN", moe="CPU", kv_cache_dtype="auto", dtype="bfloat16")
REFUSED = Fact("400 or 422", "500 x", "bad-json", evidence="chatcmpl-0123456789")
ORACLE = Fact(
    "a difference of at most", "at token 14", "prompt capitals",
    kind="difference", value=0.0912, limit=0.058, unit="nats",
)  # fmt: skip


def rates(level: float, seed: int) -> tuple[float, ...]:
    scatter = random.Random(seed)
    return tuple(level * scatter.gauss(1.0, 0.004) for _ in range(20))


def ended(name: str, verdict: str, message: str | Fact, level: str = "correctness") -> TestReport:
    if isinstance(message, Fact):
        return TestReport.of(name, level, message, verdict=Verdict(verdict))
    return TestReport(id=name, level=level, verdict=Verdict(verdict), message=message)


def a_run(
    *tests: tuple[str, str, str | Fact], rate: float = 50.0, seed: int = 1, **fields
) -> VerdictFile:
    middle = sorted(rates(rate, seed))[10]
    metric = MetricReport(value=middle, unit="tok/s", rounds=20, verdict=Verdict.PASS)
    whole = {
        "engine": EngineReport(
            name="vllm", version="0.24.0", managed=True, model="m", startup_s=60.0, path=PATH
        ),
        "metrics": {"tg32@d0": metric},
        "finished": True,
        "arch": "cpu",
        "profile": OWN.name,
        "fingerprint": Fingerprint(model="0123", machine={"cpu_model": "one"}, arguments=["--x"]),
        "started": "2026-11-23T08:00:00+00:00",
        "tests": [ended(*test) for test in tests],
    }
    file = VerdictFile(**(whole | fields))
    file.judge()
    return file


def stored(file: VerdictFile, folder: Path, rate: float = 50.0, seed: int = 1) -> Path:
    folder.mkdir()
    verdict_file.write(file, folder / "verdict.json")
    samples = Samples(unit="tok/s", samples=list(rates(rate, seed)))
    details.write_details(Details(samples={"tg32@d0": samples}), folder)
    return folder


TESTS = (
    ("tests/a.py::holds", "PASS", ""),
    ("tests/a.py::refuses", "FAIL", REFUSED),
    ("tests/a.py::computes", "FAIL", ORACLE),
)


def held(run: VerdictFile, trusted: trusted_runs.Trusted, rate: float = 50.0, seed: int = 2,
         left_out=(), reasons: Mapping[str, str] | None = None,
         ) -> tuple[VerdictFile, list[TestReport]]:  # fmt: skip
    for test in run.tests:
        if test.verdict is Verdict.FAIL and trusted.known(test):
            test.tolerated = "known"
    samples = rates(rate, seed)
    now = StoredMetric("tg32@d0", "tok/s", True, None, samples, sorted(samples)[10])
    metrics = {"tg32@d0": now} if rate else {}
    return run, compared(run, trusted, metrics, lambda test: test.id not in left_out, reasons)


def compared(
    run: VerdictFile,
    trusted: trusted_runs.Trusted,
    metrics: dict[str, StoredMetric],
    asked_for: Callable[[TestReport], bool] = lambda _test: True,
    reasons: Mapping[str, str] | None = None,
) -> list[TestReport]:
    """Compare a run with a trusted run, as its session does at its end, and return the decisions of
    the comparison."""
    comparison = against.compare_with_trusted(run, trusted, OWN, metrics, asked_for, reasons)
    run.against = comparison.report
    run.changes = comparison.changes
    run.tests += comparison.worse
    run.judge()
    return comparison.worse


def changed(number: int, *values: str | Fact) -> tuple[tuple[str, str, str | Fact], ...]:
    tests = [list(test) for test in TESTS]
    for n, value in enumerate(values, 3 - len(values)):
        tests[number][n] = value
    return tuple(tuple(test) for test in tests)


def of(test: TestReport, **fields) -> TestReport:
    return test.model_copy(update=fields)
