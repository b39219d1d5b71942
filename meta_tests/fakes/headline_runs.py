"""Finished runs for tests of the headline."""

from typing import Any

from sm121.core.verdict import Verdict
from sm121.run.machine_report import CrashReport
from sm121.run.verdict_file import ChangeReport, EngineReport, MetricReport, TestReport, VerdictFile


def run_of(*tests: TestReport, **fields: Any) -> VerdictFile:
    """Return a finished and judged run that contains these tests."""
    engine = EngineReport(name="vllm", version="0.32.0", managed=True, model="m", startup_s=1.0)
    engine.path.attention = engine.path.moe = "X"
    file = VerdictFile(**{
        "arch": "cpu", "profile": "sm121-gpt-oss-120b", "started": "2026-01-12T09:14:03+00:00",
        "engine": engine, "finished": True, "tests": [*tests], **fields,
    })  # fmt: skip
    file.judge()
    file.reason = file.why()
    return file


def ended(
    name: str, verdict: Verdict = Verdict.FAIL, message: str = "it broke",
    level: str = "performance", **fields
) -> TestReport:  # fmt: skip
    return TestReport(id=f"x::{name}", level=level, verdict=verdict, message=message, **fields)


def rate(value: float, verdict: Verdict = Verdict.FAIL, **fields) -> MetricReport:
    return MetricReport(value=value, unit="tok/s", minimum=52.0, verdict=verdict, **fields)


def slower(verdict: Verdict = Verdict.FAIL, **fields: Any) -> ChangeReport:
    return ChangeReport(**{
        "metric": "tg32@d0", "unit": "tok/s", "here": 234.1, "before": 259.1, "worse": 0.0965,
        "allowed": 0.05, "beside": "the trusted run", "verdict": verdict, **fields,
    })  # fmt: skip


CRASH = CrashReport(
    kind="oom", summary="CUDA out of memory", owner="GPU memory", happened="the server died",
    test="x::test_many",
)  # fmt: skip


def passed(*levels: str, **fields) -> VerdictFile:
    return run_of(*(ended("test", Verdict.PASS, "", level) for level in levels), **fields)


ALL = ("smoke", "kernel", "correctness", "stress", "performance", "regression", "matrix")
