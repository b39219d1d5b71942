"""How servers and their processes end: which ends are crashes, and the report of a stop."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from sm121.engines.memory import Returned
from sm121.engines.process_tree import Survivor
from sm121.evidence.kernel_messages import KernelMessages

_FATAL_SIGNALS = ("SEGV", "ABRT", "BUS", "ILL", "FPE", "KILL", "SYS", "TRAP")
#: Exit statuses after one of these signals: the process crashed.
FATAL = frozenset(-signal.Signals[f"SIG{name}"] for name in _FATAL_SIGNALS)


@dataclass(frozen=True)
class StopReport:
    """The result of stopping a server; everything is empty or true if it was clean."""

    exit_status: int | None
    survivors: tuple[Survivor, ...]
    port_free: bool
    memory: Returned
    #: The duration of the stop, in seconds.
    seconds: float
    #: The name of the log of that start.
    log: str = ""
    #: The name of that start, such as ``server-stock-2``.
    start: str = ""
    #: The signal that killed the server after it was told to stop; None if it ended in order.
    crash: str | None = None
    #: The kernel messages of each other node since the start there, by the node's name.
    kernels: Mapping[str, KernelMessages] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether it ended in order, and no process, port or memory is left."""
        remains = self.survivors or self.memory.missing_bytes or not self.port_free
        return not remains and self.crash is None
