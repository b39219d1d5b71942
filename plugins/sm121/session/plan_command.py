"""Ask pytest for the plan of a run, without running it."""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sm121.core import own_tests
from sm121.core.errors import UsageError
from sm121.report import run_plan
from sm121.report.run_plan import RunPlan

#: pytest's exit status of a usage error.
_EXIT_USAGE = 4
#: The error line of argparse, which follows the usage text.
_PARSER_ERROR = re.compile(r"(?m)^\S.*: error: (.+)$")
#: A usage error that another part of pytest reports, unless it contains the traceback of a failed
#: import.
_REFUSAL = re.compile(r"(?s)ERROR: (?!.*Traceback)(.+)")


class NoPlan(Exception):
    """pytest ended without a plan.

    Attributes:
        output: The output of pytest.
    """

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


def plan_of(words: Sequence[str]) -> RunPlan:
    """Collect the tests of a run in a pytest of its own.

    Args:
        words: The arguments for pytest.

    Raises:
        UsageError: The run would be refused. The message is the refusal.
        NoPlan: pytest ended with an error, or without a plan.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        done = subprocess.run(
            own_tests.command(["--collect-only", "-qq", *words], Path.cwd()),
            env={**os.environ, run_plan.VARIABLE: str(file)},
            check=False,
            capture_output=True,
            text=True,
        )
        answer = run_plan.read_answer(file)
    refusal = answer.refusal or _refusal_of_pytest(done)
    if refusal is not None:
        raise UsageError(" ".join(refusal.split()))
    if done.returncode or answer.plan is None:
        raise NoPlan(done.stdout + done.stderr)
    return answer.plan


def _refusal_of_pytest(done: subprocess.CompletedProcess[str]) -> str | None:
    """Return the error message of a pytest that stopped before it loaded the suite's plugin."""
    if done.returncode != _EXIT_USAGE:
        return None
    by_parser = _PARSER_ERROR.search(done.stderr)
    if by_parser is not None:
        return f"{by_parser[1]} (see pytest --help)"
    by_the_rest = _REFUSAL.match(done.stderr)
    return None if by_the_rest is None else by_the_rest[1]
