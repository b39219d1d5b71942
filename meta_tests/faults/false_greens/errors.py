"""Item 7: an error in the server's log or in the kernel's messages that ends no process."""

import dataclasses
import itertools
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock
from urllib.parse import quote

from meta_tests.fakes.scripted_sessions import VARIABLES, script, scripted, tell
from meta_tests.faults.false_greens import Case, Kit, Outcome
from meta_tests.folders import DATA
from meta_tests.two_steps import in_two_steps
from sm121.session.session import Session

API = "(APIServer pid=7) ERROR 11-20 10:00:01 [{}:1] "
CORE = "(EngineCore_DP0 pid=8) ERROR 11-20 10:00:01 [core.py:1750] "
STACK = 'Traceback (most recent call last):\n  File "{}", line 1, in f\n    raise ValueError(why)\n'
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def stack(prefix: str, message: str, file: str, exception: str) -> str:
    """Return a message with its traceback in vLLM's format, in which each line has the prefix."""
    lines = [message, *STACK.format(file).splitlines(), exception]
    return "\n".join(prefix + line for line in lines)


def _rows(name: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    rows = tomllib.loads((DATA / f"{name}.toml").read_text("utf-8"))
    return {kind: (row["clean"], row["variants"]) for kind, row in rows.items()}


#: For each reported error, a similar line of a healthy server or kernel, and variants of the error.
LOGGED = _rows("silent-errors")
REPORTED = _rows("kernel-messages")
#: The errors whose cases start quickly. `test_silent_errors.py` reads the lines of all errors.
_QUICK = ("an illegal memory access that is survived", "one behind a worker's end", "Xid 31")
_NUMBERS = itertools.count()


@in_two_steps
def prints(session: Session, text: str) -> None:
    """Let a server print a line to its log and continue to serve."""
    session.run.server()
    tell(session, f"do=print&text={quote(text)}")


@in_two_steps
def kernel_says(kit: Kit, arch: str, message: str) -> Outcome:
    """Let the Linux kernel log a message during a run on this architecture."""

    def doing(session: Session) -> None:
        session.run.target = dataclasses.replace(session.run.target, arch=arch)

    folder = kit.tmp_path / f"kernel-{next(_NUMBERS)}"
    folder.mkdir()
    program = folder / "dmesg"
    line = f'print(f"[{{time.monotonic():12.6f}}] " + {message!r})'
    program.write_text(f"#!{sys.executable} -S\nimport time\n{line}\n")
    program.chmod(0o755)
    variables = {**VARIABLES, "PATH": f"{folder}:{os.environ['PATH']}"}
    with mock.patch.dict(os.environ, variables):
        return script(kit, f"run-{folder.name}", doing)


def _cases() -> Iterator[Case]:
    for kind, (clean, variants) in LOGGED.items():
        expected = f"{kind} in the log of"
        for name, fault in variants.items():
            yield _case(name, scripted(prints(fault)), scripted(prints(clean)), expected)
    for kind, (clean, variants) in REPORTED.items():
        expected = f"{kind} in the messages of the kernel"
        for name, fault in variants.items():
            yield _case(name, kernel_says(*fault), kernel_says(*clean), expected)


def _case(
    name: str, fault: Callable[[Kit], Outcome], clean: Callable[[Kit], Outcome], expected: str
) -> Case:
    slow = name not in _QUICK
    return Case("7 An error that kills nobody", name, fault, clean, expected, slow)


CASES = [*_cases()]
