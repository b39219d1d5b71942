"""The markers that an expression of ``-m`` selects."""

import itertools
import re
from collections.abc import Callable, Collection, Sequence

from _pytest.mark.expression import Expression

from pytest_gpu_arch.names import NAMES

_OPERATORS = frozenset({"and", "or", "not"})
_WORD = re.compile(r"[A-Za-z_]\w*")
#: Names of an expression that are tried in all combinations; of more, only so many.
_MOST_WORDS = 10


def architectures_asked_for(expression: str) -> tuple[str, ...]:
    """Return the architectures that an expression of ``-m`` selects by name.

    ``sm121 and smoke`` selects sm121; ``not sm121`` and ``smoke`` select none.

    Args:
        expression: The expression, which pytest can parse.
    """
    return asked_for(expression, NAMES)


def asked_for(expression: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of some markers that an expression of ``-m`` selects.

    ``not slow`` selects none.

    Args:
        expression: The expression, which pytest can parse.
        names: The markers.
    """
    words = words_of(expression)
    return tuple(name for name in names if name in words and _matters(expression, name))


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
