"""`sm121.clock.measure` on the timed server: it gives the numbers of the performance level, and
refuses wrong requests."""

import itertools

import pytest

from meta_tests.fakes.recorded_clock import PROMPT, ROUNDS
from sm121 import clock
from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"tokens": ()}, "tokens: expected 1 or more, got []", id="no tokens"),
        pytest.param({"tokens": 32}, "tokens: expected a list of numbers, got 32", id="a number"),
        pytest.param({"depths": 0}, "depths: expected a list of numbers, got 0", id="a depth"),
        pytest.param({"rounds": 0}, "rounds: expected 1 or more, got [0]", id="no rounds"),
        pytest.param({"rounds": 99999999}, "rounds: expected at most 1000, got", id="for ever"),
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
    """If every third request fails, no rate is valid, and the table shows no mean of the failed
    requests."""
    server = timed_server("--rate", "400", "--fail-every", "3")
    result = clock.measure(server.base_url, prompt_tokens=PROMPT, tokens=(16,), rounds=ROUNDS)
    assert not result.valid
    assert any(line.startswith("tg16@d0: INVALID: ") for line in result.problems())
    rows = [line for line in result.table().splitlines() if "tg16" in line]
    assert len(rows) == 1 and "±" not in rows[0]


@pytest.mark.parametrize("known", [151_000, 1024])
def test_a_model_with_a_smaller_vocabulary_is_measured(timed_server, known):
    """A model with a smaller vocabulary can be measured.

    Qwen3 has 151,669 ids, and gpt-oss 199,998."""
    server = timed_server("--rate", "2000", "--known-ids", str(known))
    result = clock.measure(server.base_url, prompt_tokens=64, tokens=(16,), rounds=2)
    assert result.numbers["tg16@d0"].value, result.problems()
    for problem in result.problems():
        assert "vocabulary" not in problem


def test_the_names_are_unique_by_depth(timed_server):
    server = timed_server("--rate", "2000")
    result = clock.measure(
        server.base_url, prompt_tokens=64, tokens=(16,), depths=(0, 256), rounds=2
    )
    tests = [line.split(" | ")[1] for line in result.table().splitlines() if "gpt-oss" in line]
    assert tests == ["pp64", "tg16", "pp64 @ d256", "tg16 @ d256"]
    names = itertools.islice(result.numbers, 4)
    assert [*names] == ["pp64@d0", "tg16@d0", "pp64@d256", "tg16@d256"]
