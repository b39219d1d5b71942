"""``--resume``: continues a run that was killed, from the events that it has written.

The verdicts of the kernel and correctness levels are kept. All other tests run again: the smoke
level judges the new server, and tests that measure, or that judge a whole level, need the machine
and the server as one process has observed them. If a test runs again, the worse of its two verdicts
counts, as in a merge of two parts of a run. The matrix level examines the cells that have no
outcome yet. If the run was killed before its first test, it starts from the beginning.
"""

import pytest

from sm121.core.errors import UsageError
from sm121.plugin import comparing_tests, kept_cases
from sm121.plugin.stash import ID, LEVEL
from sm121.run import details, events, fold, stored_run
from sm121.run.events import (
    Closed,
    Collected,
    Decided,
    EnvironmentRead,
    EventStream,
    Opened,
    Resumed,
    ServerAttached,
)
from sm121.run.fold import Fold
from sm121.run.merge import differences
from sm121.run.paths import metrics_file
from sm121.run.verdict_file import VerdictFile
from sm121.session.session import Session

#: The levels whose tests do not depend on each other.
_BY_THEMSELVES = ("kernel", "correctness")


def take_up(config: pytest.Config, session: Session) -> None:
    """Continue the run in the report directory, with ``--resume``.

    Args:
        config: The configuration of pytest.
        session: The run. It has not begun. It gets the events of the earlier process.

    Raises:
        UsageError: No run can be resumed, or the options differ from those of the earlier process.
    """
    run = session.run
    if not config.getoption("--resume"):
        return
    path = run.record.directory / events.NAME
    try:
        stream = events.read_events(path)
        is_closed = any(isinstance(each.event, Closed) for each in stream.events)
        has_its_verdict = is_closed and stored_run.has_its_verdict(run.record.directory)
        if _has_nothing_to_keep(stream) and not has_its_verdict:
            run.record.start_anew()
            _remove_what_was_left(session)
            return
        before = fold.replay(stream.events)
        before.settle()
        if before.file.finished and has_its_verdict:
            raise ValueError(f"it has ended with {before.file.verdict}")
        _refuse_another(
            stream, before.file, run.record.file, comparing_tests.comparison_options(config)
        )
        attached = _same_server(stream, session)
        anew = run.record.file
        run.record.resume(stream)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--resume: expected a run in {run.record.directory} that was killed ({error}). "
            "Leave out --resume."
        ) from error
    kept = _kept(run.record.log.fold)
    run.record.emit(Resumed([test.id for test in run.record.file.tests if test.id not in kept]))
    if attached is not None:
        run.record.emit(attached)
    run.record.emit(EnvironmentRead(anew.environment, anew.fingerprint))
    for line in anew.unproven:
        run.record.unproven(line)
    for line in anew.remarks:
        run.record.remark(line, at_once=False)
    _remove_what_was_left(session)


def leave_out_decided(config: pytest.Config, session: Session, items: list[pytest.Item]) -> None:
    """With ``--resume``, remove the tests whose verdict is kept.

    Args:
        config: The configuration of pytest.
        session: The run.
        items: The selected tests.
    """
    if not config.getoption("--resume"):
        return
    kept: list[pytest.Item] = []
    again: list[pytest.Item] = []
    for item in items:
        is_decided = LEVEL in item.stash and session.run.record.ledger.has(item.stash[ID])
        (kept if is_decided else again).append(item)
    items[:] = again
    kept_cases.add(config, session, kept)
    session.run.record.say(
        "resume", f"{len(kept)} checks were decided before, {len(again)} are run"
    )


def _has_nothing_to_keep(stream: EventStream) -> bool:
    """Return whether the killed run had neither read its environment nor decided on any test."""
    return not any(isinstance(each.event, EnvironmentRead | Decided) for each in stream.events)


def _remove_what_was_left(session: Session) -> None:
    """Remove the killed process's files that this process must not read as its own."""
    directory = session.run.record.directory
    # This process is now the first one that reads an attached server's metrics.
    metrics_file(directory, None).unlink(missing_ok=True)
    (directory / details.NAME).unlink(missing_ok=True)


def _refuse_another(
    stream: EventStream, before: VerdictFile, now: VerdictFile, comparison: str
) -> None:
    """Raise ValueError if this run and the earlier process have different tests or settings."""
    opened = next(each.event for each in stream.events if isinstance(each.event, Opened))
    begun = fold.begun(opened)
    begun.engine = begun.engine.model_copy(update={"model": before.engine.model})
    begun.fingerprint = before.fingerprint
    others = [f"{each.name} {each.one}, now {each.other}" for each in differences(begun, now)]
    if begun.question != now.question or begun.certificate_levels != now.certificate_levels:
        others.append(f"configuration under test {begun.question}, now {now.question}")
    collected = next(each.event for each in stream.events if isinstance(each.event, Collected))
    tests = [(test.id, test.level) for test in collected.tests]
    if tests != [(test.id, test.level) for test in now.tests] or collected.shard != now.shard:
        others.append(f"{len(tests)} tests, but now {len(now.tests)} or different ones")
    if collected.compared and not comparison:
        others.append("--benchmark-compare given, now not")
    elif collected.comparison not in ("", comparison):
        others.append(f"{collected.comparison}, now {comparison}")
    if others:
        raise ValueError(f"its tests or settings differ: {others[0]}")


def _same_server(stream: EventStream, session: Session) -> ServerAttached | None:
    """Return the event about the attached server; None without an attached server.

    Raise ValueError if the server may be another process than before.
    """
    life = session.run.servers.attached_life
    if life is None:
        return None
    now = ServerAttached.of(life.signs)
    for each in stream.events:
        if isinstance(each.event, ServerAttached):
            if not each.event.is_comparable(now):
                raise ValueError(
                    "its attached server may have been started again: expected the start time "
                    "(/metrics) or the processes that were visible before, got neither"
                )
            proof = each.event.differs_from(now)
            if proof is not None:
                raise ValueError(f"its attached server was started again: {proof}")
    return now


def _kept(before: Fold) -> set[str]:
    """Return the ids of the verdicts that ``--resume`` keeps.

    They are the verdicts on tests that do not depend on other tests, and the decisions that no test
    made.
    """
    kept = set()
    for test in before.file.tests:
        is_alone = test.level in _BY_THEMSELVES and not test.metrics
        if before.ledger.has(test.id) and (is_alone or test.has_no_test or test.is_of_option):
            kept.add(test.id)
    return kept
