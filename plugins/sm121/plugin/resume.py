"""``--resume``: what an earlier run in the report directory has ended is not run again."""

from __future__ import annotations

import pytest

from sm121.plugin import workers
from sm121.plugin.run import RUN
from sm121.plugin.selection import ID
from sm121.run import resume


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("sm121").addoption(
        "--resume",
        action="store_true",
        help="go on after the last kernel test and the last cell that the run before ended, "
        "in the same --report-dir",
    )


@pytest.hookimpl(trylast=True)  # after the run was opened
def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    run = config.stash.get(RUN, None)
    if run is None or not config.getoption("--resume"):
        return
    if workers.of(config) is not None:
        # xdist has told its controller what will be run; nothing may be taken out any more.
        run.remark("--resume: with -n kernel tests are run again; cells are taken over")
        return
    taken = resume.take_over(run)
    session.items[:] = [item for item in session.items if item.stash.get(ID, "") not in taken]
