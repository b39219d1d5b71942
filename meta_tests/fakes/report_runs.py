"""Write constructed report directories that contain everything that a report must show.

No number was measured; the engine's version says so in each of them."""

import itertools
import json
import math
import random
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meta_tests.fakes import past_runs
from meta_tests.folders import DATA
from sm121.client.timed_answer import Chunk, TimedAnswer
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.evidence.crash_bundle import BundleIndex
from sm121.machine.timeline import TimelineSample
from sm121.matrix.feature_matrix import FailingSetReport, MatrixFile
from sm121.measure.growth import Growth
from sm121.regression import metric_levels
from sm121.run import details, machine_report, stored_run, verdict_file
from sm121.run.cell_record import CellOutcome, CellRate, CellRecord
from sm121.run.details import Details, FailureDetail
from sm121.run.verdict_file import MetricReport, TestReport, VerdictFile
from sm121.stress.memory import MemoryFile

HOSTILE = (
    "</script><script>window.owned=1</script><img src=x onerror='window.owned=2'>"
    "</pre><b>bold?</b>\u2028\u202etxt\x1b[31m"
)
_DATA: dict[str, Any] = tomllib.loads((DATA / "report-runs.toml").read_text("utf-8"))
#: Levels whose values are unknown after a crash.
_AFTER_A_CRASH = ("performance", "regression", "matrix")


def _metrics(decode: float, prefill: float, verdict: Verdict) -> dict[str, MetricReport]:
    metrics = {}
    undecided = verdict in (Verdict.INVALID, Verdict.INCONCLUSIVE)
    for depth, row in _DATA["depths"].items():
        factor = row["share"]
        limits = {k: v for k, v in row.items() if k != "share"}
        for kind, share, gate in (("tg32", 1.0, limits), ("tg128", 0.99, {})):
            value = decode * factor * share
            good = not gate or value * 0.985 >= gate["minimum"]
            rate = _rate(value, 0.985, 1.01, **gate)
            rate.grade = "minimum" if gate and good and verdict is Verdict.PASS else None
            rate.roofline = round(value / (74.0 * factor**0.4), 4)
            rate.verdict = verdict if undecided else Verdict.PASS if good else Verdict.FAIL
            metrics[f"{kind}@d{depth}"] = rate
        minimum = 4500.0 if depth == "0" else None
        rate = _rate(prefill * factor**1.6, 0.97, 1.03, minimum=minimum)
        rate.verdict = verdict if verdict is not Verdict.FAIL else Verdict.PASS
        metrics[f"pp2048@d{depth}"] = rate
    return metrics | {name: MetricReport(**row) for name, row in _DATA["metrics"].items()}


def _rate(value: float, low: float, high: float, **limits: float | None) -> MetricReport:
    """Return a rate with its interval. The bounds are fractions of the rate."""
    fields = {"value": value, "ci_low": value * low, "ci_high": value * high}
    return MetricReport(**_DATA["rate"] | fields | limits)


def _base(verdict: Verdict, decode: float) -> VerdictFile:
    """Return a passed run of an invented machine; for INVALID, the run uses Marlin."""
    run = VerdictFile.model_validate(_DATA["run"])
    run.metrics = _metrics(decode, 5140.0, verdict)
    run.box.reason = None
    run.tests = []
    for level, names in _DATA["levels"].items():
        for name in names:
            test = TestReport(
                id=f"tests/test_{level}.py::{name}", level=level, verdict=Verdict.PASS
            )
            test.seconds = round(1.0 + len(name) / 7, 1)
            run.tests.append(test)
    if verdict is Verdict.INVALID:
        on_marlin(run, native_fp4=False)
        path = run.engine.path
        message = "asked for flashinfer_cutlass, the log shows MARLIN"
        different = {"resolved": "MARLIN", "state": "different", "message": message}
        path.requested = [each.model_copy(update=different) for each in path.requested]
        run.engine.kernels.kernels[0].name = "marlin_moe_wna16::Marlin<...>"
    return run


def on_marlin(run: VerdictFile, *, native_fp4: bool | None) -> None:
    """Change a run so that its experts use Marlin."""
    run.engine.path.moe = "MARLIN"
    run.engine.path.native_fp4 = native_fp4
    run.engine.path.evidence["moe"] = "Using 'MARLIN' Mxfp4 MoE backend."


def _details(run: VerdictFile, decode: float) -> Details:
    chance = random.Random(121)

    def gaussian(middle: float, spread: float, count: int, unit: str, quantile: float) -> dict:
        samples = [middle * math.exp(chance.gauss(0, spread)) for _ in range(count)]
        limits = {"unit": unit, "higher_is_better": False, "quantile": quantile}
        return {**limits, "samples": samples}

    samples = {
        "ttft_p99": gaussian(410.0, 0.09, 480, "ms", 0.99),
        "tpot_p50": gaussian(1000.0 / decode, 0.02, 160, "ms", 0.5),
        "itl_p99": gaussian(1000.0 / decode, 0.06, 4000, "ms", 0.99),
        "e2e_p99": {**gaussian(2900.0, 0.05, 480, "ms", 0.99), "failures": 6},
    }

    def stored(value: float) -> stored_run.StoredMetric:
        return stored_run.StoredMetric("tg32@d0", "tok/s", True, None, (value,), value)

    history = []
    for day in range(1, 12):
        metric = stored((56.9 if day < 8 else 53.6) * math.exp(chance.gauss(0, 0.003)))
        started = f"2026-01-{day:02}T08:00:00+00:00"
        history.append(past_runs.stored_run(f"{day:04}_gb10.json", metric, started=started))
    return Details(
        command="python -m pytest -m sm121 --report-dir conformance-report",
        requirements={
            test.id: _DATA["requirements"].get(test.level, "A sentence of the test itself says it.")
            for test in run.tests
        },
        samples={name: details.samples_of(item) for name, item in samples.items()},
        history=metric_levels.series_of(
            {"tg32@d0": stored(decode)}, history, "2026-01-12T09:14:03+00:00"
        ),
    )


def _bad(
    run: VerdictFile, contents: Details, name: str, verdict: Verdict, fact: Fact, text: str = ""
) -> None:
    test = next(test for test in run.tests if test.id.endswith(name))
    test.verdict, test.message, test.unmet = verdict, str(fact), [fact]
    test.metrics = [name for name in run.metrics if name == fact.about]
    failure = FailureDetail(id=test.id, text=text or f"E   Unmet: {fact}")
    failure.location = f"{test.id.partition('::')[0]}:41"
    failure.reproduce = f"python -m pytest '{test.id}' -m sm121"
    contents.failures.append(failure)


def _crash(run: VerdictFile, contents: Details, directory: Path) -> None:
    """Change a run so that the server dies in the stress level, and the later tests do not run."""
    run.engine.path.failure = "illegal_memory_access"
    run.engine.path.evidence["failure"] = "CUDA error: an illegal memory access was encountered"
    for test in run.tests:
        if test.level in _AFTER_A_CRASH:
            test.verdict = Verdict.NOT_RUN
            test.skipped = True
            test.message = "the server died before it"
    run.metrics = {}
    contents.samples = {}
    contents.history = {}
    bundle = directory / run.crashes[0].bundle
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / "server.log").write_text("constructed\n")
    index = BundleIndex.model_validate(_DATA["bundle"])
    (bundle / "bundle.json").write_text(index.model_dump_json(by_alias=True))


def _hostile(run: VerdictFile, contents: Details) -> None:
    """Put hostile texts into every field that a model, a log or a name can fill."""
    run.engine.model = run.engine.path.evidence["moe"] = contents.command = HOSTILE
    run.unproven = [HOSTILE]
    run.remarks = [HOSTILE]
    contents.findings = [HOSTILE]
    run.environment["container"] = {HOSTILE: [HOSTILE, {"deep": HOSTILE}]}
    run.metrics[HOSTILE] = run.metrics["startup_s"]
    contents.history = {HOSTILE: contents.history["tg32@d0"]}
    contents.history[HOSTILE].points[2].run = HOSTILE
    _bad(run, contents, "test_known_answers", Verdict.FAIL, Fact("' Paris'", HOSTILE), HOSTILE)
    contents.failures[0].sections = {"Captured stdout": HOSTILE}
    hostile = dict.fromkeys(("kind", "summary", "owner", "bundle"), HOSTILE)
    run.crashes = [machine_report.CrashReport(**hostile)]


def write(kind: str, directory: Path) -> Path:
    """Write one of ``pass``, ``fail``, ``invalid``, ``inconclusive``, ``crash``, ``hostile``."""
    row = _DATA["kinds"][kind]
    verdict = Verdict(row["verdict"])
    decode = row.get("decode", 54.1)
    run = _base(verdict, decode)
    contents = _details(run, decode)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "server-cutlass.log").write_text("constructed\n")
    for bad in row.get("bad", ()):
        for name in bad["tests"]:
            judged = Verdict.FAIL if name == "test_moe_backend" else verdict
            _bad(run, contents, name, judged, Fact(**bad["fact"]))
    run.changes = [verdict_file.ChangeReport(**change) for change in row.get("changes", ())]
    run.crashes = [machine_report.CrashReport(**crash) for crash in row.get("crashes", ())]
    if "box" in row:
        run.box = machine_report.BoxReport(**row["box"])
    if kind == "crash":
        _crash(run, contents, directory)
    if kind == "hostile":
        _hostile(run, contents)
    run.tests = [test for test in run.tests if test.level != row.get("without")]
    run.judge()
    run.reason = row.get("reason", HOSTILE)
    verdict_file.write(run, directory / "verdict.json")
    details.write_details(contents, directory)
    label = HOSTILE if kind == "hostile" else "concurrent requests"
    (directory / "memory.json").write_text(_memory(label).model_dump_json())
    if kind != "crash":
        _records(directory, decode, HOSTILE if kind == "hostile" else None)
        (directory / "matrix").mkdir(exist_ok=True)
        (directory / "matrix" / "matrix.json").write_text(_matrix(label).model_dump_json())
    return directory


def _records(directory: Path, decode: float, error: str | None) -> None:
    """Write the requests of two cells.

    One request of the first cell has pauses, and one fails if an error is given."""
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
                answer.error = error
                answer.chunks = answer.chunks[:9]
            answers.append({"kind": "long", **asdict(answer)})
        lines = "".join(json.dumps(answer) + "\n" for answer in answers)
        (directory / "records" / f"{name}.jsonl").write_text(lines, "utf-8")


def _memory(label: str) -> MemoryFile:
    samples = []
    for second in range(0, 900, 5):
        level = 66.0 + 8.0 * (1 - math.exp(-second / 90)) + 0.15 * math.sin(second / 17)
        resident = int(level * 2**30 * (second / 200 if second < 200 else 1))
        starting = second < 200
        fields = {"at_s": second, "completed": max(0, second - 200), "device_bytes": None}
        fields |= {"rss_bytes": resident, "pss_bytes": resident}
        fields["available_bytes"] = int((118 - level) * 2**30)
        fields["cache_usage"] = None if starting else 0.3 + 0.2 * math.sin(second / 40)
        samples.append(
            TimelineSample(**fields, running=0.0 if starting else 8.0, **_DATA["sample"])
        )
    reason = f"+19.2 MiB [+0.3 MiB, +37.9 MiB] over 285 {label}; allowed +346 MiB in all"
    growth = Growth(**_DATA["growth"], verdict=Verdict.PASS, reason=reason)
    return MemoryFile(every_s=5.0, device_memory="MemAvailable", samples=samples, growth=[growth])


def _matrix(label: str) -> MatrixFile:
    values = _DATA["matrix"]["values"]
    last = (CellOutcome.CRASH, CellOutcome.FALLBACK, CellOutcome.NOT_RUN, CellOutcome.INVALID)
    outcomes = [CellOutcome.PASS] * 8 + list(last)
    cells = []
    for choice, outcome in zip(itertools.product(*values.values()), outcomes, strict=True):
        name = f"c{len(cells) + 1}"
        row = dict(zip(values, choice, strict=True))
        rate = CellRate(metric="tg32@d0", samples=[], value=54.1 - len(cells), ratio=1.0)
        fields = {"id": name, "configuration": name, "values": row, "rate": rate}
        reason = "" if outcome is CellOutcome.PASS else f"because of {label}"
        cells.append(CellRecord(**_DATA["cell"] | fields, outcome=outcome, reason=reason))
    text = f"moe=triton + kv=fp8 fail together: {label}"
    together = FailingSetReport(**_DATA["failing_set"], reason=label, text=text)
    return MatrixFile(**_DATA["matrix"], cells=cells, failing_sets=[together])
