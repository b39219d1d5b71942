"""``--resume``: goes on with a run that was killed, from the events that it wrote.

What the tests of the kernel and the correctness level decided is not asked again. The other tests
are run again: the smoke level judges the server that is started anew, and tests that measure, or
that judge the work of a level, need the machine and the server as one process saw them. A test
never gets better by it: of two decisions the worse one stands, as of two parts of a run.
"""

import pytest

from sm121.core.errors import UsageError
from sm121.plugin.stash import ID, LEVEL
from sm121.run import details, events, fold
from sm121.run.event_log import EventLog
from sm121.run.events import Collected, Distrusted, EnvironmentRead, Opened, Resumed, Stream
from sm121.run.fold import Fold
from sm121.run.machine_report import MEMORY_FLOOR
from sm121.run.merge import differences
from sm121.run.verdict_file import VerdictFile
from sm121.session.session import Session

#: The levels of which each test stands by itself.
_BY_THEMSELVES = ("kernel", "correctness")


def take_up(config: pytest.Config, session: Session) -> None:
    """Go on with the run of the report directory, with ``--resume``.

    Args:
        config: pytest's.
        session: The run, which has begun nothing. It gets the events of the earlier process.

    Raises:
        UsageError: There is no run that can be resumed, or this one asks for something else.
    """
    run = session.run
    if not config.getoption("--resume"):
        return
    path = run.record.directory / events.NAME
    try:
        stream = events.read(path)
        before = fold.replay(stream.events)
        before.settle()
        _refuse_another(stream, before.file, run.record.file)
        log = EventLog.resume(path, stream)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--resume: expected a run in {run.record.directory} that was killed ({error}). "
            "Leave out --resume."
        ) from error
    anew = run.record.file
    run.record.log = log
    _take_up_doubts(session, stream)
    kept = _kept(log.fold)
    run.record.emit(Resumed([test.id for test in run.record.file.tests if test.id not in kept]))
    run.record.emit(EnvironmentRead(anew.environment, anew.fingerprint))
    for line in anew.unproven:
        run.record.unproven(line)
    for line in anew.remarks:
        run.record.remark(line, at_once=False)
    run.paths.metrics_file(None).unlink(missing_ok=True)  # the first look at an attached server
    (run.record.directory / details.NAME).unlink(missing_ok=True)  # of a run that was interrupted


def leave_out_decided(config: pytest.Config, session: Session, items: list[pytest.Item]) -> None:
    """Remove the tests that are not run again, with ``--resume``.

    Args:
        config: pytest's.
        session: The run.
        items: The selected tests.
    """
    if not config.getoption("--resume"):
        return
    count = len(items)
    items[:] = [
        item
        for item in items
        if LEVEL not in item.stash or not session.run.record.ledger.has(item.stash[ID])
    ]
    session.run.record.say(
        "resume", f"{count - len(items)} checks were decided before, {len(items)} are run"
    )


def _refuse_another(stream: Stream, before: VerdictFile, now: VerdictFile) -> None:
    """Raise ValueError unless a run asks what the earlier process of it asked."""
    if before.finished:
        raise ValueError(f"it has ended with {before.verdict}")
    if before.fingerprint is None:
        raise ValueError("it was killed before anything was asked")
    opened = next(each.event for each in stream.events if isinstance(each.event, Opened))
    begun = fold.begun(opened)
    begun.engine = begun.engine.model_copy(update={"model": before.engine.model})
    begun.fingerprint = before.fingerprint
    others = [f"{each.name} {each.one}, now {each.other}" for each in differences(begun, now)]
    if begun.question != now.question or begun.certificate_levels != now.certificate_levels:
        others.append(f"question {begun.question}, now {now.question}")
    collected = next(each.event for each in stream.events if isinstance(each.event, Collected))
    tests = [(test.id, test.level) for test in collected.tests]
    if tests != [(test.id, test.level) for test in now.tests] or collected.shard != now.shard:
        others.append(f"{len(tests)} tests, now {len(now.tests)}, or others")
    if others:
        raise ValueError(f"it asked for something else: {others[0]}")


def _take_up_doubts(session: Session, stream: Stream) -> None:
    """Trust nothing that the earlier process did not trust any more."""
    run = session.run
    for stamped in stream.events:
        if isinstance(stamped.event, Distrusted):
            run.servers.distrusted = stamped.event.why
    for crash in run.record.file.crashes:
        if crash.kind == MEMORY_FLOOR:
            run.servers.aborted = (MEMORY_FLOOR, crash.summary)


def _kept(before: Fold) -> set[str]:
    """The decisions that stand: of tests that stand by themselves, and beside the tests."""
    kept = set()
    for test in before.file.tests:
        is_alone = test.level in _BY_THEMSELVES and not test.metrics
        if before.ledger.has(test.id) and (is_alone or test.is_beside or test.is_of_option):
            kept.add(test.id)
    return kept
