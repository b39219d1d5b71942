"""Output on the terminal: settings in the header, progress of long work, the closing table."""

import time
from collections.abc import Sequence
from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from sm121 import __version__
from sm121.core import architecture, redaction
from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.plugin import planning, selection
from sm121.plugin.stash import LEVEL, PROGRESS, REPORT, SETTINGS
from sm121.report import findings, headline, rows, stored
from sm121.run.fingerprint import profile_label
from sm121.session.session import Session

#: The tests of levels that ``--collect-only`` collected.
COLLECTED = pytest.StashKey[list[pytest.Item]]()
#: What pytest's own summary lists where ``-r`` does not say it.
_REPORTED = "fE"
#: Of each kind: what is said at the end of a failing run fits a screen of 40 lines.
_MOST_LINES = _MOST_FINDINGS = 2
_MOST_EVIDENCE = 1
_MOST_LENGTH = 180
_MOST_LINE = 196
#: The lists of a comparison with a trusted run, as they are counted.
_AGAINST = {
    "new": "new", "changed": "in another way", "missing": "missing", "path": "path",
    "worse": "worse", "mended": "mended", "known": "known", "unjudged": "not judged",
    "listed": "listed", "differs": "otherwise asked",
}  # fmt: skip
_COLOURS = {
    Verdict.PASS: {"green": True},
    Verdict.FAIL: {"red": True},
    Verdict.INVALID: {"red": True},
    Verdict.INCONCLUSIVE: {"yellow": True},
    Verdict.NOT_RUN: {"yellow": True},
}


def header(config: pytest.Config) -> list[str]:
    """The lines of the header: what was asked for."""
    settings = config.stash[SETTINGS]
    detected = architecture.detect()
    profile = settings.profile.name if settings.profile else "by architecture"
    lines = [
        f"sm121 {__version__}: arch {settings.arch or 'by detection'} "
        f"(this machine: {detected.name or 'unknown'}; {detected.evidence}), profile {profile}"
        + (", certify" if settings.certify else "")
    ]
    if settings.base_url:
        logs = ", ".join(map(str, filter(None, (settings.server_log, *settings.node_logs))))
        lines.append(f"engine: attached at {settings.base_url}, log {logs or 'unknown'}")
    else:
        variables = redaction.redact_environment(dict(settings.engine_environment))
        extra = [
            *redaction.redact_arguments(settings.engine_arguments),
            *(f"{key}={value}" for key, value in variables.items()),
        ]
        lines.append(
            f"engine: {settings.engine}, started with {settings.engine_python}"
            + (f", plus {' '.join(extra)}" if extra else "")
            + (", debug" if settings.engine_debug else "")
        )
    if settings.against is not None:
        trusted = settings.against.file
        lines.append(f"against: {settings.against.name}, {trusted.verdict}: {trusted.reason}"[:160])
    lines.append(f"report: {settings.report_dir}, waivers: {len(settings.waivers)}")
    return lines


def target(session: Session) -> list[str]:
    """The settings in force, after they were resolved."""
    engine = session.file.engine
    how = "started by the suite" if engine.managed else "attached"
    return [
        f"target: arch {session.file.arch}, profile "
        f"{profile_label(session.file.profile, session.file.fingerprint)}, configuration "
        f"{engine.configuration or 'none'}",
        f"engine: {engine.name} {engine.version or '(version unknown)'}, {how}, "
        f"model {engine.model or 'unknown'}",
        *([f"not proven: {engine.unwatched}"] if engine.unwatched is not None else []),
    ]


def say(config: pytest.Config, what: str, line: str) -> None:
    """Show a line at once, although pytest captures output."""
    if (progress := config.stash.get(PROGRESS, None)) is not None:
        progress.say(what, line)
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if reporter is None:
        return
    text = f"[{time.strftime('%H:%M:%S')}] {what}: {line}"
    if capture is None:
        reporter.write_line(text)
        return
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.write_line(text)


def leave_out_tracebacks(terminal: pytest.TerminalReporter) -> None:
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


def would_run(terminal: pytest.TerminalReporter, config: pytest.Config) -> None:
    """``--collect-only``: show what would run, and why the rest would not."""
    items = config.stash.get(COLLECTED, [])
    levels: dict[str, int] = {}
    for item in items:
        if item.get_closest_marker("skip") is None:
            levels[item.stash[LEVEL]] = levels.get(item.stash[LEVEL], 0) + 1
    reasons = planning.reasons(items)
    if not levels and not reasons:
        return
    terminal.section("sm121 conformance")
    counts = ", ".join(f"{name} {count}" for name, count in levels.items())
    terminal.write_line(
        f"would run: {sum(levels.values())} checks" + (f" ({counts})" if counts else "")
    )
    for reason, ids in reasons.items():
        terminal.write_line(f"would not run: {len(ids)} ({ids[0]}{' ...' if len(ids) > 1 else ''})")
        terminal.write_line(f"  because: {reason}")
    removed = [*config.stash.get(selection.DESELECTED, dict[str, frozenset[str]]())]
    if removed:
        terminal.write_line(f"would not run: {len(removed)} deselected ({removed[0]} ...)")
    for line in planning.whole(config, items):
        terminal.write_line(line)


def closing(terminal: pytest.TerminalReporter, session: Session) -> None:
    """Show the table of levels, what needs attention, and the verdict as the last line."""
    file = session.file
    report = terminal.config.stash.get(REPORT, None)
    terminal.section("sm121 conformance")
    terminal.write(_levels_table(session, terminal._tw.fullwidth))
    engine = file.engine
    _say(
        terminal,
        f"engine {engine.name} {engine.version or '(version unknown)'}, model {engine.model}, "
        f"attention {engine.path.attention or 'not proven'}, moe {engine.path.moe or 'not proven'}",
    )
    if (comparison := file.against) is not None:
        counts = ", ".join(
            f"{len(entries)} {label}"
            for name, label in _AGAINST.items()
            if (entries := getattr(comparison, name))
        )
        _say(terminal, f"against {comparison.run}: {counts or 'nothing differs'}")
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
    for node in file.engine.nodes:
        _say(terminal, f"rank {node.rank} on {node.node}: {node}")
    most = _MOST_LINES if file.verdict is Verdict.PASS else 1
    _few(terminal, "not proven", file.unproven, most)
    _few(terminal, "waiver without a failure to waive", waivers, most)
    if report is not None:
        _what_did_not_hold(terminal, report)
    if file.remarks:
        many = f"{len(file.remarks)} remarks are" if len(file.remarks) > 1 else "a remark is"
        _say(terminal, f"{many} in the report")
    page = session.directory / "report.html"
    report_file = page if page.is_file() else session.directory / "verdict.json"
    _say(terminal, f"report: {report_file}", whole=True)
    if (conclusion := headline.of(file)).price:
        _say(terminal, conclusion.price)
    if report is not None and (then := headline.action(report)) is not None:
        _say(terminal, f"{then.kind}: {then.text}", whole=True)
    terminal.write_line(printable(str(conclusion)), bold=True, **_COLOURS[file.verdict])


def _say(terminal: pytest.TerminalReporter, line: str, *, whole: bool = False) -> None:
    """A line of two rows or so that a terminal does not obey. `whole`: its end is copied."""
    text = printable(line)
    cut = len(text) > _MOST_LINE and not whole
    terminal.write_line(f"{text[:_MOST_LINE]} ..." if cut else text)


def _few(terminal: pytest.TerminalReporter, what: str, lines: Sequence[str], most: int) -> None:
    for line in lines[:most]:
        _say(terminal, f"{what}: {headline.brief(line, _MOST_LENGTH)}")
    if (remaining := len(lines) - most) > 0:
        _say(terminal, f"{what}: {remaining} more {'are' if remaining > 1 else 'is'} in the report")


def _what_did_not_hold(terminal: pytest.TerminalReporter, report: stored.StoredReport) -> None:
    """The crashes with the lines that say why, and the gravest findings: each reason once."""
    crashes = findings.same(report.crashes, lambda crash: (crash.kind, crash.summary))
    for position, (crash, *others) in enumerate(crashes[:_MOST_LINES]):
        _say(terminal, f"crash: {crash.kind}: {headline.brief(crash.summary)}")
        for line in crash.lines[: position == 0]:
            if not crash.summary.startswith(line):
                _say(terminal, f"  its line: {headline.brief(line, _MOST_LENGTH)}")
        where = report.directory / crash.bundle if crash.bundle else "could not be written"
        if crash.test and position == 0:
            more = f" and {len(others)} more" if others else ""
            _say(terminal, f"  in: {headline.brief(crash.test)}{more}")
        owner = headline.brief(crash.owner, _MOST_LENGTH // 2)
        _say(terminal, f"  bundle: {where}; ask: {owner}", whole=True)
    if len(crashes) > _MOST_LINES:
        _say(terminal, f"crash: {len(crashes) - _MOST_LINES} more are in the report")
    crashed = {crash.test for crash in report.crashes}
    remaining = [each for each in findings.grouped(report) if not crashed.issuperset(each.ids)]
    by_reason = findings.same(remaining, lambda finding: (finding.verdict, finding.observed))
    most = max(1, _MOST_FINDINGS - len(crashes))
    for position, (finding, *same) in enumerate(by_reason[:most]):
        count = sum(len(each.ids) for each in (finding, *same)) - 1
        more = f" and {count} more for the same reason" if count else ""
        _say(terminal, f"{finding.verdict.value}: {headline.brief(finding.ids[0])}{more}")
        requirement = finding.requirement if position == 0 else ""
        for label, text in (("requirement", requirement), ("required", finding.required)):
            if text:
                _say(terminal, f"  {label}: {headline.brief(text)}")
        _say(terminal, f"  seen: {headline.brief(finding.observed, _MOST_LENGTH)}")
        if position == 0 and finding.evidence:
            files = [str(report.directory / name) for name in finding.evidence[:_MOST_EVIDENCE]]
            rest = len(finding.evidence) - len(files)
            more = f" and {rest} more" if rest else ""
            _say(terminal, f"  evidence: {', '.join(files)}{more}", whole=True)
    if (others_left := len(by_reason) - most) > 0:
        are = "findings are" if others_left > 1 else "finding is"
        _say(terminal, f"{others_left} more {are} in the report")


def _levels_table(session: Session, width: int) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("level", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    columns = rows.counts_shown(session.file.levels.values())
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for name, level in session.file.levels.items():
        counts = [str(getattr(level, column)) for column in columns]
        table.add_row(name, level.verdict.value, *counts)
    buffer = StringIO()
    Console(file=buffer, width=max(width, 80), color_system=None).print(table)
    return buffer.getvalue()
