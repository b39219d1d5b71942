"""Kernel benchmarks: a kernel that skips work is INVALID, a slower one has a larger time, and
stored benchmarks can be compared.

The tests also cover replays, tactics and a device that no longer works."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from meta_tests.fakes import past_runs
from meta_tests.fakes.run_events import stand_in
from meta_tests.fakes.servers import executable
from meta_tests.folders import ROOT
from sm121.core import level_settings
from sm121.core.unmet import Fact, facts_text
from sm121.core.verdict import Invalid, NotRun
from sm121.kernels import benchmarks, cases, checks, child, problems
from sm121.kernels.protocol import Operation
from sm121.kernels.serving import ProviderChoice
from sm121.kernels.torch_provider import TorchProvider
from sm121.kernels.under_test import Kernels
from sm121.machine.stream_bandwidth import Bandwidth
from sm121.regression import trend
from sm121.regression.measured import MeasuredHistory
from sm121.run.engine_report import EngineReport
from sm121.run.ledger import Ledger
from sm121.run.stored_run import StoredMetric
from sm121.run.verdict_file import VerdictFile

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def timed(run_pytest):
    def run(provider, *options):
        return run_pytest(
            "tests/test_kernel.py", "--arch", "cpu", "-k", "kernel_speed and lm", *options,
            "--kernel-provider", f"meta_tests.fakes.kernel_providers:{provider}",
            environment={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    return run


def only(run) -> dict:
    (test,) = [t for t in run.verdict["tests"] if "kernel_speed" in t["id"]]
    return test


@pytest.mark.slow("two runs that time")
def test_a_slower_kernel_has_a_larger_number_and_both_can_be_compared(timed, tmp_path):
    files = tmp_path / "clean.json", tmp_path / "slow.json"
    status, run = timed("clean", f"--benchmark-json={files[0]}")
    assert status == 0, run.output
    status, run = timed(
        "slow", f"--benchmark-json={files[1]}",
        f"--benchmark-compare={files[0]}", "--benchmark-compare-fail=median:100%",
    )  # fmt: skip
    assert status == 1 and "Traceback" not in run.output, run.output
    verdicts = {test["id"].partition("[")[0]: test["verdict"] for test in run.verdict["tests"]}
    assert verdicts == {
        "tests/test_kernel.py::test_kernel_speed": "PASS",
        "tests/test_regression.py::test_no_metric_is_worse": "FAIL",
        "tests/test_regression.py::test_no_level_came_down": "PASS",
        "--benchmark-compare-fail::lm_head_us": "FAIL",
    }
    clean, slow = (json.loads(file.read_text())["benchmarks"][0] for file in files)
    assert slow["stats"]["median"] > clean["stats"]["median"] + 0.4
    extra = slow["extra_info"]
    assert extra["provider"] == "meta_tests.fakes.kernel_providers:slow"
    assert extra["bytes"] == 2 * (2880 * 201_088 // 16 + 2880 + 201_088 // 16)
    assert 0 < extra["roofline_share"] < 0.2


@pytest.mark.parametrize(
    ("timed_in_it", "expected"), [("a kernel", ["attention_decode_us@d0"]), ("no kernel", [])]
)
def test_a_time_is_missing_only_where_kernels_were_timed(timed_in_it, expected):
    """A missing kernel time is reported only if kernels were timed.

    A run of only ``tests/test_performance.py`` lacks no kernel time of a stored run of all levels.
    """
    now = [stored_metric("tg32@d0", None)]
    if timed_in_it == "a kernel":
        now.append(stored_metric("moe_decode_us", "fused_moe"))
    before = [*now, stored_metric("attention_decode_us@d0", "decode_attention")]
    recorder = SimpleNamespace(run=stand_in(ledger=Ledger(empty_file())))
    history = MeasuredHistory(recorder, "unused", Path())
    vars(history)["_now"] = past_runs.stored_run("now", *now)
    kept = history._without_unselected(past_runs.stored_run("0001", *before))
    missing = trend.missing(history.current, kept)
    assert [each.metric for each in missing] == expected


def stored_metric(name, case):
    return StoredMetric(name, "µs", False, None, (1.0,), 1.0, case=case)


def empty_file():
    return VerdictFile(
        arch="cpu", profile="p", started="", engine=EngineReport(name="e", model="m", managed=False)
    )


def test_times_of_other_sizes_are_not_compared():
    """Times of other sizes are not compared.

    ``--full-shapes`` on a CPU times the same operations at other sizes under the same names."""
    before = past_runs.stored_run("0001", stored_metric("moe_decode_us", "8 experts"))
    limits = level_settings.Regression()
    for case, judged in (("8 experts", 1), ("128 experts", 0)):
        now = {"moe_decode_us": stored_metric("moe_decode_us", case)}
        assert len(trend.compare(now, [before], limits)) == judged
    names = [case.metric for case in cases.select_timed((0, 4096), full=True)]
    assert len({*names}) == len(names) and "moe_decode_us" in names


def test_a_kernel_that_computes_something_else_is_invalid(timed):
    status, run = timed("wrong")
    assert status == 1, run.output
    assert only(run)["verdict"] == "INVALID"
    assert "the timed call does not compute lm_head:" in only(run)["message"]
    assert "slope of the error at most" in only(run)["message"]


def test_a_kernel_with_unchecked_omissions_exceeds_the_roofline():
    """A kernel that skips columns which are not checked exceeds the roofline.

    Its first and last columns are right."""
    case = cases.BenchmarkCase("lm-head", "lm_head", hidden=64, vocabulary=2048)
    timed = benchmarks.build(TorchProvider(), case)
    peak = Bandwidth((10.0,), "constructed")
    output = timed.call()
    honest = timed.bytes_moved / 5e9
    assert benchmarks.check(case, honest, timed, output, peak) == pytest.approx(0.5)
    with pytest.raises(Invalid, match=r"got 1\.5 of the bandwidth: .*did not do all its work"):
        benchmarks.check(case, timed.bytes_moved / 15e9, timed, output, peak)


@pytest.mark.parametrize("case", cases.select_timed((0, 40), full=False), ids=str)
def test_outputs_of_timed_kernels_are_judged(case):
    """The outputs of timed kernels are judged.

    A right kernel passes. A kernel with the output of an earlier call fails, as if a call was
    skipped. If it reads much memory, its time is also shorter than the memory allows; for one
    token, it is not."""
    if case.tokens > 64:
        case = dataclasses.replace(case, tokens=33)
    timed = benchmarks.build(TorchProvider(), case)
    before = timed.call()
    assert timed.judge(before) == []
    timed.renew()
    assert timed.judge(timed.call()) == []
    assert timed.judge(before), "expected a fact for the output of the last call"
    timed = benchmarks.build(TorchProvider(), case)
    output = timed.call()
    for part in as_parts(output):
        part.view(torch.uint8).fill_(0)
    assert timed.judge(output), "expected a fact for zeros"


@pytest.mark.parametrize("value", [0.0, torch.nan])
@pytest.mark.parametrize(("operation", "tokens"), [("fused_moe", 64), ("lm_head", 1)])
def test_a_kernel_that_omits_half_of_its_sums_fails(operation, tokens, value):
    """A compute-bound kernel that omits half of its sums fails, although it is not faster than the
    memory allows."""
    every = cases.select_timed((0,), full=False)
    case = next(case for case in every if (case.operation, case.tokens) == (operation, tokens))
    timed = benchmarks.build(TorchProvider(), case)
    output = timed.call()
    flat = output.view(-1)
    flat[flat.numel() // 3 : flat.numel() // 2] = value
    assert timed.judge(output)


# Replays


def recorded(call):
    output = call()

    def replay():
        fresh = call()
        for old, new in zip(as_parts(output), as_parts(fresh), strict=True):
            old.copy_(new)

    return replay, output


def as_parts(output):
    return output if isinstance(output, tuple) else (output,)


class Captured(TorchProvider):
    def __init__(self):
        super().__init__()
        attention = ("decode_attention", "decode_attention_fp8")
        self.graphs = frozenset({"route", "fused_moe", "mxfp4_linear", *attention})


REPLAYED = [case for case in cases.GROUPS["graph_replay"] if str(case).startswith(("rou", "dec"))]


@pytest.mark.parametrize("case", REPLAYED, ids=str)
def test_a_right_replay_passes(case):
    assert checks.check_replay(Captured(), problems.build(case), recorded) == []


def test_a_replay_of_the_captured_values_is_noticed():
    class Frozen(Captured):
        def prepare(self, operation, *arguments, **keywords):
            if operation != "route":
                return None
            logits = arguments[0].clone()
            return lambda: self.route(logits, arguments[1])

    problem = problems.build(REPLAYED[0])
    wrong = checks.check_replay(Frozen(), problem, recorded)
    assert "replayed into" in facts_text(wrong)


def test_a_replay_that_writes_nothing_is_noticed():
    problem = problems.build(REPLAYED[0])
    wrong = checks.check_replay(Captured(), problem, lambda call: (lambda: None, call()))
    assert "into NaN" in facts_text(wrong)


def test_operations_not_declared_capturable_are_not_run():
    problem = problems.build(cases.GROUPS["graph_replay"][0])
    with pytest.raises(NotRun, match="does not list fused_moe in `graphs`"):
        checks.check_replay(TorchProvider(), problem, recorded)


# Tactics


def kernels_of(provider: str) -> Kernels:
    choice = ProviderChoice(None, provider=f"meta_tests.fakes.kernel_providers:{provider}")
    process = child.of_this_process()
    return Kernels(dict.fromkeys(get_args(Operation), choice), lambda _name: process)


class ScriptedChild:
    """The answers of a process with four tactics.

    The catalogue of faults tests them with real processes."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def close(self) -> None:
        self.asked.append(("close",))

    def ask(self, question: str, *arguments: object, within_s: float | None = None) -> object:
        self.asked.append((question, within_s))
        if question == "tactics":
            return ["right", "wrong", "crash", "hang"]
        if question == "packages":
            return {}
        match arguments[-1]:
            case "wrong":
                return [{"required": "at most 0.01", "observed": "0.5", "about": "fused_moe"}]
            case "crash":
                raise child.ProcessEnded(Fact("a result", "the process ended with SIGABRT: "))
            case "hang":
                raise child.ProcessEnded(Fact(f"an end within {within_s:g} s"))
        return []


def test_a_tactic_that_is_wrong_crashes_or_hangs_does_not_hide_the_others():
    scripted = ScriptedChild()
    choice = ProviderChoice(None, provider="scripted")
    kernels = Kernels(dict.fromkeys(get_args(Operation), choice), lambda _name: scripted)
    facts = kernels.faults_of_tactics(cases.GROUPS["tactics"][0], limit_s=30)
    assert [str(fact).partition(":")[0] for fact in facts] == [
        "tactic wrong", "tactic crash", "tactic hang",
    ]  # fmt: skip
    assert "the process ended with SIGABRT" in str(facts[1])
    assert "an end within 30 s" in str(facts[2])
    assert scripted.asked == [
        ("tactics", None),
        *[("close",), ("packages", None), ("check", 30)] * 4,
    ]


@pytest.mark.slow("a child for each tactic, and one hangs for half a minute")
def test_each_tactic_is_judged_in_a_process_of_its_own():
    kernels = kernels_of("tuned")
    wrong = facts_text(kernels.faults_of_tactics(cases.GROUPS["tactics"][0], limit_s=30))
    assert "tactic right" not in wrong
    assert "tactic wrong: fused_moe into memory of NaN: expected " in wrong and "slope" in wrong
    assert "tactic crash: expected a result, got the process ended with SIGABRT" in wrong
    assert "tactic hang: expected an end within 30 s" in wrong
    kernels.child_of("").close()


class Reusing(TorchProvider):
    """A provider that returns the same memory each time, with other low bits."""

    name = "reusing"
    deterministic = frozenset({"fused_moe"})
    memory = None
    calls = 0

    def fused_moe(self, *arguments, **keywords):
        y = super().fused_moe(*arguments, **keywords)
        self.memory = y if self.memory is None else self.memory.copy_(y)
        self.calls += 1
        flat = self.memory.view(-1)
        flat.view(torch.int16)[flat.abs().argmin()] ^= self.calls & 1
        return self.memory


class RoutingReused(TorchProvider):
    """A provider like `Reusing`, but for the routing, which computes little."""

    name = "reusing"
    deterministic = frozenset({"route"})
    memory = None
    calls = 0

    def route(self, logits, k):
        shares, ids = super().route(logits, k)
        self.memory = shares if self.memory is None else self.memory.copy_(shares)
        self.calls += 1
        self.memory.view(torch.int32)[0, 0] ^= self.calls & 1
        return self.memory, ids


@pytest.mark.usefixtures("one_thread")
def test_two_runs_into_the_same_memory_are_compared_of_the_routing():
    case = next(case for case in cases.GROUPS["routing"] if case.tokens > 1 and not case.strided)
    (line,) = checks.check(RoutingReused(), problems.build(case))
    assert "declared deterministic, got two runs that differ" in str(line)


@pytest.mark.slow("nine seconds of experts")
def test_two_runs_into_the_same_memory_are_compared():
    (line,) = checks.check(Reusing(), problems.build(cases.GROUPS["tactics"][0]))
    assert "declared deterministic, got two runs that differ" in str(line)


@pytest.mark.slow("several processes with torch")
def test_a_case_that_ends_its_process_fails_and_the_next_one_runs():
    """A case that ends its process fails, and the next case runs.

    Before, an abort ended pytest, and a fault of the device left all other cases NOT_RUN."""
    kernels = kernels_of("faulty")
    aborted, faulted, ended, right = cases.GROUPS["routing"][1:5]
    reason = "tokens-1: expected a result, got the process ended with SIGABRT"
    assert facts_text(kernels.faults(aborted)).startswith(reason)
    assert "an illegal memory access" in facts_text(kernels.faults(faulted))
    assert "a result, got the process ended with 0" in facts_text(kernels.faults(ended))
    assert kernels.faults(right) == []
    with pytest.raises(NotRun, match="lists no autotune tactics"):
        kernels.faults_of_tactics(cases.GROUPS["tactics"][0])
    kernels.child_of("").close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("python", r"cannot be judged with .*python: No module named '\w+'; torch"),
        ("none", "none cannot be started"),
    ],
)
def test_an_interpreter_that_cannot_judge_is_named(tmp_path, name, reason):
    """An interpreter that cannot judge kernels is reported.

    One lacks the packages, and one does not exist."""
    executable(tmp_path / "python", f'exec {sys.executable} -S "$@"')
    other = child.Child(str(tmp_path / name), {"PATH": os.environ["PATH"]})
    with pytest.raises(NotRun, match=reason):
        other.ask("packages", "torch")


@pytest.mark.parametrize(
    ("cache_mib", "replaced_mib", "how"),
    [
        (1, 3, "perf_counter, cold last-level cache"),
        (85, 255, "perf_counter, cold last-level cache"),
        (86, 256, "perf_counter, 256 MiB read, cache of 86 MiB"),
        (480, 256, "perf_counter, 256 MiB read, cache of 480 MiB"),
    ],
)
def test_the_clock_reports_the_cleared_part_of_a_large_cache(
    cache_mib, replaced_mib, how, monkeypatch
):
    """The timer reports which part of a large cache is cleared.

    A GB10's caches are overwritten three times; a server's large cache only as far as time allows.
    """
    monkeypatch.setattr(
        benchmarks.stream_bandwidth, "last_level_cache_bytes", lambda: cache_mib << 20
    )
    clock = benchmarks.HostClock()
    assert (clock._other.nbytes >> 20, clock.how) == (replaced_mib, how)


def test_one_clock_for_all_tests():
    """All tests share one timer.

    The timer holds three times the last-level cache, and pytest-benchmark keeps the timer of each
    test. On a CPU with 480 MiB of L3, separate timers took 20 GB, and the kernel killed the run."""
    assert benchmarks.clock_of("cpu") is benchmarks.clock_of("cpu")
