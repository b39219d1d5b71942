"""A project's tests of its own change, with the suite's fixtures, gates and verdicts. They import
only what docs/python-api.md names."""

import time

import pytest

from sm121.measure.gate import decide
from sm121.measure.measurement import Measurement
from sm121.profile import Gate
from sm121.verdict import Invalid, Verdict, require

pytestmark = [pytest.mark.applies_to("cpu", "gpu")]


@pytest.mark.smoke
def test_the_server_answers(http):
    """The server under test answers GET /health."""
    assert http.get("/health").status_code == 200


@pytest.mark.correctness
def test_our_endpoint_gives_text(client, model):
    """A completion has the requested number of tokens."""
    answer = client.completions.create(model=model, prompt="Hello", max_tokens=1)
    tokens = answer.usage.completion_tokens
    require(tokens == 1, "1 token", f"{tokens} tokens")


@pytest.mark.correctness
def test_a_gate_decides_on_an_interval():
    """The suite's gates, without a server."""
    target = Gate(metric="tg32@d0", unit="tok/s", minimum=52.0, source="our own target")
    good = decide([53.1, 53.0, 53.2, 53.1, 53.0] * 4, target, maximum_rounds=20)
    bad = decide([49.1, 49.0, 49.2, 49.1, 49.0] * 4, target, maximum_rounds=20)
    assert good.verdict is Verdict.PASS and bad.verdict is Verdict.FAIL


@pytest.mark.correctness
def test_a_number_of_the_wrong_path_is_invalid(kernel_path):
    """A verdict of its own: neither PASS nor FAIL."""
    if kernel_path.moe == "MARLIN":
        raise Invalid(f"expected our kernel, got {kernel_path.evidence['moe']}")


@pytest.mark.performance
def test_our_own_measurement(record_metric, http):
    """Recorded in verdict.json, in the report, and as a benchmark that can be compared."""
    samples = []
    for _ in range(6):
        start = time.perf_counter()
        http.get("/health")
        samples.append((time.perf_counter() - start) * 1000)
    record_metric(
        Measurement(name="health_p50", unit="ms", samples=samples, higher_is_better=False)
    )
