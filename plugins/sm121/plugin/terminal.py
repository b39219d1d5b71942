"""What a person sees: the settings in the header, progress of long work, the closing table."""

from __future__ import annotations

import time
from collections.abc import Generator
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from rich.table import Table

from sm121 import __version__
from sm121.core import architecture
from sm121.core.redaction import redact_arguments, redact_environment
from sm121.core.verdict import Verdict
from sm121.plugin.certification import DESELECTED
from sm121.plugin.options import SETTINGS
from sm121.plugin.selection import LEVEL

if TYPE_CHECKING:
    from sm121.plugin.run import Run

#: The tests of levels that were collected, where nothing but that was asked for.
COLLECTED = pytest.StashKey[list[pytest.Item]]()

_COLOURS = {
    Verdict.PASS: {"green": True},
    Verdict.FAIL: {"red": True},
    Verdict.INVALID: {"red": True},
    Verdict.INCONCLUSIVE: {"yellow": True},
    Verdict.NOT_RUN: {"yellow": True},
}


def pytest_report_header(config: pytest.Config) -> list[str]:
    settings = config.stash[SETTINGS]
    detected = architecture.detect()
    profile = settings.profile.name if settings.profile else "by architecture"
    lines = [
        f"sm121 {__version__}: arch {settings.arch or 'by detection'} "
        f"(this machine: {detected.name or 'unknown'}; {detected.evidence}), profile {profile}"
        + (", certify" if settings.certify else "")
    ]
    if settings.base_url:
        lines.append(
            f"engine: attached at {settings.base_url}, log {settings.server_log or 'unknown'}"
        )
    else:
        variables = redact_environment(dict(settings.engine_environment))
        extra = [
            *redact_arguments(settings.engine_arguments),
            *(f"{key}={value}" for key, value in variables.items()),
        ]
        lines.append(
            f"engine: {settings.engine}, started with {settings.engine_python}"
            + (f", plus {' '.join(extra)}" if extra else "")
            + (", debug" if settings.engine_debug else "")
        )
    lines.append(f"report: {settings.report_dir}, waivers: {len(settings.waivers)}")
    return lines


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """The settings in force, now that they are resolved."""
    from sm121.plugin.run import RUN

    if config.option.collectonly:
        config.stash[COLLECTED] = [item for item in items if LEVEL in item.stash]
    run = config.stash.get(RUN, None)
    if run is None:
        return []
    engine = run.file.engine
    how = "started by the suite" if engine.managed else "attached"
    return [
        f"target: arch {run.file.arch}, profile {run.file.profile}, configuration "
        f"{engine.configuration or 'none'}",
        f"engine: {engine.name} {engine.version or '(version unknown)'}, {how}, "
        f"model {engine.model or 'unknown'}",
    ]


def announce(config: pytest.Config, what: str, line: str) -> None:
    """Show progress of long work at once, past pytest's capturing."""
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


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after pytest's own summary, which may be long
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, None, None]:
    from sm121.plugin.run import RUN

    yield
    run = config.stash.get(RUN, None)
    if run is not None:
        _closing(terminalreporter, run)
    elif config.option.collectonly:
        _would_run(terminalreporter, config)


def _would_run(terminal: pytest.TerminalReporter, config: pytest.Config) -> None:
    """``--collect-only``: what would run, and why the rest would not."""
    reasons: dict[str, list[str]] = {}
    levels: dict[str, int] = {}
    for item in config.stash.get(COLLECTED, []):
        marker = item.get_closest_marker("skip")
        if marker is None:
            levels[item.stash[LEVEL]] = levels.get(item.stash[LEVEL], 0) + 1
        else:
            reason = str(marker.kwargs.get("reason", "")).removeprefix("NOT_RUN: ")
            reasons.setdefault(reason, []).append(item.nodeid)
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
    removed = config.stash.get(DESELECTED, [])
    if removed:
        terminal.write_line(f"would not run: {len(removed)} deselected ({removed[0]} ...)")


def _closing(terminal: pytest.TerminalReporter, run: Run) -> None:
    from sm121.plugin.report import first_finding

    file = run.file
    terminal.section("sm121 conformance")
    terminal.write(_levels_table(run, terminal._tw.fullwidth))
    engine = file.engine
    terminal.write_line(
        f"engine {engine.name} {engine.version or '(version unknown)'}, model {engine.model}, "
        f"attention {engine.path.attention or 'not proven'}, moe {engine.path.moe or 'not proven'}"
    )
    for item in file.unproven:
        terminal.write_line(f"not proven: {item}")
    unused = [waiver.test for waiver in run.settings.waivers if not _used(run, waiver.test)]
    for name in unused:
        terminal.write_line(f"waiver without a failure to waive: {name}")
    for crash in file.crashes:
        where = run.directory / crash.bundle if crash.bundle else "could not be written"
        terminal.write_line(f"crash: {crash.kind}: {crash.summary}; bundle: {where}")
    if file.remarks:
        many = f"{len(file.remarks)} remarks are" if len(file.remarks) > 1 else "a remark is"
        terminal.write_line(f"{many} in the report")
    for line in first_finding(run.config):
        terminal.write_line(line)
    page = run.directory / "report.html"
    terminal.write_line(f"report: {page if page.is_file() else run.directory / 'verdict.json'}")
    terminal.write_line(f"{file.verdict.value}: {file.reason}", bold=True, **_COLOURS[file.verdict])


def _used(run: Run, pattern: str) -> bool:
    waivers = [waiver for waiver in run.settings.waivers if waiver.test == pattern]
    return any(test.waived and waivers[0].applies_to(test.id) for test in run.file.tests)


def _levels_table(run: Run, width: int) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("level", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    columns = ("passed", "failed", "invalid", "inconclusive", "waived", "skipped", "not_run")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for name, level in run.file.levels.items():
        counts = [str(getattr(level, column)) for column in columns]
        table.add_row(name, level.verdict.value, *counts)
    buffer = StringIO()
    Console(file=buffer, width=max(width, 80), color_system=None).print(table)
    return buffer.getvalue()
