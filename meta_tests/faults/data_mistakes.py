"""Check that a mistake in a data file gives one line with the file and the expected value."""

import re

import pytest
from pydantic import BaseModel

from meta_tests.folders import ROOT
from sm121.core import data_file

FIXTURES = ROOT / "fixtures"
#: The name of the file.
NAME = "mine.toml"


def assert_refused(model: type[BaseModel], text: str, expected: str) -> None:
    """Check that the model refuses a text with one line that contains the expected value.

    Args:
        model: The model of the data file.
        text: The file with its mistake.
        expected: A regular expression that must match a part of the line.
    """
    with pytest.raises(data_file.DataFileError) as caught:
        data_file.parse(text, model, NAME)
    assert re.fullmatch(f"{NAME}: .*({expected}).*", str(caught.value)), caught.value


def with_mistake(model: type[BaseModel], right: str, old: str | None, new: str) -> str:
    """Return the text of a correct file in which `new` replaces `old`.

    If `old` is None, `new` is appended."""
    data_file.parse(right, model, NAME)
    if old is None:
        return f"{right}\n{new}"
    assert old in right
    return right.replace(old, new, 1)
