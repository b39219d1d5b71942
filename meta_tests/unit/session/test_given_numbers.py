"""A mistyped number of an option is refused in one line that says what is counted."""

import pytest

from sm121.core.errors import UsageError
from sm121.session.given_numbers import number, numbers

HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("name", "most", "says"),
    [
        ("--rounds", 1000, "expected at most 1000 rounds of each measurement"),
        ("--concurrency", 1024, "expected at most 1024 streams at the same time"),
        ("--requests", 100_000, "expected at most 100000 requests of the load"),
        ("--crowd", 1024, "expected at most 1024 requests at the same time"),
        ("--ab-pairs", 100, "expected at most 100 starts of each side"),
    ],
)
@pytest.mark.parametrize("read", [number, numbers])
def test_a_number_that_no_run_can_take_is_refused(name, most, says, read):
    def given(text: str) -> object:
        if read is number:
            return number(name, text)
        return numbers({name: text}.get, name, "2")

    assert given(str(most)) in (most, (most,))
    for text in (str(most + 1), HUGE):
        with pytest.raises(UsageError) as raised:
            given(text)
        assert f"{raised.value}".startswith(f"{name} {text[:4]}") and says in f"{raised.value}"
        assert len(f"{raised.value}") < 200, "one line"


def test_a_length_has_the_bound_of_the_server():
    """The option accepts any length of a prompt that is a number of at most 18 digits.

    `performance.refuse_wrong_sizes` later compares it with the server's context.
    """
    assert number("--pp", "99999999") == 99999999
    assert numbers({"--depths": "0,99999999"}.get, "--depths", "0") == (0, 99999999)
    with pytest.raises(
        UsageError, match=r"--depths 0,9+\.\.\.: expected numbers of at most 18 digits"
    ):
        numbers({"--depths": f"0,{HUGE}"}.get, "--depths", "0")
