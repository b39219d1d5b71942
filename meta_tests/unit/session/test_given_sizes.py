"""Options may replace sizes of the profile."""

import pytest

from sm121.core import options, profile
from sm121.core.errors import UsageError
from sm121.performance.options import MeasuringOptions
from sm121.session.given_sizes import GivenSizes
from sm121.session.settings import Settings
from sm121.stress.options import StressOptions

GB10 = profile.load("sm121-gpt-oss-120b")


def given(**values: str) -> GivenSizes:
    given_options = {f"--{name}": value for name, value in values.items()}
    return Settings(
        measuring=options.read(MeasuringOptions, given_options.get),
        stress=options.read(StressOptions, given_options.get),
    ).replaced


def test_the_load_of_the_guide_has_other_sizes():
    stress = given(requests="500", crowd="16").of(GB10).stress
    assert (stress.load_requests.value, stress.load_concurrency.value) == (500, 16)
    assert given().of(GB10) is GB10


def test_with_another_prompt_no_gate_of_a_rate_is_asked():
    """With another prompt length than the profile's, the gates of rates do not apply.

    52 tok/s after 512 tokens are less than after 2,048."""
    for judged in (given(pp="512").of(GB10), given(pp="512").of(GB10).judging("cutlass", "0.33.0")):
        assert judged.performance.prompt_tokens == 512
        gates = [gate.metric for gate in judged.performance.gates]
        assert gates == ["moe_decode_us", "startup_s"], "both hold for any prompt"
        assert judged.asks is None
    assert given(pp="2048").of(GB10) is GB10


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({}, []),
        ({"pp": "2048"}, []),
        ({"pp": "512"}, ["--pp 512: the gates on rates and times are left out"]),
        (
            {"requests": "20"},
            ["--requests, --crowd: the load was 20 requests, 8 at the same time"],
        ),
        (
            {"requests": "4"},
            ["--requests, --crowd: the load was 4 requests, 4 at the same time"],
        ),
    ],
)
def test_the_last_line_has_what_an_option_changes(values, lines):
    sizes = given(**values)
    assert sizes.deviations(sizes.of(GB10)) == lines


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"pp": "0"}, "--pp 0: expected a number, 1 or more"),
        ({"pp": "512,1024"}, "--pp 512,1024: expected a number"),
        ({"requests": "-1"}, "--requests -1: expected a number"),
        ({"crowd": "many"}, "--crowd many: expected a number"),
        ({"crowd": "201"}, "--crowd 201: expected at most the 200 requests of the load"),
        ({"requests": "4"}, None),
        ({"requests": "4", "crowd": "5"}, "--crowd 5: expected at most the 4 requests"),
    ],
)
def test_a_wrong_size_is_one_line(values, says):
    if says is None:
        assert given(**values).of(GB10).stress.load_requests.value == 4
        return
    with pytest.raises(UsageError, match=says):
        given(**values).of(GB10)
