"""Run the same levels on several engines, one after the other (``sm121 side-by-side``)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core import own_tests
from sm121.core.errors import UsageError
from sm121.engines import registry
from sm121.engines.protocol import Program
from sm121.report import comparison
from sm121.report.source import Source

_PERFORMANCE = ("performance",)
#: Exit statuses of runs that came to a verdict, the worst first: FAIL and the like, NOT_RUN, PASS.
_VERDICTS = (1, 5, 0)


@dataclass(frozen=True)
class Contestant:
    """An engine, and the options of pytest that choose it."""

    name: str
    options: tuple[str, ...]
    #: Its program or interpreter; None: the one that is found.
    path: str | None = None


def parse(text: str) -> Contestant:
    """Read an engine and what starts it.

    Args:
        text: ``vllm``, ``llama-cpp=PROGRAM`` or ``sglang=PYTHON``.

    Raises:
        UsageError: There is no such engine or no such file.
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
    """Ask the engine's program, or the interpreter that has it, for its version.

    Args:
        contestant: The engine.

    Raises:
        UsageError: The program does not exist, or the interpreter has no such engine.
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
    engine.check_interpreter(path or sys.executable, os.environ)


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
        progress: Shows a line of progress.
        levels: The names of the levels.

    Returns:
        The results of each engine, and the worst exit status.

    Raises:
        UsageError: There are fewer than two engines, one is named twice or does not exist, or a run
            came to no verdict of its own; what an earlier run left is no result.
    """
    names = [one.name for one in contestants]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError("expected two or more engines, each once: vllm llama-cpp=PROGRAM")
    modules = [own_tests.located(f"tests/test_{level}.py") for level in levels]
    for one in contestants:  # all of them, before the first has taken its time
        check(one)
    sources = []
    statuses = []
    for one in contestants:
        report = directory / one.name
        before = _written(report)
        progress(f"{one.name}: {report}")
        words = [*modules, "--arch", arch, f"--report-dir={report}", *one.options, *extra]
        command = own_tests.command(words, Path.cwd())
        status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        progress(f"{one.name}: pytest ended with {status}")
        if status not in _VERDICTS:
            raise UsageError(f"{one.name}: pytest ended with {status}: it came to no verdict")
        if _written(report) in (None, before):
            raise UsageError(f"{one.name}: this run has written no {report / 'verdict.json'}")
        statuses.append(status)
        sources.append(comparison.read(report))
    return comparison.distinct(sources), min(statuses, key=_VERDICTS.index)


def _written(report: Path) -> tuple[int, int] | None:
    """What tells one writing of a report from another; None if there is no report."""
    try:
        seen = (report / "verdict.json").stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_mtime_ns
