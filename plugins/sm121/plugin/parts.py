"""The first process of ``-n N``: it starts the workers, runs no test, and merges the reports."""

import contextlib
import functools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_gpu_arch import status
from pytest_gpu_arch.expression import architectures_asked_for
from sm121.core import own_tests
from sm121.core.printable import printable
from sm121.core.unmet import Fact
from sm121.core.verdict import INTERRUPTED
from sm121.plugin import (
    answers,
    comparing,
    expressions,
    larger_plans,
    matrix,
    opening,
    progress,
    reporting,
    selection,
    terminal,
    workers,
)
from sm121.plugin.stash import REPORT, SESSION, SETTINGS
from sm121.plugin.workers import GROUP, GROUPED, REFUSED
from sm121.report import merging
from sm121.run import directory as report_directory
from sm121.run import stored_run, verdict_file
from sm121.run.event_log import EventLog
from sm121.run.record import RunRecord
from sm121.run.run import Run
from sm121.run.verdict_file import BESIDE, TestReport, VerdictFile
from sm121.session import opening as session_opening
from sm121.session import target
from sm121.session.crashes import CrashDesk
from sm121.session.session import Session, secrets_given

#: The key of the lines that a worker passes to the first process.
_LINES = "sm121_left_out"
#: The name of the run.
_RUN = pytest.StashKey[str]()
#: The message of xdist for each test in which a worker died. The keys are test ids.
_KILLERS = pytest.StashKey[dict[str, str]]()


def refuse(config: pytest.Config) -> None:
    """Refuse, before any worker starts, mistakes that show without collecting the tests.

    A worker refuses the other mistakes after it has collected the tests: see `show_refusal`.

    Args:
        config: The configuration of the first process; nothing happens without ``-n``.

    Raises:
        pytest.UsageError: A path or a file does not exist, a marker is misspelt, nothing can be
            compared, the target cannot be resolved, or the server of ``--base-url`` does not
            answer.
    """
    is_first = workers.is_parallel(config) and not hasattr(config, "workerinput")
    if not is_first or status.only_shows(config):
        return
    if not config.getoption("pyargs"):
        for argument, path in zip(config.args, expressions.files(config), strict=True):
            if not path.exists():
                raise pytest.UsageError(f"file or directory not found: {argument}")
    have_levels = [own_tests.has_levels(path) for path in expressions.files(config)]
    if not any(have_levels):
        return
    settings = config.stash[SETTINGS]
    asked_by_marker = architectures_asked_for(expressions.marker_expression(config))
    with opening.refusing():
        workers.refuse_other_distribution(config, grouped=workers.is_grouped(config))
        comparing.refuse_beside_workers(config)
        if all(have_levels):  # other tests may have markers that only the collection shows
            expressions.refuse_misspelt_marker(config, ())
        matrix.refuse_wrong_options(config)
        chosen = target.resolve(settings, asked_by_marker)
        session_opening.refuse_attached(settings, chosen)
        answers.refuse_unreadable(settings)


def describe_run(node: Any) -> None:
    """Give a worker, before it starts, the name of its run.

    Args:
        node: The object with which xdist controls the worker.
    """
    config: pytest.Config = node.config
    planned = config.stash[SETTINGS].planned
    node.workerinput["sm121_run"] = config.stash.setdefault(_RUN, uuid.uuid4().hex[:12])
    node.workerinput[GROUPED] = workers.is_grouped(config)
    node.workerinput["sm121_plan"] = [planned.name, planned.reason.value]


def show_refusal(node: Any) -> None:
    """Refuse the run if a worker has refused it.

    Args:
        node: The object with which xdist controlled the worker. The worker has ended.

    Raises:
        pytest.UsageError: The worker refused the run. The message is that of the worker.
    """
    refusal = getattr(node, "workeroutput", {}).get(REFUSED)
    if refusal is not None:
        raise pytest.UsageError(*refusal)


def hand_over_lines(
    config: pytest.Config, session: Session | None, items: Sequence[pytest.Item]
) -> None:
    """Pass the lines on the tests that were left out to the first process, which collects none.

    Args:
        config: The configuration of pytest. Nothing happens in a process that is not a worker.
        session: The run; None without one.
        items: The selected tests.
    """
    output = getattr(config, "workeroutput", None)
    if output is not None:
        output[_LINES] = larger_plans.lines(config, session, items)


def keep_lines(node: Any) -> None:
    """Keep the lines of a worker for the end of the run. All workers have the same lines.

    Args:
        node: The object with which xdist controlled the worker. The worker has ended.
    """
    lines = getattr(node, "workeroutput", {}).get(_LINES)
    if lines is not None:
        node.config.stash[selection.LEFT_OUT] = lines


def note_killer(config: pytest.Config, test: str, report: pytest.TestReport) -> None:
    """Remember in which test a worker died.

    Args:
        config: The configuration of the first process.
        test: The node id of the test, with its xdist group.
        report: The report that xdist has made for the test.
    """
    name = test.removesuffix(f"@{GROUP}")
    config.stash.setdefault(_KILLERS, {})[name] = str(report.longrepr)


@contextlib.contextmanager
def going_on(config: pytest.Config) -> Iterator[None]:
    """Show every ten seconds that the workers are running, because their output is not shown.

    Args:
        config: The configuration of the first process.
    """
    if _RUN not in config.stash:
        yield
        return
    with progress.going_on(config, "the workers run"):
        yield


def has_any(config: pytest.Config) -> bool:
    """Whether a worker of this run has a test of a level.

    Args:
        config: The configuration of the first process.
    """
    directory = config.stash[SETTINGS].report_dir
    name = config.stash.get(_RUN, None)
    return name is not None and report_directory.is_shared(directory, name)


def join(config: pytest.Config, *, interrupted: bool) -> Session:
    """Merge the workers' reports into the report of the run, in the same way as shards.

    Args:
        config: The configuration of the first process.
        interrupted: Whether the run was interrupted. Then an unfinished part is not a fault.

    Returns:
        The finished run.
    """
    settings = config.stash[SETTINGS]
    name = config.stash[_RUN]
    report = report_directory.lock_directory(settings.report_dir, name)
    parts = stored_run.parts_of(settings.report_dir)
    deaths = [] if interrupted else _deaths(config, parts)
    architectures = architectures_asked_for(expressions.marker_expression(config))
    whole, known = merging.join(settings.report_dir, parts, deaths)
    if interrupted:
        whole.exit_status = INTERRUPTED
        verdict_file.write(whole, settings.report_dir / verdict_file.NAME)
    record = RunRecord(
        directory=settings.report_dir,
        log=EventLog(whole),
        say=functools.partial(terminal.say, config),
        secrets=secrets_given(settings),
    )
    session = Session(
        run=Run.of(target.resolve(settings, architectures), record),
        settings=settings,
        report=report,
        run_id=name,
        crashes=CrashDesk(record, settings),
        interrupted=interrupted,
    )
    config.stash[SESSION] = session
    config.stash[REPORT] = reporting.write(config, session, known)
    return session


def _deaths(config: pytest.Config, parts: Mapping[str, VerdictFile]) -> list[TestReport]:
    """Return a failure for each test in which a worker died, and for each unfinished part."""
    killers = config.stash.get(_KILLERS, {})
    levels = {}
    for file in parts.values():
        if file.shard is not None:
            levels.update({test.id: test.level for test in file.shard.tests})
    deaths = []
    for test, why in killers.items():
        if test in levels:
            fact = Fact("a test that does not crash its xdist worker", printable(why))
            deaths.append(TestReport.of(test, levels[test], fact))
    if deaths:
        return deaths
    for folder, file in parts.items():
        if not file.finished:
            name = Path(folder).name
            observed = "a part without an end; the worker's output shows why"
            fact = Fact("the worker to end its part", observed, name)
            deaths.append(TestReport.of(f"{BESIDE}worker {name}", "smoke", fact))
    return deaths
