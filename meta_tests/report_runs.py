"""Report directories made by hand, each with what a report must be able to show. None of their
numbers was measured: every one says so in its engine's version."""

import itertools
import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import past_runs

from sm121.client.timed_answer import Chunk, TimedAnswer
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.evidence.crash_bundle import BundleIndex
from sm121.evidence.kernel_path import KernelPath, RequestReport
from sm121.evidence.kernel_profile import KernelProfile, KernelTime, PartTime
from sm121.matrix.feature_matrix import CoverageReport, FailingSetReport, MatrixFile
from sm121.matrix.outcome import CellOutcome, CellRate, CellRecord
from sm121.measure.growth import Growth
from sm121.regression import trend
from sm121.run import details, verdict_file
from sm121.run.details import Details, FailureDetail
from sm121.run.stored_run import StoredMetric
from sm121.run.verdict_file import (
    BoxReport,
    ChangeReport,
    CrashReport,
    EngineReport,
    MetricReport,
    StartReport,
    TestReport,
    VerdictFile,
)
from sm121.stress.memory import MemoryFile
from sm121.stress.timeline import Sample

HOSTILE = (
    "</script><script>window.owned=1</script><img src=x onerror='window.owned=2'>"
    "</pre><b>bold?</b>\u2028\u202etxt\x1b[31m"
)
_VERSION = "0.33.0 (constructed example, nothing was measured)"
_DEPTHS = {0: 1.0, 4096: 0.95, 8192: 0.90, 16384: 0.83, 32768: 0.70}
_MINIMUM = {0: 52.0, 4096: 47.0, 8192: 41.0, 16384: 34.0, 32768: 26.0}
_LEVELS = {
    "smoke": ("test_server_is_ready_in_time", "test_one_completion", "test_health"),
    "kernel": ("test_attention_backend", "test_moe_backend", "test_decode_attention[b8]"),
    "correctness": ("test_agrees_with_the_oracle", "test_known_answers", "test_tool_call"),
    "stress": ("test_many_sequential_requests", "test_memory_does_not_grow"),
    "performance": ("test_decode_rate[tg32-d0]", "test_prefill_rate[d0]", "test_gap"),
    "regression": ("test_no_metric_is_worse",),
    "matrix": ("test_cell[marlin]", "test_cell[cutlass]"),
}


_REQUIREMENTS = {
    "performance": "tg32 and tg128 at every depth: the number that the whole effort is about.",
    "regression": "No metric is worse than the last runs by more than its threshold and the noise.",
    "kernel": "The kernels that ran are the ones that the profile requires.",
    "stress": "Every request is answered, and the memory does not grow.",
}


def _metrics(decode: float, prefill: float, verdict: Verdict) -> dict[str, MetricReport]:
    metrics = {}
    for depth, factor in _DEPTHS.items():
        for kind, share in (("tg32", 1.0), ("tg128", 0.99)):
            value = decode * factor * share
            gated = kind == "tg32"
            good = not gated or value * 0.985 >= _MINIMUM[depth]
            metrics[f"{kind}@d{depth}"] = MetricReport(
                value=value,
                unit="tok/s",
                ci_low=value * 0.985,
                ci_high=value * 1.01,
                confidence=0.95,
                rounds=12,
                minimum=_MINIMUM[depth] if gated else None,
                target=58.0 if gated and depth == 0 else None,
                stretch=61.0 if gated and depth == 0 else None,
                grade="minimum" if gated and good and verdict is Verdict.PASS else None,
                clock="token_ids",
                roofline=round(value / (74.0 * factor**0.4), 4),
                verdict=verdict
                if verdict in (Verdict.INVALID, Verdict.INCONCLUSIVE)
                else (Verdict.PASS if good else Verdict.FAIL),
            )
        metrics[f"pp2048@d{depth}"] = MetricReport(
            value=prefill * factor**1.6,
            unit="tok/s",
            ci_low=prefill * factor**1.6 * 0.97,
            ci_high=prefill * factor**1.6 * 1.03,
            confidence=0.95,
            rounds=12,
            minimum=4500.0 if depth == 0 else None,
            clock="token_ids",
            verdict=verdict if verdict is not Verdict.FAIL else Verdict.PASS,
        )
    for name, value, most in (("ttft_p50", 410.0, None), ("ttft_p99", 640.0, 1000.0)):
        metrics[name] = MetricReport(
            value=value, unit="ms", ci_low=value * 0.95, ci_high=value * 1.1, rounds=480,
            at_most=most, clock="token_ids", verdict=Verdict.PASS,
        )  # fmt: skip
    metrics["startup_s"] = MetricReport(
        value=192.0, unit="s", rounds=1, at_most=300.0, verdict=Verdict.PASS
    )
    return metrics


def _path(verdict: Verdict) -> KernelPath:
    marlin = verdict is Verdict.INVALID
    moe = "MARLIN" if marlin else "FLASHINFER_CUTLASS_MXFP4_MXFP8"
    return KernelPath(
        attention="FLASHINFER",
        moe=moe,
        cuda_graphs=True,
        kv_layout="LBHNC",
        speculative="none",
        native_fp4=not marlin,
        evidence={
            "attention": "Using FLASHINFER attention backend out of potential backends: "
            "['FLASHINFER', 'TRITON_ATTN'].",
            "moe": f"Using '{moe}' Mxfp4 MoE backend.",
            "cuda_graphs": "Graph capturing finished in 11 secs, took 0.41 GiB",
            "kv_layout": "Using LBHNC KV cache layout.",
        },
        requested=[
            RequestReport(
                by="--moe-backend flashinfer_cutlass",
                field="moe",
                resolved=moe,
                state="different" if marlin else "resolved",
                message="asked for flashinfer_cutlass, the log shows MARLIN" if marlin else "",
            )
        ],
    )


def _profile(verdict: Verdict) -> KernelProfile:
    moe = "cutlass::gemm::MainloopSm120ArrayTmaWarpSpecializedBlockScaled<...>"
    names = (
        ("marlin_moe_wna16::Marlin<...>" if verdict is Verdict.INVALID else moe, "moe", 0.55),
        ("flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention", 0.17),
        ("cublasLt::gemm_bf16_lm_head", "dense", 0.21),
        ("mxfp8_quantize_kernel", "quantise", 0.07),
    )
    return KernelProfile(
        kind="gpu",
        source="constructed",
        steps=16,
        seconds=0.3,
        parts={p: PartTime(calls=576, seconds=0.3 * s, share=s) for _, p, s in names},
        kernels=[
            KernelTime(name=n, part=p, calls=576, seconds=0.3 * s, share=s) for n, p, s in names
        ],
    )


def _base(verdict: Verdict, decode: float, prefill: float) -> VerdictFile:
    """A whole run on a machine that nobody had, in which everything held."""
    run = VerdictFile(
        arch="sm121",
        profile="sm121-gpt-oss-120b",
        started="2026-01-12T09:14:03+00:00",
        duration_s=2765.0,
        finished=True,
        engine=EngineReport(
            name="vllm",
            version=_VERSION,
            managed=True,
            base_url="http://127.0.0.1:40177",
            model="openai/gpt-oss-120b",
            configuration="cutlass",
            startup_s=192.0,
            path=_path(verdict),
            kernels=_profile(verdict),
        ),
        box=BoxReport(state="QUALIFIED", reason=None, load_during=0.02),
        starts=[
            StartReport(
                configuration="cutlass", key="k", startup_s=192.0, log="server-cutlass.log",
                clean_stop=True,
            )
        ],
        metrics=_metrics(decode, prefill, verdict),
        environment={
            "git_shas": {"vllm": {"sha": "0" * 40, "dirty": False, "version": "0.33.0"}},
            "engine_packages": {"python": "3.12.3", "packages": {"vllm": "0.33.0"}},
            "cuda_version": "13.0",
            "gpus": [{"name": "NVIDIA GB10", "driver": "580.95", "memory_gib": 119.6}],
            "engine_arguments": ["--moe-backend", "flashinfer_cutlass"],
            "environment": {"FLASHINFER_CUDA_ARCH_LIST": "12.1a"},
        },
        remarks=["This run was constructed to show the report; nothing in it was measured."],
    )  # fmt: skip
    for level, names in _LEVELS.items():
        for name in names:
            run.tests.append(
                TestReport(
                    id=f"tests/test_{level}.py::{name}", level=level, verdict=Verdict.PASS,
                    seconds=round(1.0 + len(name) / 7, 1),
                )
            )  # fmt: skip
    return run


def _details(run: VerdictFile, decode: float) -> Details:
    chance = random.Random(121)

    def gaussian(middle: float, spread: float, count: int, unit: str, quantile: float) -> dict:
        return {
            "unit": unit,
            "higher_is_better": False,
            "quantile": quantile,
            "samples": [middle * math.exp(chance.gauss(0, spread)) for _ in range(count)],
        }

    samples = {
        "ttft_p99": gaussian(410.0, 0.09, 480, "ms", 0.99),
        "tpot_p50": gaussian(1000.0 / decode, 0.02, 160, "ms", 0.5),
        "itl_p99": gaussian(1000.0 / decode, 0.06, 4000, "ms", 0.99),
        "e2e_p99": {**gaussian(2900.0, 0.05, 480, "ms", 0.99), "failures": 6},
    }

    def stored(value: float) -> StoredMetric:
        return StoredMetric("tg32@d0", "tok/s", True, None, (value,), value)

    history = [
        past_runs.stored_run(
            f"{number:04}_gb10.json",
            stored((56.9 if number < 8 else 53.6) * math.exp(chance.gauss(0, 0.003))),
            started=f"2026-01-{number:02}T08:00:00+00:00",
        )
        for number in range(1, 12)
    ]
    return Details(
        command="python -m pytest -m sm121 --report-dir conformance-report",
        requirements={
            test.id: _REQUIREMENTS.get(test.level, "A sentence of the test itself says it.")
            for test in run.tests
        },
        samples={name: details.samples_of(item) for name, item in samples.items()},
        history=trend.series_of({"tg32@d0": stored(decode)}, history, "2026-01-12T09:14:03+00:00"),
    )


def _settle(run: VerdictFile, reason: str) -> None:
    run.judge()
    run.reason = reason


def _bad(
    run: VerdictFile, name: str, verdict: Verdict, fact: Fact, known: Details, text: str = ""
) -> None:
    for test in run.tests:
        if test.id.endswith(name):
            test.verdict, test.message, test.unmet = verdict, str(fact), [fact]
            test.metrics = [name for name in run.metrics if name == fact.about]
            known.failures.append(
                FailureDetail(
                    id=test.id,
                    text=text or f"E   Unmet: {fact}",
                    location=f"{test.id.partition('::')[0]}:41",
                    reproduce=f"python -m pytest '{test.id}' -m sm121",
                )
            )


def write(kind: str, directory: Path) -> Path:
    """One of ``pass``, ``fail``, ``invalid``, ``inconclusive``, ``crash``, ``hostile``."""
    verdict = Verdict(kind.upper()) if kind.upper() in Verdict.__members__ else Verdict.FAIL
    decode = 47.3 if kind == "fail" else 54.1
    run = _base(verdict, decode, prefill=5140.0)
    known = _details(run, decode)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "server-cutlass.log").write_text("constructed\n")
    crashes: list[dict] = []
    if kind == "pass":
        _settle(run, "17 checks ran and held")
    elif kind == "fail":
        rate = Fact("at least", "", "tg32@d0", value=47.3, limit=52.0, unit="tok/s",
                    evidence="46.6 to 47.8 with 95.0%, 12 rounds")  # fmt: skip
        _bad(run, "test_decode_rate[tg32-d0]", verdict, rate, known)
        worse = Fact("", "47.3 tok/s against 53.6 (5 stored runs), 11.8% worse; 5% allowed; "
                     "Mann-Whitney p = 4.1e-06, chance among the stored runs 0.0021",
                     "tg32@d0")  # fmt: skip
        _bad(run, "test_no_metric_is_worse", verdict, worse, known)
        run.changes = [
            ChangeReport(metric="tg32@d0", unit="tok/s", here=47.3, before=53.6, worse=0.1175,
                         allowed=0.05, beside="5 stored runs", verdict=verdict)
        ]  # fmt: skip
        _settle(run, f"{rate} (and 1 more)")
    elif kind == "invalid":
        why = "kernel_path: asked for flashinfer_cutlass, the log shows MARLIN"
        _bad(run, "test_moe_backend", Verdict.FAIL,
             Fact("FLASHINFER_CUTLASS_MXFP4_MXFP8", "MARLIN"), known)  # fmt: skip
        run.tests = [test for test in run.tests if test.level != "kernel"]
        for name in ("test_decode_rate[tg32-d0]", "test_prefill_rate[d0]", "test_gap"):
            _bad(run, name, verdict, Fact("", why, "tg32@d0"), known)
        _settle(run, f"tg32@d0: {why} (and 2 more)")
    elif kind == "inconclusive":
        why = (
            "the box is DEGRADED: the clock under load is 799 MHz and 19.5 W, required 1200 MHz: "
            "the stuck state of GB10; unplug it for a minute"
        )
        run.box = BoxReport(state="DEGRADED", reason=why.removeprefix("the box is DEGRADED: "))
        for name in ("test_decode_rate[tg32-d0]", "test_prefill_rate[d0]", "test_gap"):
            _bad(run, name, verdict, Fact("", why, "tg32@d0"), known)
        _settle(run, f"tg32@d0: {why} (and 2 more)")
    elif kind == "crash":
        run.engine.path.failure = "illegal_memory_access"
        run.engine.path.evidence["failure"] = "CUDA error: an illegal memory access was encountered"
        lost = Fact("every request is answered", "the server died after 61 of 100",
                    evidence="illegal_memory_access")  # fmt: skip
        _bad(run, "test_many_sequential_requests", verdict, lost, known)
        run.tests = [
            test if test.level not in ("performance", "regression", "matrix")
            else test.model_copy(update={"verdict": Verdict.NOT_RUN, "skipped": True,
                                         "message": "NOT_RUN: the server died before it"})
            for test in run.tests
        ]  # fmt: skip
        run.metrics = {}
        known.samples, known.history = {}, {}
        crashes = [
            {
                "kind": "illegal_memory_access",
                "summary": "an illegal memory access was encountered in the MoE of layer 17",
                "owner": "FlashInfer, fused_moe for SM12x",
                "happened": "the server died",
                "test": "tests/test_stress.py::test_many_sequential_requests",
                "bundle": "crashes/1-illegal_memory_access",
            }
        ]
        bundle = directory / "crashes" / "1-illegal_memory_access"
        bundle.mkdir(parents=True, exist_ok=True)
        (bundle / "server.log").write_text("constructed\n")
        lines = [
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "(EngineCore pid=4121) File flashinfer/fused_moe/core.py, line 412",
        ]
        described = BundleIndex(
            kind="illegal_memory_access",
            what="the engine core died",
            summary=crashes[0]["summary"],
            owner=crashes[0]["owner"],
            remedy="run again with --engine-debug: the failing launch is then the named one",
            lines=lines,
            test=crashes[0]["test"],
            at="2026-01-12T09:31:40+00:00",
            exit_status=-6,
            exits=[],
            engine_debug=False,
            rerun="pytest --engine-debug 'tests/test_stress.py::test_many_sequential_requests'",
            parts={"server.log": {"file": "server.log"}},
        )
        (bundle / "bundle.json").write_text(described.model_dump_json(by_alias=True))
        _settle(run, "the server died (illegal_memory_access) in test_many_sequential_requests")
    elif kind == "hostile":
        run.engine.model = HOSTILE
        run.engine.path.evidence["moe"] = HOSTILE
        run.unproven = [HOSTILE]
        run.remarks = [HOSTILE]
        run.environment["container"] = {HOSTILE: [HOSTILE, {"deep": HOSTILE}]}
        run.metrics[HOSTILE] = run.metrics["startup_s"]
        known.command = HOSTILE
        known.findings = [HOSTILE]
        known.history = {HOSTILE: known.history["tg32@d0"]}
        known.history[HOSTILE].points[2].run = HOSTILE
        _bad(run, "test_known_answers", verdict,
             Fact("' Paris'", HOSTILE), known, text=HOSTILE)  # fmt: skip
        known.failures[0].sections = {"Captured stdout": HOSTILE}
        crashes = [{"kind": HOSTILE, "summary": HOSTILE, "owner": HOSTILE, "bundle": HOSTILE}]
        _settle(run, HOSTILE)
    run.crashes = [CrashReport(**crash) for crash in crashes]
    verdict_file.write(run, directory / "verdict.json")
    details.write(known, directory)
    if kind != "crash":
        _records(directory, decode, HOSTILE if kind == "hostile" else None)
    label = HOSTILE if kind == "hostile" else "concurrent requests"
    (directory / "memory.json").write_text(_memory(label).model_dump_json())
    if kind not in ("crash",):
        (directory / "matrix").mkdir(exist_ok=True)
        (directory / "matrix" / "matrix.json").write_text(_matrix(label).model_dump_json())
    return directory


def _records(directory: Path, decode: float, error: str | None) -> None:
    """Requests of two cells; one of the first has pauses, and one fails where an error is given."""
    chance = random.Random(7)
    (directory / "records").mkdir(exist_ok=True)
    for name, streams in (("d0-c1", 1), ("d4096-c4", 4)):
        answers = []
        for request in range(6):
            at = sent = 10**9 * (1 + 4 * request)
            answer = TimedAnswer(sent, asked_tokens=64, asked_prompt=2048 + int(name[1:-3]))
            at += int(0.41e9 * chance.uniform(0.95, 1.1))
            for token in range(64):
                answer.chunks.append(Chunk(at, 1, token + 1, True, True, None, 300))
                pause = 6 if request == 4 and token in (20, 41) else 1
                at += int(1e9 / decode * pause * streams**0.5 * chance.uniform(0.9, 1.1))
            answer.ended_ns = answer.chunks[-1].at_ns + 400_000
            if error and request == 5:
                answer.error, answer.chunks = error, answer.chunks[:9]
            answers.append({"kind": "long", **asdict(answer)})
        lines = "".join(json.dumps(answer) + "\n" for answer in answers)
        (directory / "records" / f"{name}.jsonl").write_text(lines, "utf-8")


def _memory(label: str) -> MemoryFile:
    samples = []
    for second in range(0, 900, 5):
        level = 66.0 + 8.0 * (1 - math.exp(-second / 90)) + 0.15 * math.sin(second / 17)
        held = int(level * 2**30 * (second / 200 if second < 200 else 1))
        samples.append(
            Sample(
                at_s=second,
                completed=max(0, second - 200),
                processes=3,
                rss_bytes=held,
                pss_bytes=held,
                handles=210,
                device_bytes=None,
                available_bytes=int((118 - level) * 2**30),
                cache_usage=None if second < 200 else 0.3 + 0.2 * math.sin(second / 40),
                running=0.0 if second < 200 else 8.0,
                waiting=0.0,
            )
        )
    growth = Growth(
        quantity="bytes of the processes",
        samples=140,
        requests=285,
        verdict=Verdict.PASS,
        reason=f"+19.2 MiB [+0.3 MiB, +37.9 MiB] over 285 {label}; allowed +346 MiB in all",
    )
    return MemoryFile(every_s=5.0, device_memory="MemAvailable", samples=samples, growth=[growth])


def _matrix(label: str) -> MatrixFile:
    cells: list[CellRecord] = []
    outcomes = [CellOutcome.PASS] * 8 + [
        CellOutcome.CRASH, CellOutcome.FALLBACK, CellOutcome.NOT_RUN, CellOutcome.INVALID
    ]  # fmt: skip
    values = {
        "moe": ["marlin", "cutlass", "triton"],
        "attention": ["flashinfer", "triton"],
        "kv": ["auto", "fp8"],
    }
    for number, choice in enumerate(itertools.product(*values.values())):
        outcome = outcomes[number]
        cells.append(
            CellRecord(
                id=f"c{number + 1}",
                values=dict(zip(values, choice, strict=True)),
                why=["pairs"],
                configuration=f"c{number + 1}",
                arguments=[],
                outcome=outcome,
                reason="" if outcome is CellOutcome.PASS else f"because of {label}",
                rate=CellRate(metric="tg32@d0", samples=[], value=54.1 - number, ratio=1.0),
                took_s=61.0,
            )
        )
    together = FailingSetReport(
        values={"moe": "triton", "kv": "fp8"},
        outcome=CellOutcome.CRASH,
        reason=label,
        cells=["c9"],
        confirmed=True,
        text=f"moe=triton + kv=fp8 fail together: {label}",
    )
    pairs = CoverageReport(strength=2, allowed=47, covered=47, ran=45, incompatible=3)
    return MatrixFile(
        axes="sm121",
        engine="vllm",
        version="0.24.0",
        strength=2,
        profile="sm121-gpt-oss-120b",
        values=values,
        baseline={axis: names[0] for axis, names in values.items()},
        product=12,
        cells=cells,
        not_run=["c13"],
        coverage=[pairs],
        failing_sets=[together],
        spent={},
    )
