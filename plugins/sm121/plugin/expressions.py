"""What a command line names: levels, tests and architectures, by paths and by ``-k`` and ``-m``."""

import itertools
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from sm121.core import errors, own_tests
from sm121.core.architecture import CPU, NAMES
from sm121.plugin.stash import SETTINGS

_OPERATORS = frozenset({"and", "or", "not"})
_WORD = re.compile(r"[A-Za-z_]\w*")
#: Names of a ``-m`` expression that are tried in all combinations; of more, only so many.
_MOST_WORDS = 10
#: Options with which pytest only shows something, by the names under which pytest keeps them.
_SHOWING = ("collectonly", "showfixtures", "show_fixtures_per_test", "cacheshow")


def marker_expression(config: pytest.Config) -> str:
    """Return the expression of ``-m``; empty without one.

    Args:
        config: pytest's.
    """
    return config.getoption("markexpr", "") or ""


def refuse_wrong_expressions(config: pytest.Config) -> None:
    """Refuse an expression of ``-k`` or ``-m`` that pytest cannot parse.

    Args:
        config: pytest's.

    Raises:
        UsageError: It names the expression and the error.
    """
    for option, name in (("-k", "keyword"), ("-m", "markexpr")):
        expression = config.getoption(name, "") or ""
        try:
            Expression.compile(expression)
        except SyntaxError as error:
            what = f"at column {error.offset}: {error.msg}"
            raise errors.UsageError(f"{option} {expression!r}: {what}") from error
        except Exception as error:  # before pytest 9: an exception of its own, "at column N: ..."
            raise errors.UsageError(f"{option} {expression!r}: {error}") from error


def names_tests(config: pytest.Config) -> bool:
    """Whether the command line names levels or tests.

    A path, ``-k``, or ``-m`` with a marker that is no architecture's names them.

    Args:
        config: pytest's.
    """
    if any("::" in str(path) for path in config.args):
        return True
    if not all(own_tests.has_every_level(path) for path in files(config)):
        return True
    if config.getoption("keyword", ""):
        return True
    expression = marker_expression(config)
    markers = words_of(expression) - {*NAMES, "gpu"}
    return bool(_asked_for(expression, sorted(markers)))


def files(config: pytest.Config) -> list[Path]:
    """Return the files and folders of the command line, without names of tests.

    Args:
        config: pytest's.
    """
    return [config.invocation_params.dir / str(path).partition("::")[0] for path in config.args]


def architectures_asked_for(expression: str) -> tuple[str, ...]:
    """Return the architectures that an expression of ``-m`` selects by name.

    ``sm121 and smoke`` selects sm121; ``not sm121`` and ``smoke`` select none.

    Args:
        expression: The expression, which `refuse_wrong_expressions` has accepted.
    """
    named = [name for name in NAMES if re.search(rf"\b{name}\b", expression)]
    if not named:
        return ()
    return _asked_for(expression, named)


def _asked_for(expression: str, names: Sequence[str]) -> tuple[str, ...]:
    """The markers that an expression of ``-m`` selects: ``not slow`` selects none."""
    return tuple(name for name in names if _matters(expression, name))


def _matters(expression: str, name: str) -> bool:
    """Whether an expression selects some test with a marker, and not without it."""
    others = sorted(words_of(expression) - {name})[:_MOST_WORDS]
    for count in range(len(others) + 1):
        for present in itertools.combinations(others, count):
            with_it = evaluate(expression, {name, *present})
            if with_it and not evaluate(expression, set(present)):
                return True
    return False


def words_of(expression: str) -> set[str]:
    """Return the names of markers in an expression.

    Args:
        expression: The expression of ``-m``.
    """
    return set(_WORD.findall(expression)) - _OPERATORS


def asked_for_levels(config: pytest.Config) -> bool:
    """Whether the command line asks for a target: by ``--certify``, or by an architecture's name.

    Args:
        config: pytest's. The answer is no in a worker, and if pytest only shows something.
    """
    if hasattr(config, "workerinput"):
        return False
    if any(getattr(config.option, name, None) for name in _SHOWING):
        return False
    settings = config.stash.get(SETTINGS, None)
    if settings is None:
        return False
    if settings.certify or settings.arch:
        return True
    return bool(architectures_asked_for(marker_expression(config)))


def selects_any(expression: str, items: Sequence[pytest.Item], arch: str) -> bool:
    """Whether ``-m`` would select one of some tests if they were for one architecture alone.

    Args:
        expression: The expression of ``-m``; an empty one selects all.
        items: The tests.
        arch: The architecture.
    """
    if not expression:
        return True
    of_arch = markers_of(arch)
    for item in items:
        markers = {marker.name for marker in item.iter_markers()} - {*NAMES, "gpu"}
        if evaluate(expression, markers | of_arch):
            return True
    return False


def markers_of(arch: str) -> set[str]:
    """Return the markers of a test for one architecture alone.

    Args:
        arch: The architecture.
    """
    if arch == CPU:
        return {CPU}
    return {arch, "gpu"}


def evaluate(expression: str, names: Collection[str]) -> bool:
    """Whether an expression of ``-m`` selects a test.

    Args:
        expression: The expression.
        names: The markers of the test.
    """
    return evaluate_with(expression, names.__contains__)


def evaluate_with(expression: str, has: Callable[[str], bool]) -> bool:
    """Whether an expression of ``-m`` or ``-k`` selects a test.

    Args:
        expression: The expression.
        has: Whether the test has a word of it.
    """

    def matcher(candidate: str, /, **_keywords: str | int | bool | None) -> bool:
        return has(candidate)

    return bool(Expression.compile(expression).evaluate(matcher))
