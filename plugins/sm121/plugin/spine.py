"""All hooks of pytest that the suite uses, in pytest's order. A hook's body lists its steps.

A comment says why a hook must run first, last or around other hooks.
"""

import logging
from collections.abc import Generator
from typing import Any

import pytest

from sm121.plugin import (
    answers,
    benchmarks,
    certificate,
    comparing,
    comparing_tests,
    expressions,
    fixtures,
    held_output,
    kernels,
    larger_plans,
    library_warnings,
    matrix,
    opening,
    options,
    oracle_answers,
    outcomes,
    parts,
    performance,
    planning,
    progress,
    reporting,
    resuming,
    selection,
    shards,
    stash,
    terminal,
    timing,
    workers,
)
from sm121.session import against, certified_run
from sm121.session.session import Session

_log = logging.getLogger(__name__)
#: The exit statuses with which pytest ends if no test failed.
_OWN_ENDS = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    options.add(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Add the paths of the suite's tests for ``sm121 run``. Refuse a misspelt option."""
    options.name_own_tests(early_config, args)
    options.keep_standard_input(args)
    with planning.telling_refusal():
        result = yield
        options.refuse_misspelt(parser, args)
        options.refuse_unknown(early_config, parser, args)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)  # runs before xdist decides
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """Start the certified run. With ``-n``, give all tests that need a server to one worker."""
    with planning.telling_refusal():
        if config.getoption("--certify") and not certified_run.is_this_process():
            certificate.start(config)
        workers.choose(config)
        return (yield)


@pytest.hookimpl(tryfirst=True)  # runs before pytest-benchmark reads its options
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, read the settings, and refuse contradictory options."""
    for line in options.markers():
        config.addinivalue_line("markers", line)
    workers.disable_timing(config)
    library_warnings.only_warn_from_now_on(config)
    with opening.refusing(config):
        config.stash[stash.SETTINGS] = options.read_settings(config)
        selection.tell_target(config)
        comparing.refuse_what_crashes(config)
        reporting.refuse_place_of_junit(config)
    terminal.say_only_why_not(config)


@pytest.hookimpl(tryfirst=True)  # runs before the header
def pytest_sessionstart(session: pytest.Session) -> None:
    """Hold back pytest's header, so that a refusal prints one line. Refuse before workers start."""
    held_output.hold(session.config)
    parts.refuse(session.config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Show the requested settings."""
    return terminal.header(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests over the cases, matrix cells, depths and streams of the plan."""
    fixtures.parametrize(metafunc)
    kernels.parametrize(metafunc)
    performance.parametrize(metafunc)
    matrix.parametrize(metafunc)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Show that a long collection is in progress. A worker passes a refusal to the first process.

    pytest-benchmark does not store a refused run.
    """
    try:
        with progress.going_on(session.config, "collecting the tests"):
            return (yield)
    except pytest.UsageError as error:
        refusal = options.in_one_line(session.config, error)
        workers.hand_over_refusal(session.config, refusal)
        comparing.store_nothing(session.config)
        raise refusal from None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Find the levels before -m is applied. Divide the tests that -m leaves into shards."""
    selection.by_level(config, items)
    workers.group(config, items)
    with opening.refusing(), workers.reporting_no_test(items):
        expressions.refuse_misspelt_marker(config, items)
    _step("levels found")
    held = comparing_tests.hold_comparison(config, items)
    result = yield
    comparing_tests.put_back(items, held)
    collected = config.stash[planning.COLLECTED] = [*items]
    with opening.refusing(), workers.reporting_no_test(items), library_warnings.only_warn():
        selection.leave_out(config, items)
        selection.refuse_wrong_names(config, collected)
        refused = config.stash.get(matrix.REFUSED, None)
        if refused is not None:
            raise refused
        workers.name_groups(config, items)
        shards.divide(config, items)
    config.stash[selection.SELECTED] = True
    _step("tests selected")
    return result


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remember which tests -m, -k and --deselect removed; a certificate may require them."""
    if items:
        selection.note_deselected(items[0].config, items)


@pytest.hookimpl(wrapper=True)  # runs before xdist reports the collection to the first process
def pytest_collection_finish(session: pytest.Session) -> Generator[None, object, object]:
    """Open the run. Refuse wrong requests before a server starts."""
    config = session.config
    with opening.refusing(config):
        with library_warnings.only_warn():
            comparing.refuse(config, session.items)
            conformance = opening.open_run(config, session.items)
        if conformance is not None:
            with opening.withdrawing(config, conformance):
                answers.refuse_wrong_files(config, conformance)
                performance.refuse_wrong_sizes(conformance)
                if conformance.run.target.obstacle is None:
                    workers.refuse_gates(config, session.items, conformance.run.profile)
                trusted = conformance.settings.judging.against
                if trusted is not None and conformance.run.target.obstacle is None:
                    against.refuse(trusted, conformance.run.record.file)
                matrix.refuse_wrong_arguments(config, conformance, session.items)
                opening.take_machine(config, conformance, session.items)
                resuming.take_up(config, conformance)
            benchmarks.keep_quiet(config, session.items)
            comparing.guard(config, conformance)
            reporting.begin(config, conformance, session.items)
            resuming.leave_out_decided(config, conformance, session.items)
            kernels.check_beside_the_start(config, conformance, session.items)
            conformance.write_verdict()
            certificate.show_removed_variables(config)
            _step("opened")
    terminal.opened(config, conformance, session.items)
    parts.hand_over_lines(config, conformance, session.items)
    result = yield
    if conformance is not None:
        matrix.show_outlook(config, conformance, session.items)
    return result


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Show which checks will run, and which were left out."""
    if config.option.collectonly:
        config.stash[terminal.COLLECTED] = [item for item in items if stash.LEVEL in item.stash]
    if terminal.NOTHING_RUNS in config.stash:
        return []
    session = config.stash.get(stash.SESSION, None)
    lines: list[str] = []
    if session is not None:
        lines = [*terminal.target(session), *planning.head(config, session.run.target, items)]
    lines += larger_plans.lines(config, session, items)
    return [*lines, *shards.lines(config, items)]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give an xdist worker, before it starts, the name of its run."""
    parts.describe_run(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Show the output that was held back if the worker has tests and so accepted the request."""
    if ids:
        held_output.release(node.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Refuse the run if the worker has refused it. Keep its lines for the end of the run."""
    parts.show_refusal(node)
    parts.keep_lines(node)
    _step("a worker ended")


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Remember that a worker died in a test."""
    parts.note_killer(sched.config, crashitem, report)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Make the decisions that need the running server, before pytest-benchmark stores the run."""
    held_output.tests_begin(session.config)
    try:
        _show_progress(session.config)
        with parts.going_on(session.config):
            result = yield
    finally:
        _stop_progress(session.config)
        conformance = session.config.stash.get(stash.SESSION, None)
        if conformance is not None:
            box = conformance.recorder.box
            if box is not None and box.unread and not conformance.interrupted:
                box.read_at_the_end()  # the run may have ended within a level that measures
                _step("box read again")
            _step("last test ended")
    if conformance is not None:
        session.config.stash[stash.SIGNALS].again()
        with library_warnings.only_warn():
            comparing.decide(session.config, conformance, session.items)
        benchmarks.keep_history(session.config, conformance)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)  # runs outside a test's time limit
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Show the test in the progress. After the last measurement, read the machine's state."""
    if stash.SESSION not in item.config.stash or stash.LEVEL not in item.stash:
        return (yield)
    item.config.stash[stash.SIGNALS].again()
    bar = item.config.stash.get(stash.PROGRESS, None)
    if bar is not None:
        bar.begin(item.stash[stash.LEVEL], item.stash[stash.ID])
    result = yield
    if performance.read_the_box_again(item, nextitem):
        _step("box read again")
    timing.note(item)
    if bar is not None and stash.FINDING in item.stash:
        bar.end(item.stash[stash.FINDING])
    return result


@pytest.hookimpl(wrapper=True)
def pytest_report_teststatus(
    config: pytest.Config,
) -> Generator[None, tuple[str, str, object], tuple[str, str, object]]:
    """Print no letter for a test if the suite's own progress is shown instead."""
    category, letter, word = yield
    bar = config.stash.get(stash.PROGRESS, None)
    is_alone = bar is not None and bar.is_alone
    if is_alone or terminal.NOTHING_RUNS in config.stash:
        return category, "", ""
    return category, letter, word


def pytest_enter_pdb(config: pytest.Config) -> None:
    """Stop the progress, because the debugger needs the terminal."""
    held_output.release(config)
    _stop_progress(config)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start a test of a level, or skip it with the reason."""
    session = item.config.stash.get(stash.SESSION, None)
    if session is None or stash.LEVEL not in item.stash:
        return
    item.stash[stash.STARTS] = len(timing.starts_of(session))
    session.before_test(item.stash[stash.ID], item.stash[stash.LEVEL])
    item.stash[stash.MEASURED] = len(session.recorder.recorded)
    performance.end_with_its_level(item, session)
    oracle_answers.end_with_its_levels(item)
    session.crashes.after_abort(session.run.servers)
    outcomes.require_able(session, item, workers.why_not(item))


# Runs after all other plugins have changed the report.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After each phase of a test, check for a crash, then update the verdict."""
    session = item.config.stash.get(stash.SESSION, None)
    if session is None or stash.LEVEL not in item.stash:
        return (yield)
    error = outcomes.crash(outcomes.error_of(call))
    if error is not None:
        session.crashes.after_error(session.run.servers, item.stash[stash.ID], error)
        _step("crash looked for")
    outcomes.leave_out_libraries(item, call)
    report = yield
    outcomes.update_verdict(session, item, call, report)
    if report.failed or item.stash[stash.FINDING].excused:
        reporting.note_failure(session, item, report)
    reporting.redact(session, report)
    if report.when == "teardown":
        oracle_answers.begin_beside(item, session)
        _step(f"decided {item.stash[stash.FINDING].verdict.value}")
        session.after_test(item.stash[stash.ID], item.stash[stash.LEVEL])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Repeat measurements that passed. Free the kernel level's GPU memory for the next server."""
    try:
        performance.look_again_after_the_level(item, nextitem)
        return (yield)
    finally:
        kernels.end_processes_after_the_level(item, nextitem)


# Runs around pytest's teardown, and within the summary.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(
    session: pytest.Session, exitstatus: int | pytest.ExitCode
) -> Generator[None, object, object]:
    """Make the last decisions, write the report, and set the exit status."""
    config = session.config
    held_output.run_ended(config, exitstatus)
    if stash.SESSION not in config.stash and not parts.has_any(config):
        opening.end_without_levels(session, exitstatus)
    conformance = config.stash.get(stash.SESSION, None)
    with progress.going_on(config, "ending the run"):
        try:
            return (yield)
        finally:
            if conformance is not None:
                with library_warnings.only_warn():
                    _finish(session, conformance, exitstatus)
            elif parts.has_any(config) and exitstatus != pytest.ExitCode.USAGE_ERROR:
                interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
                conformance = parts.join(config, interrupted=interrupted)
                _step(f"parts joined {conformance.run.record.file.verdict.value}")
                _end_with(session, conformance, exitstatus)


def _finish(
    session: pytest.Session, conformance: Session, exitstatus: int | pytest.ExitCode
) -> None:
    run = conformance.run
    config = session.config
    conformance.crashes.after_abort(run.servers)
    run.record.enter(run.record.phase[0], "at the end of the run")
    comparing.decide_what_broke(config, conformance)
    performance.end_load(config)
    oracle_answers.end_beside(config)
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        conformance.interrupt()
    matrix.end(config, interrupted=conformance.interrupted)
    timing.store_durations(config, conformance)
    conformance.close()
    answers.conclude_golden(conformance)
    _step(f"closed {run.record.file.verdict.value}")
    config.stash[stash.REPORT] = reporting.write(config, conformance, run.record.log.fold.details)
    _step("report written")
    opening.release_machine(config)
    _end_with(session, conformance, exitstatus)


def _end_with(
    session: pytest.Session, conformance: Session, exitstatus: int | pytest.ExitCode
) -> None:
    """End pytest with the status of the run's verdict."""
    if conformance.interrupted or exitstatus == pytest.ExitCode.INTERNAL_ERROR:
        return
    if conformance.run.record.file.exit_status != 0 or exitstatus in _OWN_ENDS:
        session.exitstatus = conformance.run.record.file.exit_status
    # Otherwise a test outside the levels failed: keep pytest's own status.


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_benchmark_compare_machine_info(
    benchmarksession: Any, compared_benchmark: dict[str, Any]
) -> Generator[None, object, object]:
    """Warn of a run on another machine. The warning of pytest-benchmark can raise an error."""
    try:
        return (yield)
    except (ValueError, KeyError):
        node = compared_benchmark.get("machine_info", {}).get("node", "not known")
        benchmarksession.logger.warning(f"The compared run is of another machine state: {node}")
        return None


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Store the properties of the machine that must be equal in order to compare two runs."""
    benchmarks.describe_machine(config.stash[stash.SETTINGS], machine_info)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    """Store the commits of the engine's packages."""
    session = config.stash.get(stash.SESSION, None)
    if session is not None:
        commit_info["git_shas"] = session.run.record.file.environment.get("git_shas")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Store the final verdicts, because the machine may have become unfit after a measurement."""
    session = config.stash.get(stash.SESSION, None)
    if session is not None:
        benchmarks.describe_end(session, output_json)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # runs after pytest's own summary, which may be long
def pytest_terminal_summary(
    terminalreporter: "pytest.TerminalReporter", exitstatus: int, config: pytest.Config
) -> Generator[None, object, object]:
    """Show the matrix, the levels, the numbers, and the verdict as the last line."""
    session = config.stash.get(stash.SESSION, None)
    if session is not None:
        terminal.leave_out_tracebacks(terminalreporter)
        terminal.say_each_reason_once(terminalreporter)
    result = yield
    if exitstatus == pytest.ExitCode.USAGE_ERROR:
        return result  # pytest prints a refused request as one line
    if session is not None:
        matrix.show_account(terminalreporter, config)
        terminal.closing(terminalreporter, session)
    elif config.option.collectonly:
        terminal.would_run(terminalreporter, config)
    return result


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop everything that is still running, and release the report directory."""
    session = config.stash.get(stash.SESSION, None)
    if session is not None:
        session.release()
        _step("released")
    signals = config.stash.get(stash.SIGNALS, None)
    if signals is not None:
        signals.restore()


def _show_progress(config: pytest.Config) -> None:
    expected = config.stash.get(planning.FORECAST, None)
    if stash.SESSION not in config.stash or expected is None:
        return
    bar = progress.of_run(config, expected, timing.starts_of(config.stash[stash.SESSION]))
    if bar is not None:
        config.stash[stash.PROGRESS] = bar


def _stop_progress(config: pytest.Config) -> None:
    bar = config.stash.get(stash.PROGRESS, None)
    if bar is not None:
        del config.stash[stash.PROGRESS]
        bar.stop()


def _step(what: str) -> None:
    _log.debug("%s", what)
