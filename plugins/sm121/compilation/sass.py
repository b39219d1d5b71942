"""Kernels of a file by their machine instructions, as cuobjdump prints them."""

import re
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sm121.compilation.architecture import CodeArchitecture
from sm121.compilation.toolchain import Disassembler
from sm121.core.errors import Sm121Error
from sm121.core.unmet import Fact

_LINE_LIMIT = 4096
_ERROR_BYTES = 4096

_TARGET = re.compile(r"^\s*(?:\.target|code for)\s+(sm_\d{2,3}[af]?)")
_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_.]*)"
)
_TRAP = "BPT.TRAP"
# What ends straight-line code. A call is none: the message of a guard is printed by one.
_JUMPS = ("BRA", "BRX", "BRXU", "JMP", "JMX", "EXIT", "RET", "BSYNC", "WARPSYNC", "KILL")


class UnreadableSass(Sm121Error):
    """cuobjdump did not disassemble the file."""


@dataclass
class Kernel:
    """One function of machine code."""

    name: str
    """Mangled."""
    architecture: CodeArchitecture
    opcodes: Counter[str] = field(default_factory=Counter)
    """How often each instruction occurs, with its modifiers: ``QMMA.SF.16832.F32.E4M3.E2M1.E8``."""
    only_traps: bool = False
    """True when every thread reaches ``BPT.TRAP``: nothing before it can branch away. So looks a
    kernel whose body was compiled out because the architecture lacks its instructions."""


def parse(lines: Iterable[str], origin: str) -> Iterator[Kernel]:
    """Kernels from the lines of ``cuobjdump -sass``, one at a time. Raises UnreadableSass: a
    function comes before any architecture was named; ``origin`` names it."""
    target: CodeArchitecture | None = None
    kernel: Kernel | None = None
    straight = True  # whether nothing before this instruction can branch away
    for line in lines:
        if kernel is not None and (match := _INSTRUCTION.match(line)):
            opcode = match["opcode"].rstrip(".")
            kernel.opcodes[opcode] += 1
            if straight and opcode == _TRAP and not match["guard"]:
                kernel.only_traps, straight = True, False
            elif opcode.partition(".")[0] in _JUMPS:
                straight = False
        elif match := _FUNCTION.match(line):
            if kernel is not None:
                yield kernel
            if target is None:
                raise UnreadableSass(f"{origin}: function {match[1]} before any architecture")
            kernel, straight = Kernel(match[1], target), True
        elif match := _TARGET.match(line):
            if kernel is not None:
                yield kernel
                kernel = None
            target = CodeArchitecture.parse(match[1])
    if kernel is not None:
        yield kernel


def disassemble(
    path: Path,
    tool: Disassembler,
    *,
    only: CodeArchitecture | None = None,
    timeout_s: float = 120.0,
) -> Iterator[Kernel]:
    """Kernels of an object, library, fat binary or cubin, streamed. Raises UnreadableSass:
    cuobjdump fails, or runs longer than ``timeout_s`` seconds; OSError: it cannot be started."""
    selection = [] if only is None else ["-arch", only.sass]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [tool.cuobjdump, *selection, "-sass", path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=tool.environment,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        expired = threading.Event()

        def end() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            with process.stdout as stream:
                yield from parse(iter(lambda: stream.readline(_LINE_LIMIT), ""), str(path))
            process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:  # whoever reads the kernels stopped early
                process.kill()
                process.wait()
        if expired.is_set():
            raise UnreadableSass(Fact(f"disassembled in {timeout_s:.0f} s", "not", f"{path}"))
        if process.returncode != 0:
            errors.seek(0)
            message = errors.read(_ERROR_BYTES).decode("utf-8", "replace").strip()
            raise UnreadableSass(f"{path}: cuobjdump ended with {process.returncode}: {message}")
