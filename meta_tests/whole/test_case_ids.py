"""A search for the id of a failed test finds its row in the source."""

from pathlib import Path

import pytest

from meta_tests import case_ids

LONG = "(Worker pid=100) INFO 11-22 10:00:40 [parallel_state.py:1906] world_size=2 rank=1"
LISTED = [
    ["--durations", "3"],
    ("one",),
    (1, None, "it's"),
    {"unit": "s", "least": 2.5},
    [],
]


@pytest.mark.parametrize("value", LISTED, ids=["list", "one", "tuple", "dict", "empty"])
def test_an_id_is_the_value_as_the_source_has_it(value):
    shown = case_ids.pytest_make_parametrize_id(value)
    assert shown is not None and shown in Path(__file__).read_text("utf-8")


def test_a_long_text_is_shown_from_its_beginning():
    shown = case_ids.pytest_make_parametrize_id(LONG * 2)
    assert shown is not None and LONG.startswith(shown)


@pytest.mark.parametrize(
    "value",
    ["short", 3, None, object(), [object()], {1, 2}],
    ids=["short", "number", "None", "object", "objects", "set"],
)
def test_other_values_are_named_by_pytest(value):
    assert case_ids.pytest_make_parametrize_id(value) is None
