"""The known bugs of an engine: which one explains a failure, and which one is mended."""

import re
from collections.abc import Iterable

import pytest

from sm121.core.unmet import Fact
from sm121.engines import capabilities
from sm121.plugin.stash import ID, MENDED
from sm121.session.session import Session


def explaining(session: Session, item: pytest.Item, facts: Iterable[Fact]) -> str | None:
    """Return the first known bug of the engine that explains a failure.

    Args:
        session: The run.
        item: The failed test.
        facts: The facts of the failure.

    Returns:
        The build or the versions that have the bug, the bug, and its source; None without one.
    """
    parts = []
    for fact in facts:
        parts += [fact.requirement, fact.observation]
    for crash_report in session.run.record.file.crashes:
        if crash_report.test == item.stash[ID]:
            parts.append(crash_report.kind)
    for bug in _bugs(session, item):
        if any(re.search(bug.says, part) for part in parts):
            return f"{bug.build or bug.versions}: {bug.what} ({bug.source})"
    return None


def _bugs(session: Session, item: pytest.Item) -> list[capabilities.Bug]:
    engine = session.run.record.file.engine
    if engine.name not in capabilities.shipped():
        return []
    can = capabilities.capabilities_of(engine.name, engine.version, identity=engine.identity)
    return can.bugs(item.stash[ID])


def remark_mended(session: Session, item: pytest.Item) -> None:
    """Add a remark if the test of a known bug passes, although no fixed version is known yet.

    The remark is also in the result of the test (`mended`).

    Args:
        session: The run.
        item: The passed test.
    """
    engine = session.run.record.file.engine
    for bug in _bugs(session, item):
        if not bug.mended_by(item.stash[ID]):
            continue
        line = (
            f"{item.stash[ID]}: a bug is known of {engine.name} {bug.versions}, and "
            f"{engine.version} does not show it ({bug.what}): end the range of versions in "
            f"fixtures/engines/{engine.name}.toml"
        )
        item.stash.setdefault(MENDED, []).append(line)
        session.run.record.remark(line, at_once=False)
