"""Whether a mistake in a data file is one line that names the file and what was expected."""

import re

import pytest
from pydantic import BaseModel

from meta_tests.folders import ROOT
from sm121.core import data_file

FIXTURES = ROOT / "fixtures"
#: What the file is called.
NAME = "mine.toml"


def assert_refused(model: type[BaseModel], text: str, expected: str) -> None:
    """Check that this text is no file of the model, and that the one line says what was expected.

    Args:
        model: The model of the data file.
        text: The file, with its mistake.
        expected: A regular expression of a part of the line.
    """
    with pytest.raises(data_file.DataFileError) as caught:
        data_file.parse(text, model, NAME)
    assert re.fullmatch(f"{NAME}: .*({expected}).*", str(caught.value)), caught.value


def with_mistake(model: type[BaseModel], right: str, old: str | None, new: str) -> str:
    """Return a right file with `new` in place of `old`, or after it where `old` is None."""
    data_file.parse(right, model, NAME)
    if old is None:
        return f"{right}\n{new}"
    assert old in right
    return right.replace(old, new, 1)
