"""What can be wrong under load, each with who to ask. The class of a crash bundle comes from here
where the server's own log has no cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sm121.core.errors import Sm121Error

Kind = Literal[
    "http_5xx",
    "refused",
    "connection",
    "hang",
    "stuck_request",
    "bad_stream",
    "token_lost",
    "token_doubled",
    "wrong_usage",
    "wrong_finish",
    "corrupted_answer",
    "bad_request_accepted",
    "slow_tail",
    "not_idle",
    "memory_growth",
    "handle_growth",
    "zombie",
    "slower_after_load",
    "memory_floor",
]

#: Who to ask, or what to look at.
OWNERS: dict[Kind, str] = {
    "http_5xx": "the API server: its log has the exception of that request",
    "refused": "the API server's limits, or the request that the suite made",
    "connection": "the API server: it closed a connection in the middle of an answer",
    "hang": "the engine's workers: take stacks (py-spy dump) before stopping them",
    "stuck_request": "the scheduler: one request gets no tokens while others do",
    "bad_stream": "the API server's streaming",
    "token_lost": "the API server's streaming, or the scheduler after a preemption",
    "token_doubled": "the API server's streaming, or the scheduler after a preemption",
    "wrong_usage": "the API server's accounting",
    "wrong_finish": "the API server, or the scheduler's stop conditions",
    "corrupted_answer": "attention metadata, KV cache blocks or MoE routing of a batch",
    "bad_request_accepted": "the API server's validation",
    "slow_tail": "the scheduler: some requests wait for very long",
    "not_idle": "the scheduler: requests or KV blocks of ended requests are kept",
    "memory_growth": "whoever allocates for each request and does not free",
    "handle_growth": "whoever opens files or sockets for each request and does not close",
    "zombie": "the parent process, which does not wait for its children",
    "slower_after_load": "the scheduler or the allocator; clocks, if the box says so",
    "memory_floor": "host memory: lower the engine's memory settings",
}

#: What explains others comes first: of a server that hangs, connections are lost too.
_GRAVITY: tuple[Kind, ...] = (
    "memory_floor",
    "hang",
    "stuck_request",
    "http_5xx",
    "corrupted_answer",
    "token_doubled",
    "token_lost",
)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class UnderLoad(Sm121Error, AssertionError):
    """The server did not stand a load.

    ``faults`` are sorted: the gravest kinds first, else in the order in which they were seen.
    """

    def __init__(self, what: str, faults: list[Fault], count: int) -> None:
        self.what = what
        self.faults = faults = sorted(faults, key=_gravity)
        shown = "; ".join(str(fault) for fault in faults[:3])
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        of = f" of {count} requests" if count else ""
        super().__init__(f"{what}: required no fault, seen {len(faults)}{of}: {shown}{more}")

    @property
    def kind(self) -> Kind:
        """The class of all of it."""
        return self.faults[0].kind


def _gravity(fault: Fault) -> int:
    return _GRAVITY.index(fault.kind) if fault.kind in _GRAVITY else len(_GRAVITY)
