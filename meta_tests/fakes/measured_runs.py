"""Write reports with numbers that were measured on GPUs, for pictures of pages.

The rates are those of an H200 (docs/evidence/h200-120b-shape.log), and the published ones of a GB10
(fixtures/references.toml). The rest of the run is constructed. Data that were not measured, such as
requests, memory and history, are left out.
"""

import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

from meta_tests.fakes import report_runs
from meta_tests.folders import ROOT
from sm121.core import profile, unmet
from sm121.core.verdict import Verdict
from sm121.regression import change
from sm121.regression.ab import FILE, AbFile, Visit
from sm121.report import references
from sm121.run import details, verdict_file
from sm121.run.verdict_file import ChangeReport, MetricReport, TestReport, VerdictFile

LOG = ROOT / "docs" / "evidence" / "h200-120b-shape.log"
_RATE = re.compile(r"^(\S+@d\d+) ([\d.]+) ([\d.]+) ([\d.]+) tok/s PASS usage$", re.M)
#: The H200's memory bandwidth in GB/s according to that log, divided by the bytes per token at
#: depth 0.
_H200_ROOFLINE = 4092.0 / 5.0
_CUTLASS = "vLLM, CUTLASS FP8 x FP4"
_BEFORE = "vLLM, best before"
_VERSION = {
    "h200": "0.24.0 (rates of an H200, docs/evidence/h200-120b-shape.log)",
    _CUTLASS: "(rates as published: vLLM, CUTLASS FP8 x FP4)",
    _BEFORE: "(rates as published: vLLM, best before)",
}
_H200 = {"attention": "FLASH_ATTN", "moe": "MARLIN", "native_fp4": False}
_GATES = {gate.metric: gate for gate in profile.load("sm121-gpt-oss-120b").performance.gates}


def h200(start: int) -> dict[str, MetricReport]:
    """Return the rates of the first or the second server start on an H200, with their intervals."""
    blocks = LOG.read_text("utf-8").split("verdict PASS")[1:]
    metrics = {}
    for name, *numbers in _RATE.findall(blocks[start]):
        value, low, high = map(float, numbers)
        metrics[name] = _metric(name, value, low, high)
        if name.startswith("tg"):
            metrics[name].roofline = round(value / _H200_ROOFLINE, 4)
    return metrics


def published(engine: str) -> dict[str, MetricReport]:
    """Return the published rates of an engine on a GB10, with an interval if the source states a
    deviation."""
    (reference,) = (one for one in references.load().reference if one.name == engine)
    metrics = {}
    for name, value in reference.values.items():
        off = reference.deviations.get(name)
        low, high = (value - off, value + off) if off else (None, None)
        metrics[name] = _metric(name, value, low, high)
    return metrics


def _metric(name: str, value: float, low: float | None, high: float | None) -> MetricReport:
    gate = _GATES.get(name)
    least = gate.minimum if gate else None
    limits = ("minimum", "target", "stretch") if gate else ()
    reached = [grade for grade in limits if (getattr(gate, grade) or math.inf) <= value]
    return MetricReport(
        value=value, unit="ms" if name.startswith("ttft") else "tok/s", ci_low=low, ci_high=high,
        confidence=0.95 if low and high else None, minimum=least, clock="usage",
        target=gate.target if gate else None, stretch=gate.stretch if gate else None,
        verdict=Verdict.FAIL if least is not None and value < least else Verdict.PASS,
        grade=reached[-1] if reached else None,
    )  # fmt: skip


def write(kind: str, directory: Path) -> Path:
    """Write the report of a run: ``pass``, ``fail``, ``invalid``, ``inconclusive`` or ``crash``."""
    report_runs.write(kind, directory)
    if kind == "crash":  # it has no rates
        return directory
    source = {"pass": "h200", "fail": _CUTLASS}.get(kind, _BEFORE)
    run = verdict_file.read(directory / "verdict.json")
    run.metrics = h200(0) if kind == "pass" else published(source)
    _of(run, source)
    if kind in ("invalid", "inconclusive"):
        for metric in run.metrics.values():
            metric.verdict = Verdict(kind.upper())
            metric.grade = None
    if kind == "fail":
        _slower(run, published(_BEFORE))
    verdict_file.write(run, directory / "verdict.json")
    _forget(directory)
    return directory


def _of(run: VerdictFile, source: str) -> None:
    run.engine.version = _VERSION[source]
    run.engine.startup_s = None
    run.engine.kernels = None
    run.remarks = [f"The rates were measured {_VERSION[source]}; all else was constructed."]
    if source == "h200":
        run.arch = "sm90"
        run.profile = "h200-gpt-oss-120b"
        run.engine.configuration = "marlin"
        run.engine.path = run.engine.path.model_copy(
            update={**_H200, "requested": [], "kv_layout": None, "evidence": {
                "attention": "Using FLASH_ATTN attention backend",
                "moe": "Using 'MARLIN' Mxfp4 MoE backend.",
            }}
        )  # fmt: skip
        run.environment["gpus"] = [{"name": "NVIDIA H200", "driver": "580.159.04"}]
        run.environment.pop("environment")
        run.environment["engine_arguments"] = ["--moe-backend", "marlin"]


def _slower(run: VerdictFile, before: dict[str, MetricReport]) -> None:
    """Set the published decode rate to a value below the gate and below that of the previous
    run."""
    now = run.metrics["tg32@d0"].value
    earlier = before["tg32@d0"].value
    share = 1 - now / earlier
    for test in run.tests:
        if test.id.endswith("test_decode_rate[tg32-d0]"):
            _below(test, now, 52.0)
        elif test.id.endswith("test_no_metric_is_worse"):
            beside = f"against {earlier:.2f} (1 stored run), {100 * share:.1f}% worse"
            observed = f"{now:.2f} tok/s {beside}"
            test.message = f"tg32@d0: {observed}; 5% allowed"
            test.unmet = [replace(test.unmet[0], observed=f"{observed}; 5% allowed")]
    run.changes = [
        ChangeReport(metric="tg32@d0", unit="tok/s", here=now, before=earlier, worse=share,
                     allowed=0.05, beside="1 stored run", verdict=Verdict.FAIL)
    ]  # fmt: skip
    _judge(run)


def _judge(run: VerdictFile) -> None:
    run.judge()
    run.reason = next(test.message for test in run.tests if test.verdict is not Verdict.PASS)


def _forget(directory: Path) -> None:
    """Remove constructed measurements that are not among the numbers."""
    contents = details.read_details(directory)
    contents.samples = {}
    contents.history = {}
    details.write_details(contents, directory)
    for name in ("records", "matrix"):
        shutil.rmtree(directory / name, ignore_errors=True)
    (directory / "memory.json").unlink(missing_ok=True)


def _below(test: TestReport, value: float, limit: float) -> None:
    fact = unmet.Fact("at least", about="tg32@d0", value=value, limit=limit, unit="tok/s")
    test.message = str(fact)
    test.unmet = [fact]


def ab(folder: Path) -> Path:
    """Return the rates of two server starts on an H200 as an A/B comparison of four constructed
    pairs.

    One metric is undecided, and none is worse."""
    write("pass", folder)
    run = verdict_file.read(folder / "verdict.json")
    for test in run.tests:
        if test.id.endswith("test_no_metric_is_worse"):
            test.verdict = Verdict.INCONCLUSIVE
            test.message = "pp2048@d0: B is 2.6 % worse [-6.4, +0.7]; 5% allowed"
    _judge(run)
    verdict_file.write(run, folder / "verdict.json")
    one = h200(0)
    two = h200(1)

    def compared(name: str) -> change.Change:
        a = one[name]
        b = two[name]
        return change.Change(
            name, "tok/s", True, a.value, b.value, b.value / a.value, b.ci_low / a.ci_high,
            b.ci_high / a.ci_low, 4, 0.05,
            Verdict.PASS if b.ci_low / a.ci_high > 0.95 else Verdict.INCONCLUSIVE,
        )  # fmt: skip

    visits = [Visit(s, path=_H200, requested=[], log=f"server-{s}.log") for s in "ABBAABBA"]
    cells = itertools.product(("tg32", "tg128", "pp2048"), (0, 4096, 8192, 16384))
    outcomes = [compared(f"{metric}@d{depth}") for metric, depth in cells]
    sides = ("", "the same build, started again on another machine")
    record = AbFile(sides=sides, visits=visits, outcomes=outcomes)
    (folder / FILE).write_text(json.dumps(record.model_dump(mode="json")))
    return folder
