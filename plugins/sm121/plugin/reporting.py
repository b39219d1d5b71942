"""What the report shows of a test beyond its verdict: requirement, failure, how to run it again."""

import inspect
import os
import shlex
from pathlib import Path

import pytest

from sm121.core import own_options, own_tests
from sm121.core.printable import printable
from sm121.plugin.options import is_own_run
from sm121.plugin.selection import uses_a_server
from sm121.plugin.stash import ID, LEVEL, STARTS
from sm121.report import page
from sm121.report.stored import StoredReport
from sm121.run import details
from sm121.session.session import Session

#: Options that do not matter when one test is run again: where output goes, and selections. ``-m``
#: is none of them: it may be what names the architecture, and it has selected the test.
_NOT_REPEATED = {
    **dict.fromkeys(("--report-dir", "--junitxml", "--junit-xml", "--benchmark-save"), 1),
    **dict.fromkeys(("--dist", "--numprocesses", "-k", "-n"), 1),
    **dict.fromkeys(("--benchmark-autosave", "--certify", "--last-failed", "--lf"), 0),
    **dict.fromkeys(("--stepwise", "--sw", "-q", "-v"), 0),
    "--shard": 1,  # another test is in the part
}
_MOST_SECTION = 4000
#: Bytes of a step's summary: GitHub refuses all of a longer one.
_LONGEST_SUMMARY = 1 << 20


def begun(config: pytest.Config, session: Session, items: list[pytest.Item]) -> details.Details:
    """Note what is known before the first test: the command, and what each test requires."""
    by_id = {item.stash[ID]: item for item in items if ID in item.stash}

    def again(test: str | None) -> str:
        one = by_id.get(test or "")
        words = [_named_from_here(one), *_repeated(config)] if one else _arguments(config)
        return _line(session, config, [*words, "--engine-debug"])

    session.again = again
    return details.Details(
        command=_line(session, config, _arguments(config)),
        requirements={
            item.stash[ID]: " ".join(text.split())
            for item in items
            if LEVEL in item.stash and (text := inspect.getdoc(getattr(item, "function", None)))
        },
    )


def note_failure(
    session: Session, known: details.Details, item: pytest.Item, report: pytest.TestReport
) -> None:
    """Keep the text of a failure, and write it at once."""
    file, line, _ = item.location
    known.failures = [failure for failure in known.failures if failure.id != item.stash[ID]]
    known.failures.append(
        details.FailureDetail(
            id=item.stash[ID],
            text=details.shortened(session.redact(report.longreprtext)),
            sections={
                heading: session.redact(content)[-_MOST_SECTION:]
                for heading, content in report.sections
            },
            location=f"{file}:{line + 1}" if line is not None else file,
            logs=_logs(session, item),
            reproduce=_line(
                session, item.config, [_named_from_here(item), *_repeated(item.config)]
            ),
        )
    )
    details.write(known, session.directory)


def write(session: Session, known: details.Details) -> StoredReport:
    """Write the files of a closed session, and the summary of a GitHub job. ``known`` is shown."""
    report = page.write_all(session.directory, known)
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if file and session.settings.worker is None:
        text = (session.directory / "summary.md").read_bytes()
        try:
            with Path(file).open("ab") as stream:
                if stream.tell() + len(text) <= _LONGEST_SUMMARY:
                    stream.write(text + b"\n")
        except OSError as error:
            session.say("note", f"GITHUB_STEP_SUMMARY {file}: {error}")
    return report


def redact(session: Session, report: pytest.TestReport) -> None:
    """Take secrets out of what pytest itself prints and writes to --junitxml: a server may name the
    key that it refuses, and ``-l`` shows it."""
    report.sections = [(name, session.redact(text)) for name, text in report.sections]
    if isinstance(report.longrepr, tuple):  # of a skip: the test, wherever the suite is installed
        file, line, _ = report.location
        report.longrepr = (file, (line or 0) + 1, session.redact(report.longrepr[2]))
        return
    content = report.longreprtext
    if (clean := session.redact(content)) != content:
        report.longrepr = clean


def _named_from_here(item: pytest.Item) -> str:
    """The test's name in the folder where pytest was started; its id is relative to the root."""
    if is_own_run(item.config):
        return item.stash[ID]
    _, separator, name = item.stash[ID].partition("::")
    file = os.path.relpath(item.path, item.config.invocation_params.dir)
    return f"{file}{separator}{name}"


def _logs(session: Session, item: pytest.Item) -> list[str]:
    if session.pool is None or not uses_a_server(item):
        return []
    logs = [start.log for start in session.pool.starts[item.stash.get(STARTS, 0) :]]
    if session.pool.latest is not None:
        logs.append(session.pool.latest.log.name)
    return list(dict.fromkeys(logs))


def _arguments(config: pytest.Config) -> list[str]:
    arguments = [str(argument) for argument in config.invocation_params.args]
    return own_tests.given(arguments) if is_own_run(config) else arguments


def _repeated(config: pytest.Config) -> list[str]:
    positional = set(config.option.file_or_dir or ())
    words: list[str] = []
    skip = values = 0
    for argument in _arguments(config):
        name, separator, _ = argument.partition("=")
        if values:  # of --ab, which may begin with a hyphen
            values -= 1
            words.append(argument)
        elif skip:
            skip -= 1
        elif name in _NOT_REPEATED:
            skip = 0 if separator else _NOT_REPEATED[name]
        elif argument[:2] in _NOT_REPEATED:
            continue  # -n2, -vv
        elif own_tests.located(argument) not in positional:
            words.append(argument)
            takes = own_options.every()[argument].nargs if argument in own_options.every() else None
            values = takes if isinstance(takes, int) else 0
    return words


def _line(session: Session, config: pytest.Config, arguments: list[str]) -> str:
    command = ["sm121", "run"] if is_own_run(config) else ["python", "-m", "pytest"]
    # Before they are quoted: a secret with a quote in it is another text then.
    words = map(session.redact, arguments)
    return printable(session.redact(shlex.join([*command, *words])))
