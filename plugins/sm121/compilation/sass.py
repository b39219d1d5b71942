"""Read the kernels of a file and their machine instructions with cuobjdump."""

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

#: How many characters of a line of cuobjdump are read at once.
_LINE_LIMIT = 4096
#: The number of bytes of cuobjdump's error output that are quoted.
_ERROR_BYTES = 4096

_TARGET = re.compile(r"^\s*(?:\.target|code for)\s+(sm_\d{2,3}[af]?)")
_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_.]*)"
)
_TRAP = "BPT.TRAP"
#: Instructions that end straight-line code. Calls are not included, because a guard calls a
#: function to print its message.
_JUMPS = ("BRA", "BRX", "BRXU", "JMP", "JMX", "EXIT", "RET", "BSYNC", "WARPSYNC", "KILL")


class UnreadableSass(Sm121Error):
    """cuobjdump did not disassemble the file."""


@dataclass
class SassKernel:
    """One function of machine code.

    Attributes:
        name: The mangled name.
        architecture: The architecture.
        opcodes: The number of occurrences of each instruction with its modifiers, such as
            ``QMMA.SF.16832.F32.E4M3.E2M1.E8``.
        only_traps: Whether every thread reaches ``BPT.TRAP``, because no instruction before it can
            branch away. This is the case if the body of a kernel was compiled out because the
            architecture lacks its instructions.
    """

    name: str
    architecture: CodeArchitecture
    opcodes: Counter[str] = field(default_factory=Counter)
    only_traps: bool = False


class _Reader:
    """Reads the lines of ``cuobjdump -sass``, and collects the current kernel's instructions."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._target: CodeArchitecture | None = None
        self._kernel: SassKernel | None = None
        #: Whether no instruction so far can branch away.
        self._is_straight = True

    def read(self, line: str) -> SassKernel | None:
        """Read one line, and return the kernel that ends before it, or None."""
        if self._kernel is not None:
            instruction = _INSTRUCTION.match(line)
            if instruction is not None:
                self._add(self._kernel, instruction)
                return None
        function = _FUNCTION.match(line)
        if function is not None:
            return self._begin(function[1])
        target = _TARGET.match(line)
        if target is not None:
            self._target = CodeArchitecture.parse(target[1])
            return self.end()
        return None

    def end(self) -> SassKernel | None:
        """Return the current kernel at the end of the output; None if there is none."""
        kernel = self._kernel
        self._kernel = None
        return kernel

    def _begin(self, name: str) -> SassKernel | None:
        if self._target is None:
            raise UnreadableSass(f"{self._origin}: function {name} before any architecture")
        ended = self.end()
        self._kernel = SassKernel(name, self._target)
        self._is_straight = True
        return ended

    def _add(self, kernel: SassKernel, instruction: re.Match[str]) -> None:
        opcode = instruction["opcode"].rstrip(".")
        kernel.opcodes[opcode] += 1
        base, _, _modifiers = opcode.partition(".")
        if self._is_straight and opcode == _TRAP and not instruction["guard"]:
            kernel.only_traps = True
            self._is_straight = False
        elif base in _JUMPS:
            self._is_straight = False


def parse(lines: Iterable[str], origin: str) -> Iterator[SassKernel]:
    """Yield the kernels in the output of ``cuobjdump -sass``.

    Args:
        lines: The lines of the output.
        origin: The name of the file, for messages.

    Yields:
        Each kernel, when it is complete.

    Raises:
        UnreadableSass: The output has a function before the first line with an architecture.
    """
    reader = _Reader(origin)
    for line in lines:
        kernel = reader.read(line)
        if kernel is not None:
            yield kernel
    last = reader.end()
    if last is not None:
        yield last


def disassemble(
    path: Path,
    tool: Disassembler,
    *,
    only: CodeArchitecture | None = None,
    timeout_s: float = 120.0,
) -> Iterator[SassKernel]:
    """Yield the kernels of an object file, library, fat binary or cubin, one at a time.

    Args:
        path: The file.
        tool: The disassembler.
        only: The architecture to read; None for all.
        timeout_s: The limit of wall-clock time, in seconds.

    Yields:
        Each kernel, when it is complete.

    Raises:
        UnreadableSass: cuobjdump fails, or exceeds the time limit.
        OSError: cuobjdump cannot be started.
    """
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
            if process.poll() is None:  # the caller has stopped before the last kernel
                process.kill()
                process.wait()
        if expired.is_set():
            raise UnreadableSass(Fact(f"a disassembly within {timeout_s:.0f} s", "none", f"{path}"))
        if process.returncode != 0:
            errors.seek(0)
            message = errors.read(_ERROR_BYTES).decode("utf-8", "replace").strip()
            raise UnreadableSass(f"{path}: cuobjdump ended with {process.returncode}: {message}")
