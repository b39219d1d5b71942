"""The same performance plan on several engines, one after the other, and their results beside each
other (``sm121 side-by-side``)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.errors import UsageError
from sm121.measure import comparison

_LEVEL = "test_performance.py"


@dataclass(frozen=True)
class Contestant:
    """An engine, and the options of pytest that choose it."""

    name: str
    options: tuple[str, ...]


def parse(text: str) -> Contestant:
    """``vllm``, ``llama-cpp=PROGRAM``, ``sglang=PYTHON``: an engine and what starts it.

    Raises:
        UsageError: there is no such engine or no such file.
    """
    from sm121.engines import registry
    from sm121.engines.protocol import Program

    name, _, path = text.partition("=")
    engine = registry.engine(name)
    if path and not Path(path).is_file():
        raise UsageError(f"{text}: there is no file {path}")
    option = "--engine-binary" if isinstance(engine, Program) else "--engine-python"
    return Contestant(name, ("--engine", name, *((option, path) if path else ())))


def run(
    contestants: Sequence[Contestant],
    *,
    arch: str,
    tests: Path,
    directory: Path,
    extra: Sequence[str],
    progress: Callable[[str], None],
) -> str:
    """Measure each, with nothing beside it; a Markdown table of all.

    Raises:
        UsageError: fewer than two engines, one twice, no tests, or one whose run has no result.
    """
    names = [one.name for one in contestants]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError("expected two or more engines, each once: vllm llama-cpp=PROGRAM")
    if not (tests / _LEVEL).is_file():
        raise UsageError(f"--tests {tests}: expected the folder of the levels, with {_LEVEL}")
    sources = []
    for one in contestants:
        report = directory / one.name
        progress(f"{one.name}: {report}")
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", str(tests / _LEVEL), "--arch", arch,
                "--report-dir", str(report), *one.options, *extra,
            ],
            stdout=sys.stderr,
        )  # fmt: skip
        progress(f"{one.name}: pytest ended with {done.returncode}")
        sources.append(comparison.read(report))
    return comparison.markdown(comparison.distinct(sources))
