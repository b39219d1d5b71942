"""Two constructed runs, and one of an A/B comparison; nothing in them was measured."""

import json
import random
import tomllib
from pathlib import Path

import report_runs

from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.regression import change
from sm121.regression.ab import FILE, AbFile, Visit
from sm121.run import details, verdict_file
from sm121.run.fingerprint import Fingerprint
from sm121.run.verdict_file import VerdictFile

_MACHINE = {"cpu_model": "20 cores, constructed", "gpu": "NVIDIA GB10", "gpus": 1}
_NAME = "tests/test_correctness.py::"


def _samples(middle: float, seed: int, **fields) -> details.Samples:
    chance = random.Random(seed)
    values = [middle * (1 + chance.gauss(0, 0.006)) for _ in range(24)]
    return details.Samples(samples=values, **fields)


def _finish(folder: Path, run: VerdictFile, rates: dict[str, float], *, seed: int) -> None:
    """Give a constructed run a fingerprint, and its rates the samples that they are medians of."""
    run.fingerprint = Fingerprint(profile="p1", profile_shipped=True, model="m1", machine=_MACHINE)
    stored = details.read(folder)
    for name, rate in rates.items():
        stored.samples[name] = _samples(rate, seed, unit="tok/s")
        run.metrics[name].value = rate
    stored.samples["ttft_p50"] = _samples(410.0, seed, unit="ms", higher_is_better=False)
    verdict_file.write(run, folder / "verdict.json")
    details.write(stored, folder)


def pair(folder: Path) -> tuple[Path, Path]:
    """A held; B is slower, on another MoE kernel; one test is fixed, one failed before."""
    one, two = (report_runs.write(kind, folder / kind) for kind in ("pass", "fail"))
    a, b = (verdict_file.read(path / "verdict.json") for path in (one, two))
    for run, name, fact in (
        (a, "test_tool_call", Fact("what is asked", "a call of a function that is not there")),
        (a, "test_known_answers", Fact("what is asked", "' Lyon'", evidence="after 812.5 ms")),
        (b, "test_known_answers", Fact("what is asked", "' Lyon'", evidence="after 790.1 ms")),
    ):
        test = next(test for test in run.tests if test.id == f"{_NAME}{name}")
        test.verdict, test.unmet = Verdict.FAIL, [fact]
        test.message = str(fact)
    b.tests = [test for test in b.tests if not test.id.endswith("test_cell[cutlass]")]
    report_runs.on_marlin(b, native_fp4=None)
    b.environment["cuda_version"] = "13.2"
    b.metrics["tg128@d0"].verdict = Verdict.INVALID
    a.metrics["itl_p99"] = a.metrics["ttft_p99"].model_copy()
    _finish(one, a, {"tg32@d0": 54.1, "tg128@d0": 53.6, "pp2048@d0": 5140.0}, seed=1)
    _finish(two, b, {"tg32@d0": 47.3, "tg128@d0": 47.0, "pp2048@d0": 5130.0}, seed=2)
    return one, two


_CHANGES = tomllib.loads((Path(__file__).parent / "data" / "compare-runs.toml").read_text("utf-8"))
_PATH = {"attention": "FLASHINFER", "cuda_graphs": True, "kv_layout": "LBHNC", "native_fp4": None}


def ab(folder: Path, *, proven: bool = True, text: str = "--moe-backend marlin") -> Path:
    """An A/B comparison: one metric is worse, one open, two hold. `text`: given for B."""
    report_runs.write("pass", folder)

    def visit(side: str, moe: str) -> Visit:
        return Visit(side, path={**_PATH, "moe": moe} if proven else {},
                     requested=[text] if side == "B" else [], log=f"server-{side}.log")  # fmt: skip

    def outcome(metric, unit, a, ratio, low, high, verdict, allowed=0.05):
        better = unit == "tok/s"
        return change.Change(
            metric, unit, better, a, a * ratio, ratio, low, high, 3, allowed, Verdict(verdict)
        )

    record = AbFile(
        sides=("", text),
        visits=[visit("A", "FLASHINFER_CUTLASS_MXFP4_MXFP8"), visit("B", "MARLIN")],
        outcomes=[outcome(metric, *row) for metric, row in _CHANGES.items()],
    )
    (folder / FILE).write_text(json.dumps(record.model_dump(mode="json")))
    return folder
