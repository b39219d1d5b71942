"""Find the markers that a ``-m`` expression selects."""

import re
from collections.abc import Callable, Collection, Sequence

from _pytest.mark.expression import Expression

from pytest_gpu_arch.names import NAMES

_OPERATORS = frozenset({"and", "or", "not"})
_WORD = re.compile(r"[A-Za-z_]\w*")
#: A parenthesis, an operator or a name. The arguments of a marker are part of its name:
#: ``device(serial="1")``.
_TOKEN = re.compile(
    r"""
    [()]
    | (?: and | or | not ) (?= [\s()] | $ )
    | [^\s()]+ (?: \( (?: [^()'"] | '[^']*' | "[^"]*" )* \) )?
    """,
    re.VERBOSE,
)


def architectures_asked_for(expression: str) -> tuple[str, ...]:
    """Return the architectures that a ``-m`` expression selects by name.

    For example, ``sm121 and smoke`` selects sm121, but ``not sm121`` and ``smoke`` select no
    architecture.

    Args:
        expression: The expression, which pytest can parse.
    """
    return asked_for(expression, NAMES)


def asked_for(expression: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of some names that a ``-m`` or ``-k`` expression selects.

    An expression selects a name that has no ``not``, or an even number of them, before it.

    Args:
        expression: The expression, which pytest can parse.
        names: The names to check.
    """
    selected = _selected(expression)
    return tuple(name for name in names if name in selected)


def _selected(expression: str) -> set[str]:
    """Return the names in an expression that are not negated."""
    selected = set()
    outer: list[bool] = []  # for each open parenthesis, whether the text around it is negated
    is_negated = False  # whether the current parenthesis is negated
    is_not = False  # whether the next name or parenthesis follows a `not`
    for token in _TOKEN.findall(expression):
        if token == "not":  # noqa: S105
            is_not = not is_not
            continue
        if token == "(":  # noqa: S105
            outer.append(is_negated)
            is_negated = is_negated != is_not
        elif token == ")":  # noqa: S105
            is_negated = outer.pop()
        elif token not in _OPERATORS and is_negated == is_not:
            selected.add(token.partition("(")[0])
        is_not = False
    return selected


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
