"""Which tests apply to the target, in which order, and which architecture was asked for."""

from __future__ import annotations

import re

import pytest
from _pytest.mark.expression import Expression

from sm121.architecture import CAPABILITIES, NAMES
from sm121.profile import LEVELS

LEVEL = pytest.StashKey[str]()
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
    compiled = Expression.compile(expression)

    def selects(name: str, *, present: bool, others: bool) -> bool:
        def matcher(candidate: str, /, **_keywords: str | int | bool | None) -> bool:
            return present if candidate == name else others

        return bool(compiled.evaluate(matcher))

    def asked(name: str) -> bool:
        return any(
            selects(name, present=True, others=others)
            and not selects(name, present=False, others=others)
            for others in (True, False)
        )

    return tuple(name for name in named if asked(name))
