"""Finds the tests that were requested but do not exist. ``--against`` counts them as missing."""

from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpu_arch.expression import evaluate, evaluate_with, words_of
from sm121.core.architecture import NAMES
from sm121.core.node_id import function_of
from sm121.core.plan_settings import PlanRow
from sm121.core.profile_fields import LEVELS
from sm121.plugin import expressions, selection
from sm121.plugin.stash import SETTINGS
from sm121.run.record import Target
from sm121.run.verdict_file import TestReport


def asks_for(config: pytest.Config, chosen: Target) -> Callable[[TestReport], bool]:
    """Return a function that decides whether the run requested a test that it does not have.

    A test was requested if it would be collected and selected if it existed. A test was not
    requested if -m, -k, a plan or an option leaves it out, or if it is outside the given paths.

    Args:
        config: The configuration of pytest.
        chosen: The target of the run.
    """
    return _Request(config, chosen).asks_for


class _Request:
    """The paths, expressions and plan that a command line requests."""

    def __init__(self, config: pytest.Config, chosen: Target) -> None:
        self._collected = config.stash[selection.COLLECTED]
        self._paths = _paths(config)
        self._keywords: str = config.getoption("keyword", "") or ""
        self._expression = expressions.marker_expression(config)
        #: The markers in the expression that are neither levels nor architectures.
        self._other_markers = words_of(self._expression)
        self._other_markers -= {*LEVELS, *NAMES, "gpu", "slow"}
        self._of_arch = expressions.markers_of(chosen.arch)
        settings = config.stash[SETTINGS]
        #: The levels from which an option selects only a part.
        self._narrowed: set[str] = set()
        if settings.measuring.sizes.only_depths is not None:
            self._narrowed.add("performance")
        if config.getoption("--matrix") is not None:
            self._narrowed.add("matrix")
        self._plan: PlanRow | None = None
        if chosen.profile is not None:
            self._plan = chosen.profile.plan(settings.plan)

    def asks_for(self, test: TestReport) -> bool:
        """Whether the run requested a test that it does not have."""
        if test.id in self._collected or test.level in self._narrowed:
            return False
        return self._is_within(test) and self._is_selected(test)

    def _is_within(self, test: TestReport) -> bool:
        """Whether a test is in one of the given paths."""
        if not self._paths:
            return True
        for path in self._paths:
            inside = (f"{path}/", f"{path}::", f"{path}[")
            if test.id == path or test.id.startswith(inside):
                return True
        return False

    def _is_selected(self, test: TestReport) -> bool:
        """Whether -k, -m and the plan select a test."""
        if self._keywords:
            name = test.id.lower()
            if not evaluate_with(self._keywords, lambda word: word.lower() in name):
                return False
        if self._expression and not self._is_selected_by_marker(test):
            return False
        return self._plan is None or self._is_in_plan(test, self._plan)

    def _is_selected_by_marker(self, test: TestReport) -> bool:
        """Whether -m can select a test, of which only the level and the architecture are known.

        The test is selected if the expression is true without the other markers, or with all of
        them.
        """
        known = {test.level, *self._of_arch}
        return evaluate(self._expression, known) or evaluate(
            self._expression, known | self._other_markers
        )

    def _is_in_plan(self, test: TestReport, plan: PlanRow) -> bool:
        """Whether the plan contains a test, assuming that the test has the markers in the plan."""
        entries: Any = plan.tests.get(test.level, ())  # type: ignore[call-overload]
        markers = {entry for entry in entries if not entry.startswith("test_")}
        return plan.asks(test.level, function_of(test.id), markers)


def _paths(config: pytest.Config) -> list[str]:
    """Return the given paths, relative to pytest's root; empty if they include all tests."""
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return []
    paths = [_relative(config, path) for path in config.args]
    if "." in paths or "tests" in paths:
        return []
    return paths


def _relative(config: pytest.Config, path: str) -> str:
    file, separator, rest = path.partition("::")
    absolute = (config.invocation_params.dir / file).resolve()
    try:
        file = absolute.relative_to(config.rootpath.resolve()).as_posix()
    except ValueError:
        file = absolute.as_posix()
    return f"{file}{separator}{rest}"
