"""Collects the tests that compare a run with a stored run, even if other tests are selected."""

from collections.abc import Sequence

import pytest

from sm121.core import own_tests
from sm121.plugin import expressions, selection
from sm121.plugin.stash import LEVEL

_LEVEL = "regression"
_COMPARED_IN = "test_regression.py"
#: The comparison tests that also apply if only a part of the stored run's tests is selected.
_COMPARED_BY = ("test_no_metric_is_worse", "test_no_level_came_down")


def name_comparison(config: pytest.Config) -> None:
    """Add the comparison tests for ``--benchmark-compare``, if the paths name only other tests.

    Args:
        config: The configuration of pytest. The tests are added to its list of paths.
    """
    if not selection.compares(config):
        return
    own = own_tests.folder() / "tests"
    paths = [path.resolve() for path in expressions.files(config)]
    if not any(path.is_relative_to(own) for path in paths):
        return
    module = own / _COMPARED_IN
    if module in paths or any(own_tests.has_every_level(path) for path in paths):
        return
    config.args += [f"{module}::{name}" for name in _COMPARED_BY]


def hold_comparison(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Protect the comparison tests from a ``-k`` or ``-m`` that does not name their level.

    Args:
        config: The configuration of pytest.
        items: The collected tests. The comparison tests are removed from this list.

    Returns:
        The tests that were removed.
    """
    words = f"{config.getoption('keyword', '')} {config.getoption('markexpr', '')}"
    if not selection.compares(config) or _LEVEL in words:
        return []
    deselected = tuple(config.getoption("deselect", None) or ())
    held = []
    for item in items:
        is_comparing = (
            item.stash.get(LEVEL, "") == _LEVEL and selection.function_name(item) in _COMPARED_BY
        )
        if is_comparing and not item.nodeid.startswith(deselected):
            held.append(item)
    items[:] = [item for item in items if item not in held]
    return held


def put_back(items: list[pytest.Item], held: Sequence[pytest.Item]) -> None:
    """Put the tests that `hold_comparison` removed back, before the tests of the matrix.

    Args:
        items: The selected tests.
        held: The tests that were removed.
    """
    if not held:
        return
    items += held
    items.sort(key=selection.place_of_level)


def comparison_options(config: pytest.Config) -> str:
    """Return the options of a comparison by pytest-benchmark, with their values.

    Args:
        config: The configuration of pytest.

    Returns:
        The options as on a command line; empty without a comparison.
    """
    words = []
    named = config.getoption("benchmark_compare", None)
    if named:
        words.append("--benchmark-compare" if named is True else f"--benchmark-compare={named}")
    for check in config.getoption("benchmark_compare_fail", None) or ():
        unit = "%" if type(check).__name__ == "PercentageRegressionCheck" else ""
        words.append(f"--benchmark-compare-fail={check.field}:{check.threshold}{unit}")
    return " ".join(sorted(words))
