"""Stored runs of pytest-benchmark that cannot be a baseline have a reason."""

import pytest

from sm121.run.stored_benchmarks import of_benchmarks


def benchmark(metric: str, verdict: str) -> dict:
    """Return the ``extra_info`` of a measurement."""
    return {
        "sm121": "0.2.0", "metric": metric, "value": 59.0, "unit": "tok/s",
        "samples": [58.9, 59.1], "verdict": verdict, "profile": "p",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("verdicts", "reasons"),
    [
        pytest.param({"tg32@d0": "PASS"}, (), id="none"),
        pytest.param({"tg32@d0": "FAIL", "ttft_p50": "PASS"}, ("its tg32@d0 was FAIL",), id="one"),
        pytest.param(
            {"tg32@d0": "NOT_RUN", "pp512@d0": "NOT_RUN", "ttft_p50": "FAIL"},
            (
                "2 of its metrics were NOT_RUN, the first of them tg32@d0",
                "its ttft_p50 was FAIL",
            ),
            id="several",
        ),
    ],
)
def test_metrics_of_one_verdict_are_one_reason(verdicts, reasons):
    extras = [benchmark(metric, verdict) for metric, verdict in verdicts.items()]
    run = of_benchmarks("0001", "2026-11-29T08:00:00+00:00", extras)
    assert run.unfit == reasons
