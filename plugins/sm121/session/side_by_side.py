"""``sm121 side-by-side``: runs the same levels on several engines, one after the other."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core import own_tests
from sm121.core.errors import OptionError, UsageError
from sm121.engines import registry
from sm121.engines.protocol import Program
from sm121.report import comparison
from sm121.report.source import Source
from sm121.session import plan_command

_PERFORMANCE = ("performance",)
#: The exit statuses of runs with a verdict, the worst first: FAIL and similar, NOT_RUN, PASS.
_VERDICTS = (1, 5, 0)


@dataclass(frozen=True)
class Contestant:
    """One of the engines, and pytest's options to select it."""

    name: str
    options: tuple[str, ...]
    #: The engine's executable or interpreter. If None, it is searched on the PATH.
    path: str | None = None


def parse(text: str) -> Contestant:
    """Parse the name of an engine with the program that starts it.

    Args:
        text: ``vllm``, ``llama-cpp=PROGRAM`` or ``sglang=PYTHON``.

    Raises:
        UsageError: The engine or the file does not exist.
    """
    name, _, path = text.partition("=")
    engine = registry.engine(name)
    if path and not Path(path).is_file():
        raise UsageError(f"{text}: there is no file {path}")
    option = "--engine-python"
    if isinstance(engine, Program):
        option = "--engine-binary"
    return Contestant(name, ("--engine", name, *((option, path) if path else ())), path or None)


def check(contestant: Contestant) -> None:
    """Check that an engine is installed, by running its program or interpreter.

    Args:
        contestant: The engine.

    Raises:
        UsageError: The program does not exist, or the engine is not installed.
    """
    engine = registry.engine(contestant.name)
    path = contestant.path
    if path is None and isinstance(engine, Program):
        path = shutil.which(engine.program)
        if path is None:
            raise UsageError(
                f"{contestant.name}: expected {engine.program} on the PATH, or "
                f"{contestant.name}=PROGRAM"
            )
    try:
        engine.check_interpreter(path or sys.executable, os.environ)
    except OptionError as error:  # the message names an option of pytest
        name = contestant.name
        if path is not None:
            raise UsageError(f"{name}={error.fault}") from error
        raise UsageError(f"{name}: {error.fault}. Name its interpreter: {name}=PYTHON") from error


def run(
    contestants: Sequence[Contestant],
    *,
    arch: str,
    directory: Path,
    extra: Sequence[str],
    progress: Callable[[str], None],
    levels: Sequence[str] = _PERFORMANCE,
) -> tuple[list[Source], int]:
    """Run the levels on each engine, one after the other.

    Args:
        contestants: The engines.
        arch: The architecture of the target.
        directory: The folder of the reports.
        extra: More arguments of each run.
        progress: A function that shows a progress line.
        levels: The names of the levels.

    Returns:
        The results of each engine, and the worst exit status.

    Raises:
        UsageError: There are fewer than two engines, an engine is named twice or does not exist,
            the run of an engine would be refused, or a run wrote no verdict. The verdict of an
            earlier run does not count.
    """
    names = [one.name for one in contestants]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError("expected two or more engines, each once: vllm llama-cpp=PROGRAM")
    modules = [own_tests.located(f"tests/test_{level}.py") for level in levels]
    commands = {}
    for one in contestants:  # check all engines before the first run
        check(one)
        words = [*modules, "--arch", arch, f"--report-dir={directory / one.name}"]
        commands[one.name] = [*words, *one.options, *extra]
        _refuse_unplanned(one.name, commands[one.name])
    sources = []
    statuses = []
    for one in contestants:
        report = directory / one.name
        before = _written(report)
        progress(f"{one.name}: {report}")
        command = own_tests.command(commands[one.name], Path.cwd())
        status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        progress(f"{one.name}: pytest ended with {status}")
        if status not in _VERDICTS:
            raise UsageError(f"{one.name}: pytest ended with {status}, without a verdict")
        if _written(report) in (None, before):
            raise UsageError(f"{one.name}: this run has written no {report / 'verdict.json'}")
        statuses.append(status)
        sources.append(comparison.read_results(report))
    return comparison.distinct(sources), min(statuses, key=_VERDICTS.index)


def _refuse_unplanned(name: str, words: Sequence[str]) -> None:
    """Raise UsageError if pytest would refuse the run of an engine."""
    try:
        plan_command.plan_of(words)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    except plan_command.NoPlan as error:
        last_line = error.output.strip().rpartition("\n")[2]
        raise UsageError(
            f"{name}: expected tests to run, pytest ended with: {last_line}"
        ) from error


def _written(report: Path) -> tuple[int, int] | None:
    """Return a value that changes when a report is written again; None without a report."""
    try:
        seen = (report / "verdict.json").stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_mtime_ns
