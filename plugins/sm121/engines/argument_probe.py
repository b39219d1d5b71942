"""Asks an engine's own parser about arguments, in the engine's interpreter."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm121.core.errors import UsageError

_IN_ENGINE = Path(__file__).parent / "in_engine"
_WITHIN_S = 180.0


def ask(
    script: str, python: str, lists: Sequence[Sequence[str]], environment: Mapping[str, str]
) -> list[str | None]:
    """Of each list the parser's message where it refuses it, else None.

    Args:
        script: of ``engines/in_engine``; it reads the lists from standard input as JSON.

    Raises:
        UsageError: the interpreter has no such engine, or its parser cannot be asked.
    """
    try:
        probe = subprocess.run(
            [python, str(_IN_ENGINE / script)],
            input=json.dumps([list(arguments) for arguments in lists]),
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            env=dict(environment),
        )
        answers = json.loads(probe.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        last = "no answer"
        if not isinstance(error, OSError | subprocess.TimeoutExpired):
            last = (probe.stderr.strip().splitlines()[-1:] or ["no answer"])[0]
        raise UsageError(
            f"--engine-python {python}: its engine's own parser cannot be asked: {last}"
        ) from error
    if len(answers) != len(lists):
        raise UsageError(f"{script}: {len(answers)} answers to {len(lists)} lists of arguments")
    return [None if answer is None else str(answer) for answer in answers]
