"""An error that kills nobody: in the server's log, or in the kernel's messages (7)."""

import dataclasses
import itertools
import os
import sys
import tomllib
from collections.abc import Callable
from urllib.parse import quote

from false_greens import Case, Outcome, Place
from false_greens.engine import HERE, VARIABLES, environment, script, scripted, tell
from sm121.session.session import Session

API = "(APIServer pid=7) ERROR 11-20 10:00:01 [{}:1] "
CORE = "(EngineCore_DP0 pid=8) ERROR 11-20 10:00:01 [core.py:1750] "
XID = "NVRM: Xid (PCI:000f:01:00): "
STACK = 'Traceback (most recent call last):\n  File "{}", line 1, in f\n    raise ValueError(why)\n'
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def stack(prefix: str, message: str, file: str, exception: str) -> str:
    """A message with its traceback as vLLM prints them: the prefix before each line."""
    lines = [message, *STACK.format(file).splitlines(), exception]
    return "\n".join(prefix + line for line in lines)


#: By what is reported: a line of a healthy server that is like it, and the lines of each variant.
LOGGED: dict[str, tuple[str, dict[str, str]]] = {
    kind: (row["clean"], row["variants"])
    for kind, row in tomllib.loads(
        (HERE / "data" / "silent-errors.toml").read_text("utf-8")
    ).items()
}
#: By kind: architecture and line of a healthy twin, and of each variant.
REPORTED = {
    "xid": (
        ("cpu", XID + "31, pid=7, name=python, MMU Fault"),
        {
            "Xid 31": ("sm121", XID + "31, pid=7, name=VLLM::EngineCor, MMU Fault"),
            "Xid 79": ("sm121", XID + "79, GPU has fallen off the bus."),
            "Xid 48": ("sm90", XID + "48, pid=7, name=VLLM::EngineCor, DBE (double bit error)"),
        },
    ),
    "ecc": (
        ("cpu", "EDAC MC0: 1 CE memory read error on DIMM_0"),
        {
            "an error of memory that nothing corrected": (
                "cpu", "EDAC MC0: 1 UE memory read error on DIMM_0"),
            "a page of broken memory": ("cpu", "Memory failure: 0x1a2b: recovery action: Failed"),
            "one of a machine with a GPU": ("sm121", "EDAC MC1: 2 UE on any memory"),
        },
    ),
}  # fmt: skip
#: What is quick to start; `test_silent_errors.py` reads the lines of all.
_QUICK = ("an illegal memory access that is survived", "one behind a worker's end", "Xid 31")
_NUMBERS = itertools.count()


def logs(text: str) -> Callable[[Place], Outcome]:
    """A server prints it, and serves on."""

    def doing(session: Session) -> None:
        session.server()
        tell(session, f"do=print&text={quote(text)}")

    doing.__name__ = f"logs-{next(_NUMBERS)}"
    return scripted(doing)


def kernel_says(arch: str, message: str) -> Callable[[Place], Outcome]:
    """The kernel says it during a run of that architecture."""

    def doing(session: Session) -> None:
        session.target = dataclasses.replace(session.target, arch=arch)

    def run(place: Place) -> Outcome:
        folder = place.tmp_path / f"kernel-{next(_NUMBERS)}"
        folder.mkdir()
        program = folder / "dmesg"
        line = f'print(f"[{{time.monotonic():12.6f}}] " + {message!r})'
        program.write_text(f"#!{sys.executable} -S\nimport time\n{line}\n")
        program.chmod(0o755)
        with environment({**VARIABLES, "PATH": f"{folder}:{os.environ['PATH']}"}):
            return script(place, f"run-{folder.name}", doing)

    return run


CASES = [
    Case("7 An error that kills nobody", name, make(fault), make(clean), expected, slow)
    for where, kinds, make in (
        ("log of", LOGGED, logs),
        ("messages of the kernel", REPORTED, lambda pair: kernel_says(*pair)),
    )
    for kind, (clean, variants) in kinds.items()
    for expected in (f"{kind} in the {where}",)
    for name, fault in variants.items()
    for slow in (name not in _QUICK,)
]
