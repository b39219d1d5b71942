"""Which tests apply to the target, in which order, and which architecture was asked for."""

from __future__ import annotations

import itertools
import re

import pytest
from _pytest.mark.expression import Expression

from sm121.core.architecture import CAPABILITIES, CPU, NAMES
from sm121.core.profile import LEVELS

#: More names than anybody writes; an expression of so many is looked at in part.
_MOST_WORDS = 10

LEVEL = pytest.StashKey[str]()
#: The test's id as it is in every report; before pytest 9.2 xdist adds the name of a group.
ID = pytest.StashKey[str]()
APPLIES_TO = pytest.StashKey[frozenset[str]]()
#: Set when every collected test of a level was found in order.
SELECTED = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)  # before -m is applied to the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        level = next((name for name in LEVELS if item.get_closest_marker(name)), None)
        if level is None:
            continue
        item.stash[LEVEL] = level
        item.stash[ID] = item.nodeid
        item.stash[APPLIES_TO] = names = _applies_to(item)
        for name in sorted(names):
            item.add_marker(name)
        if names - {"cpu"}:
            item.add_marker("gpu")
    # Stable: within a level the order of the file stands. Tests of no level keep their place.
    items.sort(key=lambda item: LEVELS.index(item.stash.get(LEVEL, LEVELS[0])))
    config.stash[SELECTED] = True


def _applies_to(item: pytest.Item) -> frozenset[str]:
    marker = item.get_closest_marker("applies_to")
    if marker is None or not marker.args:
        raise pytest.UsageError(
            f"{item.nodeid}: expected @pytest.mark.applies_to(...) on the test or its module"
        )
    names: set[str] = set()
    for name in marker.args:
        if name == "gpu":
            names.update(CAPABILITIES)
        elif name in NAMES:
            names.add(name)
        else:
            raise pytest.UsageError(
                f"{item.nodeid}: applies_to({name!r}): expected 'gpu' or one of {', '.join(NAMES)}"
            )
    return frozenset(names)


def architectures_asked_for(expression: str) -> tuple[str, ...]:
    """Architectures that a ``-m`` expression asks for by name: those that it selects by.

    ``sm121 and smoke`` asks for sm121; ``not sm121`` and ``smoke`` ask for none.
    """
    named = [name for name in NAMES if re.search(rf"\b{name}\b", expression)]
    if not named:
        return ()
    words = sorted(set(re.findall(r"[A-Za-z_]\w*", expression)) - {"and", "or", "not"})

    def asked(name: str) -> bool:
        """Whether some test is selected with the marker and not without it."""
        others = [word for word in words if word != name][:_MOST_WORDS]
        return any(
            _evaluate(expression, {name, *present}) and not _evaluate(expression, set(present))
            for count in range(len(others) + 1)
            for present in itertools.combinations(others, count)
        )

    return tuple(name for name in named if asked(name))


def selects(expression: str, item: pytest.Item, arch: str) -> bool:
    """Whether ``-m`` would select a test if it were for ``arch`` alone."""
    names = {marker.name for marker in item.iter_markers()} - {*NAMES, "gpu"}
    return not expression or _evaluate(expression, names | _names_of(arch))


def _names_of(arch: str) -> set[str]:
    return {arch} if arch == CPU else {arch, "gpu"}


def _evaluate(expression: str, names: set[str]) -> bool:
    def matcher(candidate: str, /, **_keywords: str | int | bool | None) -> bool:
        return candidate in names

    return bool(Expression.compile(expression).evaluate(matcher))
