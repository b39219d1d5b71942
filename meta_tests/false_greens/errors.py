"""An error that kills nobody: in the server's log, or in the kernel's messages (7)."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable
from urllib.parse import quote

from false_greens import Case, Outcome, Place
from false_greens.engine import VARIABLES, environment, script, scripted, tell
from sm121.session.session import Session

API = "(APIServer pid=7) ERROR 11-20 10:00:01 [{}:1] "
CORE = "(EngineCore_DP0 pid=8) ERROR 11-20 10:00:01 [core.py:1750] "
WORKER = "(Worker_TP0 pid=9) WARNING 11-20 10:00:01 [w.py:1] "
INFO = "(APIServer pid=7) INFO 11-20 10:00:01 [loggers.py:1] "
XID = "NVRM: Xid (PCI:000f:01:00): "
STACK = 'Traceback (most recent call last):\n  File "{}", line 1, in f\n    raise ValueError(why)\n'
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def stack(prefix: str, message: str, file: str, exception: str) -> str:
    """A message with its traceback as vLLM prints them: the prefix before each line."""
    lines = [message, *STACK.format(file).splitlines(), exception]
    return "\n".join(prefix + line for line in lines)


REFUSED = stack(
    API.format("validation.py"), "RequestValidationError caught. Request id: 1",
    "/v/fastapi/routing.py", "fastapi.exceptions.RequestValidationError: 1 error",
)  # fmt: skip
#: By what is reported: a line of a healthy server that is like it, and the lines of each variant.
LOGGED: dict[str, tuple[str, dict[str, str]]] = {
    "illegal_memory_access": (
        WORKER + "Failed to create oneDNN linear, fallback to torch linear. Exception: could not "
        "create a primitive descriptor",
        {
            "an illegal memory access that is survived": CORE + ILLEGAL,
            "one that is called a warning": f"{WORKER}retried: torch.AcceleratorError: {ILLEGAL}",
            "a misaligned address, by its number's name": CORE + "cudaErrorMisalignedAddress",
        },
    ),
    "nan": (
        INFO + "Running: 1 reqs, Corrupted: 0 reqs",
        {
            "NaN in logits, and a dropped request": WORKER + "NaN in logits, request dropped",
            "NaN as vLLM counts it": INFO + "Running: 1 reqs, Corrupted: 3 reqs",
            "NaN in torch's words": CORE + "RuntimeError: probability tensor contains either "
            "`inf`, `nan` or element < 0",
        },
    ),
    "ecc": (
        INFO + "Uncorrectable ECC errors: 0",
        {
            "ECC, of CUDA": CORE + "CUDA error: uncorrectable ECC error encountered",
            "ECC, by its number's name": CORE + "failed: CUDA_ERROR_ECC_UNCORRECTABLE (214)",
            "ECC, called a warning": WORKER + "an uncorrected DRAM error, page retired",
        },
    ),
    "engine_traceback": (
        REFUSED,
        {
            "a traceback of the engine, and a dropped request": stack(
                CORE, "Invocation of add_request method failed", "/v/vllm/v1/engine/core.py",
                "IndexError: list index out of range"),
            "one of a worker, between another's lines": stack(
                "(Worker_TP0 pid=9) ", "x", "/v/a.py", "KeyError: 'x'").replace("\n", (
                f"\n{API.format('x.py')}Error with model x, type='NotFoundError'\n"), 2),
            "one that names no process":
                STACK.format("/v/vllm/v1/worker/gpu_model_runner.py") + "KeyError: 1",
            "one with the exception of an aborted request":
                stack(CORE, "x", "/v/a.py", "ConnectionResetError: x"),
        },
    ),
    "unknown": (
        API.format("serving.py") + "Error with model error=ErrorInfo(message='The model `x` does "
        "not exist.', type='NotFoundError', param='model', code=404)",
        {
            "an ERROR that nobody knows": API.format("x.py") + "seen by nobody before",
            "an exception of a request that nobody knows": stack(
                API.format("x.py"), "Error in chat completion stream generator.", "/v/a.py",
                "KeyError: 'x'"),
            "a CRITICAL line of the engine":
                "(EngineCore pid=8) CRITICAL 11-20 10:00:01 [core.py:1] odd",
        },
    ),
}  # fmt: skip
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
_QUICK = ("an illegal memory access that is survived", "an ERROR that nobody knows", "Xid 31")
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
