"""``--resume``: tests that an earlier run in the report directory has finished do not run again."""

import pytest

from sm121.plugin.stash import ID
from sm121.run import resume
from sm121.session.session import Session

#: Fixtures of tests that look at a server, or measure.
_MEASURES = frozenset({"server", "servers", "benchmark", "kernel_path", "box"})


def take_over(config: pytest.Config, session: Session, items: list[pytest.Item]) -> None:
    """Deselect the kernel tests that an earlier run has finished, and take over their verdicts."""
    if not config.getoption("--resume"):
        return
    if session.settings.worker is not None:
        # xdist's workers must all have the same tests.
        session.remark("--resume: with -n kernel tests are run again; cells are taken over")
        return
    finished = resume.take_over(
        session, {item.stash[ID] for item in items if ID in item.stash and _may_be_taken(item)}
    )
    items[:] = [item for item in items if item.stash.get(ID, "") not in finished]


def _may_be_taken(item: pytest.Item) -> bool:
    """Whether a test says nothing of the kernel path, no rate, and nothing of a running server."""
    names = set(getattr(item, "fixturenames", ()))
    return not names & _MEASURES and item.get_closest_marker("never_waived") is None
