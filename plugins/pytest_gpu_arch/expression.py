"""Evaluation of a ``-m`` expression: the markers that it selects."""

import itertools
import re
from collections.abc import Callable, Collection, Sequence

from _pytest.mark.expression import Expression

from pytest_gpu_arch.names import NAMES

_OPERATORS = frozenset({"and", "or", "not"})
_WORD = re.compile(r"[A-Za-z_]\w*")
#: Maximum number of names in an expression that are tried in all combinations. Further names are
#: ignored.
_MOST_WORDS = 10


def architectures_asked_for(expression: str) -> tuple[str, ...]:
    """Return the architectures that a ``-m`` expression selects by name.

    ``sm121 and smoke`` selects sm121; ``not sm121`` and ``smoke`` select none.

    Args:
        expression: The expression, which pytest can parse.
    """
    return asked_for(expression, NAMES)


def asked_for(expression: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of some markers that a ``-m`` expression selects.

    ``not slow`` selects none.

    Args:
        expression: The expression, which pytest can parse.
        names: The markers to check.
    """
    words = words_of(expression)
    return tuple(name for name in names if name in words and _matters(expression, name))


def _matters(expression: str, name: str) -> bool:
    """Whether some set of markers is selected with a marker, and not selected without it."""
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
        expression: The ``-m`` expression.
    """
    return set(_WORD.findall(expression)) - _OPERATORS


def evaluate(expression: str, names: Collection[str]) -> bool:
    """Check whether a ``-m`` expression selects a test.

    Args:
        expression: The expression.
        names: The markers of the test.
    """
    return evaluate_with(expression, names.__contains__)


def evaluate_with(expression: str, has: Callable[[str], bool]) -> bool:
    """Check whether a ``-m`` or ``-k`` expression selects a test.

    Args:
        expression: The expression.
        has: Returns whether the test has the marker or keyword with a name.
    """

    def matcher(candidate: str, /, **_keywords: str | int | bool | None) -> bool:
        return has(candidate)

    return bool(Expression.compile(expression).evaluate(matcher))
