"""`clock.measure` on the paced server: the numbers of the performance level, and refusals."""

import itertools
from collections.abc import Iterator
from typing import ClassVar

import pytest

from sm121 import clock
from sm121.client import timed_process
from sm121.core.errors import UsageError
from sm121.core.level_settings import Measuring
from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun
from sm121.measure import conclusion, metrics
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.plan import Plan
from sm121.performance.bench import Bench

RATE = 200.0
PROMPT = 512
TOKENS = (16, 64)
ROUNDS = 3
#: The metrics of the performance level that `clock` has, with their parameters.
METRICS = [
    ("pp", {}),
    ("tg", {"tokens": 16}),
    ("tg", {"tokens": 64}),
    ("ttft", {"quantile": 0.5}),
    ("tpot", {"quantile": 0.5}),
]


def numbers_of_the_suite(url: str, directory) -> dict:
    """Measure a server as the performance level does."""
    plan = Plan(PROMPT, TOKENS, (0,), Measuring(rounds=ROUNDS))
    endpoint = Endpoint(url, "none", "gpt-oss-120b")
    with MeasuredServer.open(endpoint, plan, directory) as server:
        bench = Bench(server, plan)
        chosen = [metrics.find(key, **parameters) for key, parameters in METRICS]
        cell = bench.cell(0)
        for metric in chosen:  # some may need more rounds, which then count for all
            bench.read(metric, cell)
        return {metric.name(cell): bench.read(metric, cell) for metric in chosen}


class Recorded(timed_process.TimedProcess):
    """The suite's client, whose batches are kept."""

    batches: ClassVar[list] = []

    def run(self, requests, **options):
        batch = super().run(requests, **options)
        self.batches.append(batch)
        return batch


class Replayed(timed_process.TimedProcess):
    """A client whose server gives the recorded answers once more."""

    batches: ClassVar[Iterator] = iter(())

    def run(self, requests, **_options):
        batch = next(self.batches)
        asked = [(request.asked_prompt, request.asked_tokens) for request in requests]
        assert [(each.asked_prompt, each.asked_tokens) for each in batch.answers] == asked
        return batch


def test_the_digits_are_those_of_the_suite(timed_server, tmp_path, monkeypatch):
    """Of the same answers, every sample, value and interval is the same to the last digit."""
    server = timed_server("--rate", str(RATE), "--trap", "no-metrics")
    monkeypatch.setattr(Recorded, "batches", [])
    monkeypatch.setattr(timed_process, "TimedProcess", Recorded)
    expected = numbers_of_the_suite(server.base_url, tmp_path)
    monkeypatch.setattr(Replayed, "batches", iter(Recorded.batches))
    monkeypatch.setattr(timed_process, "TimedProcess", Replayed)
    result = clock.measure(server.base_url, prompt_tokens=PROMPT, tokens=TOKENS, rounds=ROUNDS)
    assert (
        [*result.numbers]
        == [*expected]
        == ["pp512@d0", "tg16@d0", "tg64@d0", "ttft_p50", "tpot_p50"]
    )
    for name, measurement in expected.items():
        number = result.numbers[name]
        own = number.measurement.model_copy(update={"records": measurement.records})
        assert own == measurement
        assert number.estimate == conclusion.estimate_of(measurement)
    assert next(Replayed.batches, None) is None, "it sends what the suite sends"
    assert result.numbers["tg64@d0"].value == pytest.approx(RATE, rel=0.02)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"tokens": ()}, "tokens: expected 1 or more, got []", id="no tokens"),
        pytest.param({"rounds": 0}, "rounds: expected 1 or more, got [0]", id="no rounds"),
        pytest.param({"prompt_tokens": 0}, "prompt_tokens: expected 1 or more", id="no prompt"),
        pytest.param({"depths": (-1,)}, "depths: expected 0 or more, got [-1]", id="depth"),
        pytest.param({"model": "other"}, "expected a server of 'other'", id="another model"),
        pytest.param({"depths": (10**9,)}, "need a context of", id="context"),
    ],
)
def test_a_wrong_request_is_one_line(timed_server, wrong, message):
    server = timed_server("--rate", "400")
    with pytest.raises((UsageError, NotRun)) as refused:
        clock.measure(server.base_url, **wrong)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_failed_request_is_in_the_numbers(timed_server):
    """Every third request fails: no rate is believed, and the table has no mean of failures."""
    server = timed_server("--rate", "400", "--fail-every", "3")
    result = clock.measure(server.base_url, prompt_tokens=PROMPT, tokens=(16,), rounds=ROUNDS)
    assert not result.valid
    assert any(line.startswith("tg16@d0: INVALID: ") for line in result.problems())
    rows = [line for line in result.table().splitlines() if "tg16" in line]
    assert len(rows) == 1 and "±" not in rows[0]


def test_the_names_are_unique_by_depth(timed_server):
    server = timed_server("--rate", "2000")
    result = clock.measure(
        server.base_url, prompt_tokens=64, tokens=(16,), depths=(0, 256), rounds=2
    )
    tests = [line.split(" | ")[1] for line in result.table().splitlines() if "gpt-oss" in line]
    assert tests == ["pp64", "tg16", "pp64 @ d256", "tg16 @ d256"]
    names = itertools.islice(result.numbers, 4)
    assert [*names] == ["pp64@d0", "tg16@d0", "pp64@d256", "tg16@d256"]
