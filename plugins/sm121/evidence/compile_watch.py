"""Kernels that an engine compiles while it serves: a request that waits for a compiler has no time
that counts. vLLM reports them from 0.20 on (``vllm/utils/jit_monitor.py``)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sm121.evidence import log_lines, signatures


@dataclass
class CompileWatch:
    """A log that grows, read for lines on kernels compiled during inference.

    Attributes:
        log: The server's log; None: it has none, so nothing is ever reported.
        engine: Whose signatures find the lines; an engine without signatures reports nothing.
        follow: Called before each look, to copy what an attached server wrote.
    """

    log: Path | None
    engine: str | None
    follow: Callable[[], None] = lambda: None
    _position: int = field(default=0, init=False)
    _rest: bytes = field(default=b"", init=False)

    def new(self) -> list[str]:
        """The lines that were written since the last call, or since the log began.

        Returns:
            Each line, cleaned and cut.

        Raises:
            OSError: The log cannot be read.
        """
        if self.log is None or self.engine not in signatures.known_engines():
            return []
        self.follow()
        with self.log.open("rb") as file:
            if self._position > file.seek(0, 2):
                self._position, self._rest = 0, b""  # it was cut, and is written anew
            file.seek(self._position)
            block = file.read()
        self._position += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        return [text for raw in lines if (text := self._compiled(raw)) is not None]

    def _compiled(self, raw: bytes) -> str | None:
        entries = signatures.load_signatures(self.engine or "").of("compiled")
        if not any(hint.encode() in raw for entry in entries for hint in entry.hint):
            return None
        line = log_lines.clean(raw[: log_lines.LINE_LIMIT].decode("utf-8", errors="replace"))
        found = any(entry.search(line) is not None for entry in entries)
        return log_lines.cut(line.text) if found else None
