"""Output on the terminal: settings in the header, progress of long work, the closing table."""

import contextlib
import time

import pytest

from sm121 import __version__
from sm121.core import architecture, errors, redaction
from sm121.core.printable import printable
from sm121.core.templates import one_line, rendered
from sm121.core.verdict import Verdict
from sm121.plugin import held_output, larger_plans, planning, selection
from sm121.plugin.stash import LEVEL, PROGRESS, REPORT, SETTINGS
from sm121.report import findings, headline, key_numbers, rows, run_plan
from sm121.report.stored import StoredReport
from sm121.run.fingerprint import profile_label
from sm121.run.record import ProgressLine
from sm121.run.verdict_file import VerdictFile
from sm121.session import target as target_of_run
from sm121.session.session import Session

#: Set where this machine cannot run the target, so that one line says all that there is to say.
NOTHING_RUNS = pytest.StashKey[bool]()
COLLECTED = pytest.StashKey[list[pytest.Item]]()
#: What pytest's own summary lists where ``-r`` does not say it.
_REPORTED = "fE"
_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INVALID: "red"}


def header(config: pytest.Config) -> list[str]:
    """The lines of the header: what was asked for."""
    settings = config.stash[SETTINGS]
    variables = redaction.redact_environment(dict(settings.engine_environment))
    extra = [
        *redaction.redact_arguments(settings.engine_arguments),
        *(f"{key}={value}" for key, value in variables.items()),
    ]
    detected = architecture.detect()
    values = {"settings": settings, "detected": detected, "extra": extra, "version": __version__}
    return rendered("header.txt.j2", one_line, **values).splitlines()


def say_only_why_not(config: pytest.Config) -> None:
    """Show nothing but the verdict where this machine cannot run the target, unless ``-v`` asks."""
    asks_for_more = config.option.verbose > 0 or config.option.collectonly
    if asks_for_more or not selection.asked_for_levels(config):
        return
    asked = selection.architectures_asked_for(config.getoption("markexpr", "") or "")
    with contextlib.suppress(errors.UsageError):  # raised again when the run is opened
        if target_of_run.machine_obstacle(config.stash[SETTINGS], asked) is None:
            return
        _say_nothing_but_the_verdict(config)


def opened(config: pytest.Config, session: Session | None, items: list[pytest.Item]) -> None:
    """The run is open: show where the report before is, or nothing but the verdict if only now an
    obstacle is known: no test is selected."""
    if session is None or NOTHING_RUNS in config.stash:
        return
    is_foreign = any(LEVEL not in item.stash for item in items)
    shows_more = config.option.verbose > 0 or config.option.collectonly or is_foreign
    if session.target.obstacle is None or shows_more:
        session.say_where_the_earlier_report_is()
        return
    held_output.drop(config)
    held_output.release(config)
    _say_nothing_but_the_verdict(config)


def _say_nothing_but_the_verdict(config: pytest.Config) -> None:
    config.stash[NOTHING_RUNS] = True
    config.option.verbose = -2
    config.option.reportchars = "N"


def target(session: Session) -> list[str]:
    """The settings in force, after they were resolved."""
    run = session.file
    label = profile_label
    return rendered("target.txt.j2", one_line, run=run, label=label).splitlines()


def say(
    config: pytest.Config, what: str, line: str, kind: ProgressLine = ProgressLine.NOTE
) -> None:
    """Show a line at once, although pytest captures output."""
    progress = config.stash.get(PROGRESS, None)
    if progress is not None:
        progress.say(what, line, kind)
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if reporter is None:
        return
    with contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.write_line(f"[{time.strftime('%H:%M:%S')}] {what}: {line}")


def leave_out_tracebacks(terminal: "pytest.TerminalReporter") -> None:
    """The closing lines and the report say what failed of the levels. ``--tb``, ``-v``, ``-s`` and
    ``--pdb`` show pytest's tracebacks, and so does a failure of anybody else's test."""
    option = terminal.config.option
    wants_tracebacks = option.verbose > 0 or option.capture == "no" or option.usepdb
    red = [*terminal.getreports("failed"), *terminal.getreports("error")]
    only_levels = all("verdict" in dict(getattr(report, "user_properties", ())) for report in red)
    if option.tbstyle == "auto" and only_levels and not wants_tracebacks:
        option.tbstyle = "no"
        if option.reportchars == _REPORTED:  # what failed once more, a line for each test
            terminal.reportchars = terminal.reportchars.translate(
                dict.fromkeys(map(ord, _REPORTED))
            )


def say_each_reason_once(terminal: "pytest.TerminalReporter") -> None:
    """Let pytest's summary show a reason once for the skipped tests of a file, with their number.
    It folds reports of one line."""
    for report in terminal.getreports("skipped"):
        is_of_level = "verdict" in dict(report.user_properties)
        if is_of_level and isinstance(report.longrepr, tuple):
            file, _, reason = report.longrepr
            report.longrepr = (file, None, reason)


def would_run(terminal: "pytest.TerminalReporter", config: pytest.Config) -> None:
    """``--collect-only``: show what would run, and why the rest would not."""
    items = config.stash.get(COLLECTED, [])
    plan = planning.of_collected(config, items)
    if plan.is_empty:
        chosen = config.stash.get(planning.TARGET, None)
        why = chosen.obstacle if chosen is not None else None
        run_plan.tell(run_plan.Answer(refusal=why or "expected a test of a level, got none"))
        return
    run_plan.tell(run_plan.Answer(plan=plan))
    terminal.section("sm121 conformance")
    terminal.write(run_plan.text(plan))


def _left_out(config: pytest.Config) -> list[str]:
    """What was not run, a line for each reason, the plan's first."""
    of_plan = config.stash.get(larger_plans.LEFT_OUT, None)
    lines = [str(of_plan)] if of_plan is not None else []
    return [*lines, *config.stash.get(selection.LEFT_OUT, [])]


def closing(terminal: "pytest.TerminalReporter", session: Session) -> None:
    """Show the levels, the findings, the main numbers, and the verdict as the last line."""
    file = session.file
    if NOTHING_RUNS in terminal.config.stash and file.verdict is Verdict.NOT_RUN:
        terminal.write_line(printable(str(headline.of(file))), bold=True, yellow=True)
        return
    report = terminal.config.stash.get(REPORT, None)
    terminal.section("sm121 conformance")
    waivers = [
        f"{waiver.test} {waiver.case or ''}".rstrip()
        for waiver in session.settings.waivers
        if not any(
            test.waived
            and waiver.test == test.id
            and any(waiver.names(fact, test.facts) for fact in test.facts)
            for test in session.ledger
        )
    ]
    crashes = report.crashes if report is not None else ()
    crashed = {crash.test for crash in crashes}
    groups = findings.grouped(report) if report is not None else []
    remaining = [each for each in groups if not crashed.issuperset(each.ids)]
    page = session.directory / "report.html"
    conclusion = headline.of(file)
    text = rendered(
        "closing.txt.j2",
        one_line,
        run=file,
        columns=rows.counts_shown(file.levels.values()),
        report=report,
        waivers=waivers,
        crashes=findings.same(crashes, lambda crash: (crash.kind, crash.summary)),
        findings=findings.same(remaining, lambda finding: (finding.verdict, finding.observed)),
        pasted=terminal.config.getoption("--format") != "text",
        numbers=_numbers(terminal.config, file, report).splitlines(),
        hidden_gates=key_numbers.not_shown(file),
        bound_doubt=key_numbers.bound_doubt(file),
        page=page if page.is_file() else session.directory / "verdict.json",
        left_out=_left_out(terminal.config),
        headline=conclusion,
        action=headline.action(report) if report is not None else None,
        brief=headline.brief,
    )
    terminal.write(text)
    colour = _COLOURS.get(file.verdict, "yellow")
    terminal.write_line(printable(str(conclusion)), bold=True, **{colour: True})


def _numbers(config: pytest.Config, run: VerdictFile, report: StoredReport | None) -> str:
    """The main numbers in the form of ``--format``."""
    form = config.getoption("--format")
    if form == "llama-benchy":
        return key_numbers.llama_benchy(run, report.details.samples if report is not None else {})
    table = key_numbers.rows(run)
    if form == "markdown":
        return key_numbers.markdown(table)
    return key_numbers.aligned(table)
