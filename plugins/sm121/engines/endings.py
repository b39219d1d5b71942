"""Define which exit statuses are crashes, and the report on a server's stop."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from sm121.engines.memory import Returned
from sm121.engines.process_tree import Survivor
from sm121.evidence.kernel_messages import KernelMessages

_FATAL_SIGNALS = ("SEGV", "ABRT", "BUS", "ILL", "FPE", "KILL", "SYS", "TRAP")
#: Exit statuses that mean that one of these signals killed the process, so that it crashed.
FATAL = frozenset(-signal.Signals[f"SIG{name}"] for name in _FATAL_SIGNALS)


@dataclass(frozen=True)
class StopReport:
    """The result of stopping a server.

    After a clean stop, `port_free` is true, and no field names anything that is left.
    """

    exit_status: int | None
    survivors: tuple[Survivor, ...]
    port_free: bool
    memory: Returned
    #: The duration of the stop, in seconds.
    seconds: float
    #: The name of the log of the start that was stopped.
    log: str = ""
    #: The name of the start that was stopped, for example ``server-stock-2``.
    start: str = ""
    #: The signal that killed the server after the suite had requested the stop; None if the server
    #: exited normally.
    crash: str | None = None
    #: The kernel messages of each other node since its rank was started. The keys are the names of
    #: the nodes.
    kernels: Mapping[str, KernelMessages] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether the server ended in order, and left no process, port or memory behind."""
        remains = self.survivors or self.memory.missing_bytes or not self.port_free
        return not remains and self.crash is None
