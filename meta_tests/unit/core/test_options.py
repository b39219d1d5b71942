"""A field of a dataclass declares an option, and reads it from a command line."""

import argparse
from dataclasses import dataclass, field

import pytest

from sm121.core import options
from sm121.core.errors import UsageError
from sm121.core.option_values import assignment, numbers, whole_number
from sm121.core.options import choice, flag, option, repeated


@dataclass(frozen=True)
class Example:
    rounds: int | None = option("--rounds", whole_number(), help="rounds")
    depths: tuple[int, ...] = option("--depths", numbers("0"), default=(), help="depths")
    folder: str = option("--folder", default_text="report", help="folder")
    slow: bool = flag("--slow", help="slow tests")
    form: str = choice("--form", ("text", "markdown"), help="form")
    variables: tuple[tuple[str, str], ...] = repeated("--variable", assignment(), help="variable")
    sides: list[str] | None = option("--sides", value=None, nargs=2, help="two sides")
    #: No option.
    derived: str = field(default="derived")


def read(*words: str) -> Example:
    parser = argparse.ArgumentParser()
    options.add_options(Example, parser.add_argument)
    values = vars(parser.parse_args(words))
    return options.read(Example, lambda name: values[name.removeprefix("--")])


def test_without_options_each_field_has_its_default():
    expected = Example(None, (), "report", slow=False, form="text", variables=(), sides=None)
    assert read() == Example() == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(("--rounds", "3"), Example(rounds=3), id="number"),
        pytest.param(("--depths", "0,4,0"), Example(depths=(0, 4)), id="list of numbers"),
        pytest.param(("--folder", "x"), Example(folder="x"), id="text"),
        pytest.param(("--slow",), Example(slow=True), id="flag"),
        pytest.param(("--form", "markdown"), Example(form="markdown"), id="choice"),
        pytest.param(
            ("--variable", "A=1", "--variable", "B="),
            Example(variables=(("A", "1"), ("B", ""))),
            id="repeated",
        ),
        pytest.param(("--sides", "a", "b"), Example(sides=["a", "b"]), id="two values"),
    ],
)
def test_a_given_option_is_converted(words, expected):
    assert read(*words) == expected


def test_each_value_of_a_repeated_option_is_checked():
    with pytest.raises(UsageError, match=r"^--variable B: expected KEY=VALUE$"):
        read("--variable", "A=1", "--variable", "B")


def test_only_the_fields_that_declare_an_option_are_options():
    names = [each.name for each in options.declarations(Example).values()]
    assert names == [
        "--rounds", "--depths", "--folder", "--slow", "--form", "--variable", "--sides",
    ]  # fmt: skip
