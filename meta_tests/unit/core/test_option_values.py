"""The kinds of values of options: what each of them accepts, and its message for a wrong value."""

import pytest

from sm121.core.errors import UsageError
from sm121.core.option_values import numbers, whole_number

HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(whole_number(1000, "rounds"), 1000, id="one number"),
        pytest.param(numbers("2", most=1000, counted="rounds"), (1000,), id="a list"),
    ],
)
def test_a_number_that_no_run_can_take_is_refused(value, expected):
    assert value.read("--rounds", "1000") == expected
    for text in ("1001", HUGE):
        with pytest.raises(UsageError) as raised:
            value.read("--rounds", text)
        line = f"{raised.value}"
        assert line.startswith(f"--rounds {text[:4]}") and "expected at most 1000 rounds" in line
        assert len(line) < 200, "one line"


def test_a_number_without_a_bound_has_at_most_18_digits():
    """The option accepts any length of a prompt that is a number of at most 18 digits.

    `performance.refuse_wrong_sizes` later compares it with the server's context.
    """
    assert whole_number().read("--pp", "99999999") == 99999999
    assert numbers("0").read("--depths", "0,99999999") == (0, 99999999)
    with pytest.raises(
        UsageError, match=r"--depths 0,9+\.\.\.: expected numbers of at most 18 digits"
    ):
        numbers("0").read("--depths", f"0,{HUGE}")


def test_the_message_for_a_wrong_number():
    with pytest.raises(UsageError, match=r"^--rounds x: expected a number, 1 or more$"):
        whole_number().read("--rounds", "x")
    with pytest.raises(
        UsageError, match=r"^--tg 1: expected numbers of at least 2, as in --tg 32,128$"
    ):
        numbers("32,128", least=2).read("--tg", "1")
