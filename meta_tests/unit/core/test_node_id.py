"""The names of tests in the node ids of pytest."""

import pytest

from sm121.core.node_id import function_of, name_of
from sm121.run.verdict_file import BESIDE, TestReport


@pytest.mark.parametrize(
    ("node_id", "name", "function"),
    [
        ("tests/test_smoke.py::test_models", "test_models", "test_models"),
        ("tests/test_x.py::Class::test_a[b]", "test_a[b]", "test_a"),
        ("tests/test_x.py::test_a[b::c[d]-e]", "test_a[b::c[d]-e]", "test_a"),
        ("--benchmark-compare-fail", "--benchmark-compare-fail", "--benchmark-compare-fail"),
    ],
)
def test_the_name_has_neither_file_nor_class(node_id, name, function):
    """Of parameters with two colons, only the end was shown."""
    assert (name_of(node_id), function_of(node_id)) == (name, function)


def test_a_decision_without_a_test_has_its_words():
    decision = TestReport.of(f"{BESIDE}log of a::b [c]", "smoke")
    assert decision.name == "log of a::b [c]"
