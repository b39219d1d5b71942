"""Compute the suite's numbers for a server of known rate, and the numbers of `sm121.clock` for the
same answers."""

import json
import pickle
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from meta_tests.texts import text_file
from sm121.client import timed_process
from sm121.core.level_settings import Measuring
from sm121.core.server import Endpoint
from sm121.measure import conclusion, metrics
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.measurement import Measurement
from sm121.measure.plan import Plan
from sm121.performance.bench import Bench

PROMPT = 512
TOKENS = (16, 64)
ROUNDS = 3
SETTINGS = {"prompt_tokens": PROMPT, "tokens": TOKENS, "rounds": ROUNDS}
#: The metrics of the performance level that `sm121.clock` can also measure, with their parameters.
METRICS = [
    ("pp", {}),
    ("tg", {"tokens": 16}),
    ("tg", {"tokens": 64}),
    ("ttft", {"quantile": 0.5}),
    ("tpot", {"quantile": 0.5}),
]


class Recorded(timed_process.TimedProcess):
    """The suite's client, which additionally stores its batches."""

    batches: ClassVar[list] = []

    def run(self, requests, **options):
        batch = super().run(requests, **options)
        self.batches.append(batch)
        return batch


def numbers_of_the_suite(url: str, folder: Path) -> dict[str, Measurement]:
    """Measure a server as the performance level does.

    The answers are stored in `Recorded.batches`.
    """
    plan = Plan(PROMPT, TOKENS, (0,), Measuring(rounds=ROUNDS))
    endpoint = Endpoint(url, "none", "gpt-oss-120b")
    Recorded.batches = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed_process, "TimedProcess", Recorded)
        with MeasuredServer.open(endpoint, plan, folder) as server:
            bench = Bench(server, plan)
            chosen = [metrics.find(key, **parameters) for key, parameters in METRICS]
            cell = bench.cell(0)
            for metric in chosen:  # a metric may need more rounds, which then count for all metrics
                bench.read(metric, cell)
            return {metric.name(cell): bench.read(metric, cell) for metric in chosen}


def digits(measured: Mapping[str, Measurement]) -> dict[str, Any]:
    """Return the numbers in the form in which the script of `sm121.clock` prints them."""
    shown = {}
    for name, each in measured.items():
        shown[name] = {
            "samples": each.samples,
            "track": each.track,
            "extra": each.extra,
            "invalid": [str(item) for item in each.invalid],
            "unproven": each.unproven,
            "estimate": vars(conclusion.estimate_of(each)),
        }
    return json.loads(json.dumps(shown))


def digits_of_the_clock(
    python: Sequence[str | Path], url: str, folder: Path, **options: Any
) -> dict[str, Any]:
    """Let `sm121.clock.measure` read the recorded answers in another interpreter."""
    recorded = folder / "recorded.pickle"
    recorded.write_bytes(pickle.dumps(Recorded.batches))
    script = folder / "clock_of_recorded_batches.py"
    script.write_text(text_file("clock-of-recorded-batches.txt"))
    done = subprocess.run(
        [*python, script, url, recorded, json.dumps(SETTINGS)],
        capture_output=True, text=True, timeout=120, check=False, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
