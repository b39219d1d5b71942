"""Find kernels that an engine compiles during inference.

A request that waits for a compiler must not be measured. vLLM reports such kernels from 0.20 on
(``vllm/utils/jit_monitor.py``).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sm121.evidence import log_message, signatures
from sm121.evidence.log_lines import LINE_LIMIT


@dataclass
class CompileWatch:
    """Reads a growing log for lines about kernels that were compiled during inference.

    Attributes:
        log: The server's log. If None, nothing is reported.
        engine: The engine, whose signatures find the lines. If the engine has no signatures,
            nothing is reported.
        follow: Called before each read, to copy an attached server's new lines to the log.
    """

    log: Path | None
    engine: str | None
    follow: Callable[[], None] = lambda: None
    _position: int = field(default=0, init=False)
    _rest: bytes = field(default=b"", init=False)

    def new(self) -> list[str]:
        """Return the lines about compiled kernels that were written since the last call.

        Returns:
            Each line about a kernel, cleaned and shortened.

        Raises:
            OSError: The log cannot be read.
        """
        if self.log is None or self.engine not in signatures.known_engines():
            return []
        self.follow()
        with self.log.open("rb") as file:
            if self._position > file.seek(0, 2):
                # The log was truncated and begins again.
                self._position = 0
                self._rest = b""
            file.seek(self._position)
            block = file.read()
        self._position += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        compiled: list[str] = []
        for raw in lines:
            text = self._compiled(raw)
            if text is not None:
                compiled.append(text)
        return compiled

    def _compiled(self, raw: bytes) -> str | None:
        """Return the text of a line about a compiled kernel, or None for any other line."""
        entries = signatures.load_signatures(self.engine or "").of("compiled")
        hints = itertools.chain.from_iterable(entry.hint for entry in entries)
        if not any(hint.encode() in raw for hint in hints):
            return None
        line = log_message.clean(raw[:LINE_LIMIT].decode("utf-8", errors="replace"))
        if any(entry.search(line) is not None for entry in entries):
            return log_message.cut(line.text)
        return None
