"""Each metric is one class with its definition, and a new metric needs only one new file."""

from types import SimpleNamespace

import pytest

from meta_tests.texts import text_file
from sm121.client.timed_answer import Chunk, TimedAnswer
from sm121.core.level_settings import Measuring
from sm121.measure import cells, metrics
from sm121.measure.plan import Plan
from sm121.performance.bench import Bench
from sm121.performance.checks import PerformanceChecks


@pytest.fixture
def one_file_more(tmp_path, monkeypatch):
    """Add a file to the package, with a metric that the suite does not have."""
    (tmp_path / "longest.py").write_text(text_file("longest-gap.txt"), "utf-8")
    monkeypatch.setattr(metrics, "__path__", [*metrics.__path__, str(tmp_path)])
    metrics.by_key.cache_clear()
    yield
    metrics.by_key.cache_clear()


def cell() -> cells.MeasuredCell:
    """A cell with three answers of eight tokens, 10 ms apart, with one gap of 25 ms."""
    plan = Plan(4, (8,), (0,), Measuring(rounds=3))
    server = SimpleNamespace(plan=plan, invalid=[], unproven=[], slots=None)
    measured = cells.MeasuredCell(server, 0)
    for start_ms in (0, 1000, 2000):
        answer = TimedAnswer(int(start_ms * 1e6), status=200, asked_tokens=8, asked_prompt=4)
        stamps = [start_ms + 100 + 10 * i + 15 * (i > 5) for i in range(8)]
        answer.chunks = [
            Chunk(int(at_ms * 1e6), None, i + 1, True, True, None) for i, at_ms in enumerate(stamps)
        ]
        answer.completion_tokens = 8
        answer.ended_ns = answer.chunks[-1].at_ns
        measured.timed.long.append([answer])
    return measured


def test_the_metrics_of_the_suite():
    assert set(metrics.by_key()) >= {"tg", "pp", "ttft", "tpot", "itl", "e2e", "streams"}
    for metric in metrics.by_key().values():
        definition = metric.__doc__ or ""
        assert "Source: " in definition and definition.startswith("``"), metric
        assert metric.higher_is_better == (metric.unit == "tok/s"), metric
    with pytest.raises(ValueError, match=r"no metric is named tgx: there are e2e, .*itl, pp, "):
        metrics.find("tgx")


def test_a_new_metric_is_one_new_file(one_file_more):
    recorded = []
    bench = Bench(SimpleNamespace(), cell().server.plan)
    bench.cell = lambda *_, **__: cell()
    PerformanceChecks(bench, lambda measurement, *_, **__: recorded.append(measurement)).measure(
        "longest", quantile=0.99
    )
    (measurement,) = recorded
    assert (measurement.name, measurement.unit) == ("longest_p99", "ms")
    assert measurement.samples == [25.0] * 3 and measurement.valid, measurement.invalid
    assert measurement.quantile == 0.99 and not measurement.higher_is_better
