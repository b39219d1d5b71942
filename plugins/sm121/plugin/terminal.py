"""Output on the terminal: the settings in the header, progress, and the closing table."""

import contextlib
import time
import warnings
from collections.abc import Sequence

import pytest

from pytest_gpu_arch.expression import architectures_asked_for
from sm121 import __version__
from sm121.core import architecture, errors, redaction
from sm121.core.printable import printable
from sm121.core.templates import one_line, rendered
from sm121.core.verdict import Verdict
from sm121.machine.box import BoxState
from sm121.measure import number_table
from sm121.plugin import expressions, held_output, larger_plans, planning, selection
from sm121.plugin.stash import LEVEL, PROGRESS, REPORT, SETTINGS
from sm121.report import findings, headline, key_numbers, rows, run_plan
from sm121.report.findings import FailureGroup
from sm121.report.stored import StoredReport
from sm121.run.fingerprint import profile_label
from sm121.run.machine_report import CrashReport
from sm121.run.record import ProgressLine
from sm121.run.verdict_file import VerdictFile
from sm121.session import target as target_of_run
from sm121.session import unused_waivers
from sm121.session.session import Session

#: Set if this machine cannot run the target. Then only one line is shown.
NOTHING_RUNS = pytest.StashKey[bool]()
COLLECTED = pytest.StashKey[list[pytest.Item]]()
#: The letters of the outcomes that pytest's own summary lists if ``-r`` is not given.
_REPORTED = "fE"
_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INVALID: "red"}


def header(config: pytest.Config) -> list[str]:
    """Return the lines of the header: the settings of the run.

    Args:
        config: The configuration of pytest.
    """
    settings = config.stash[SETTINGS]
    extra = [*redaction.redact_arguments(settings.engine.arguments)]
    variables = redaction.redact_environment(dict(settings.engine.environment))
    for key, value in variables.items():
        extra.append(f"{key}={value}")
    detected = architecture.detect()
    values = {"settings": settings, "detected": detected, "extra": extra, "version": __version__}
    return rendered("header.txt.j2", one_line, **values).splitlines()


def say_only_why_not(config: pytest.Config) -> None:
    """If this machine cannot run the target, show only the verdict, unless ``-v`` is given.

    Args:
        config: The configuration of pytest.
    """
    asks_for_more = config.option.verbose > 0 or config.option.collectonly
    if asks_for_more or not expressions.asked_for_levels(config):
        return
    asked = architectures_asked_for(expressions.marker_expression(config))
    with contextlib.suppress(errors.UsageError):  # reported when the run is opened
        if target_of_run.machine_obstacle(config.stash[SETTINGS], asked) is None:
            return
        _say_nothing_but_the_verdict(config)


def opened(config: pytest.Config, session: Session | None, items: list[pytest.Item]) -> None:
    """Show the folder of the earlier report, or only the verdict if no test can run.

    Args:
        config: The configuration of pytest.
        session: The open run; None without one.
        items: The selected tests.
    """
    if session is None or NOTHING_RUNS in config.stash:
        return
    is_foreign = any(LEVEL not in item.stash for item in items)
    shows_more = config.option.verbose > 0 or config.option.collectonly or is_foreign
    if session.run.target.obstacle is None or shows_more:
        session.say_where_the_earlier_report_is()
        return
    held_output.drop(config)
    held_output.release(config)
    _say_nothing_but_the_verdict(config)


def _say_nothing_but_the_verdict(config: pytest.Config) -> None:
    config.stash[NOTHING_RUNS] = True
    config.option.verbose = -2
    config.option.reportchars = "N"
    # Suppress this warning of --benchmark-autosave. The verdict says why there is no benchmark.
    warnings.filterwarnings("ignore", "Not saving anything, no benchmarks have been run")


def target(session: Session) -> list[str]:
    """Return the lines on the resolved settings of the run.

    Args:
        session: The run.
    """
    run = session.run.record.file
    label = profile_label
    return rendered("target.txt.j2", one_line, run=run, label=label).splitlines()


def say(
    config: pytest.Config, what: str, line: str, kind: ProgressLine = ProgressLine.NOTE
) -> None:
    """Show a line at once, although pytest captures output.

    Args:
        config: The configuration of pytest.
        what: The subject of the line.
        line: The line.
        kind: How long the line is shown.
    """
    progress = config.stash.get(PROGRESS, None)
    if progress is not None:
        progress.say(what, line, kind)
        return
    timed = f"[{time.strftime('%H:%M:%S')}] {what}: {line}"
    if held_output.note(config, timed):
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if reporter is None:
        return
    shown = contextlib.nullcontext()
    if capture is not None:
        shown = capture.global_and_fixture_disabled()
    with shown:
        reporter.ensure_newline()
        reporter.write_line(timed)


def leave_out_tracebacks(terminal: "pytest.TerminalReporter") -> None:
    """Hide the traceback of a level's failure, because closing lines and report show the failure.

    pytest's tracebacks are shown with ``--tb``, ``-v``, ``-s`` and ``--pdb``, and if a test outside
    the levels failed.

    Args:
        terminal: The terminal reporter of pytest.
    """
    option = terminal.config.option
    if option.tbstyle != "auto" or option.verbose > 0:
        return
    if option.capture == "no" or option.usepdb:
        return
    red = [*terminal.getreports("failed"), *terminal.getreports("error")]
    if not all(_is_of_level(report) for report in red):
        return
    option.tbstyle = "no"
    if option.reportchars == _REPORTED:  # pytest would list the same failures
        for letter in _REPORTED:
            terminal.reportchars = terminal.reportchars.replace(letter, "")


def _is_of_level(report: object) -> bool:
    """Whether a report belongs to a test of a level."""
    return "verdict" in dict(getattr(report, "user_properties", ()))


def say_each_reason_once(terminal: "pytest.TerminalReporter") -> None:
    """Let pytest's summary show each skip reason once per file, with the number of tests.

    pytest combines skipped tests that have the same file, line and reason.

    Args:
        terminal: The terminal reporter of pytest.
    """
    for report in terminal.getreports("skipped"):
        if _is_of_level(report) and isinstance(report.longrepr, tuple):
            file, _, reason = report.longrepr
            report.longrepr = (file, None, reason)


def would_run(terminal: "pytest.TerminalReporter", config: pytest.Config) -> None:
    """For ``--collect-only``, show which checks would run, and why the others would not.

    Args:
        terminal: The terminal reporter of pytest.
        config: The configuration of pytest.
    """
    items = config.stash.get(COLLECTED, [])
    plan = planning.of_collected(config, items)
    if plan.is_empty:
        why: str | None = None
        chosen = config.stash.get(planning.TARGET, None)
        if chosen is not None:
            why = chosen.obstacle
        run_plan.write_answer(
            run_plan.PlanAnswer(refusal=why or "expected a test of a level, got none")
        )
        return
    refusal = planning.refusal(config)
    run_plan.write_answer(run_plan.PlanAnswer(plan=plan, refusal=refusal))
    terminal.section("sm121 conformance")
    terminal.write(run_plan.text(plan))


def _left_out(config: pytest.Config, session: Session) -> list[str]:
    """Return one line for each reason why tests were left out; the plan comes first."""
    lines = []
    of_plan = config.stash.get(larger_plans.LEFT_OUT, None)
    if of_plan is not None:
        lines.append(str(of_plan))
    of_gates = larger_plans.gates_left_out(config, session)
    if of_gates is not None:
        lines.append(of_gates)
    return [*lines, *config.stash.get(selection.LEFT_OUT, [])]


def _no_baseline(config: pytest.Config, run: VerdictFile) -> list[str]:
    """Return one line if the run is stored, but cannot be a baseline."""
    if not selection.stores(config) or not run.metrics or run.box.state != BoxState.DEGRADED:
        return []
    why = headline.brief(run.box.reason or "reason unknown", 80)
    return [
        f"stored run: no later run is compared with it, because the machine was DEGRADED: {why}"
    ]


def closing(terminal: "pytest.TerminalReporter", session: Session) -> None:
    """Show the levels, the findings, the main numbers, and the verdict as the last line.

    Args:
        terminal: The terminal reporter of pytest.
        session: The run, which is closed.
    """
    run = session.run
    file = run.record.file
    if NOTHING_RUNS in terminal.config.stash and file.verdict is Verdict.NOT_RUN:
        terminal.write_line(printable(str(headline.headline_of(file))), bold=True, yellow=True)
        return
    report = terminal.config.stash.get(REPORT, None)
    terminal.section("sm121 conformance")
    crashes: Sequence[CrashReport] = ()
    remaining: list[FailureGroup] = []
    action: headline.Action | None = None
    if report is not None:
        crashes = report.crashes
        crashed = {crash.test for crash in crashes}
        for each in findings.grouped(report):
            if not crashed.issuperset(each.ids):
                remaining.append(each)
    page = run.record.directory / "report.html"
    if not page.is_file():
        page = run.record.directory / "verdict.json"
    conclusion = headline.headline_of(file)
    unused = unused_waivers.unused(session.settings.judging.waivers, file.tests)
    if report is not None:
        action = headline.action(report)
    text = rendered(
        "closing.txt.j2",
        one_line,
        run=file,
        columns=rows.counts_shown(file.levels.values()),
        report=report,
        waivers=[waiver.name for waiver in unused],
        crashes=findings.same(crashes, lambda crash: (crash.kind, crash.summary)),
        findings=findings.same(remaining, lambda finding: (finding.verdict, finding.observed)),
        pasted=terminal.config.getoption("--format") != "text",
        numbers=_numbers(terminal.config, file, report).splitlines(),
        hidden_gates=key_numbers.not_shown(file),
        bound_doubt=key_numbers.bound_doubt(file),
        page=page,
        left_out=[*_left_out(terminal.config, session), *_no_baseline(terminal.config, file)],
        headline=conclusion,
        action=action,
        brief=headline.brief,
    )
    terminal.write(text)
    colour = _COLOURS.get(file.verdict, "yellow")
    terminal.write_line(printable(str(conclusion)), bold=True, **{colour: True})


def _numbers(config: pytest.Config, run: VerdictFile, report: StoredReport | None) -> str:
    """Return the main numbers in the format of ``--format``."""
    form = config.getoption("--format")
    if form == "llama-benchy":
        samples = report.details.samples if report is not None else {}
        return key_numbers.llama_benchy(run, samples)
    table = key_numbers.rows(run)
    if form == "markdown":
        return key_numbers.markdown(table)
    return number_table.aligned(table)
