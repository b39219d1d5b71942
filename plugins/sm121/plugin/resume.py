"""``--resume``: what an earlier run in the report directory has ended is not run again.

Kernel tests are taken over with their verdicts; cells of the matrix with their records
(`sm121.plugin.matrix`). Tests of the other levels share one running server, and are run again.
"""

from __future__ import annotations

import pytest

from sm121.core.verdict import Verdict
from sm121.plugin import workers
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import LEVEL
from sm121.run import verdict_file
from sm121.run.verdict_file import TestReport, VerdictFile

_LEVELS = ("kernel",)
_UNFINISHED = ("not reached", "not finished")


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
    earlier = _earlier(run)
    if earlier is None:
        return
    ended = {test.id: test for test in earlier.tests if _counts(test)}
    taken = [
        item
        for item in session.items
        if item.stash.get(LEVEL, "") in _LEVELS and item.nodeid in ended
    ]
    if not taken:
        return
    for item in taken:
        run.ledger.decide(ended[item.nodeid])
    for name, metric in earlier.metrics.items():
        run.file.metrics.setdefault(name, metric)
    gone = set(taken)
    session.items[:] = [item for item in session.items if item not in gone]
    run.remark(f"--resume: {len(taken)} kernel tests are taken over from the run before")
    run.save()


def _counts(test: TestReport) -> bool:
    """Whether a test came to its end; what was skipped may have a server now."""
    return (
        test.level in _LEVELS
        and not test.skipped
        and test.verdict is not Verdict.NOT_RUN
        and test.message not in _UNFINISHED
    )


def _earlier(run: Run) -> VerdictFile | None:
    """The verdict of the newest earlier run that was the same one and has ended a kernel test; it
    lies where opening this run has moved it."""
    found = sorted((run.directory / "earlier").glob("*/verdict.json"), reverse=True)
    reasons: list[str] = []
    for file in found:
        try:
            earlier = verdict_file.read(file)
        except (OSError, ValueError) as error:
            reasons.append(f"{file} cannot be read: {type(error).__name__}")
            continue
        if (other := _another(run, earlier)) is not None:
            reasons.append(other)
        elif any(_counts(test) for test in earlier.tests):
            return earlier
    if not found:
        run.remark("--resume: there is no earlier run in the report directory")
    elif reasons:
        run.remark(f"--resume: nothing is taken over: {reasons[0]}")
    return None


def _another(run: Run, earlier: VerdictFile) -> str | None:
    """What an earlier run had that this one has not; None where it was the same one."""
    now = run.file
    for what, theirs, ours in (
        ("profile", earlier.profile, now.profile),
        ("architecture", earlier.arch, now.arch),
        ("engine", earlier.engine.name, now.engine.name),
        ("engine's version", earlier.engine.version, now.engine.version),
    ):
        if theirs != ours:
            return f"another {what} ({theirs}, now {ours})"
    return None
