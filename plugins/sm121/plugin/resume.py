"""``--resume``: tests that an earlier run in the report directory has finished do not run again."""

from __future__ import annotations

import pytest

from sm121.plugin.stash import ID
from sm121.run import resume
from sm121.session.session import Session


def take_over(config: pytest.Config, session: Session, items: list[pytest.Item]) -> None:
    """Deselect the kernel tests that an earlier run has finished, and take over their verdicts."""
    if not config.getoption("--resume"):
        return
    if session.settings.worker is not None:
        # xdist's workers must all have the same tests.
        session.remark("--resume: with -n kernel tests are run again; cells are taken over")
        return
    taken = resume.take_over(session)
    items[:] = [item for item in items if item.stash.get(ID, "") not in taken]
