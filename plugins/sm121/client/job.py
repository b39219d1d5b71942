"""One request of a load, what is expected of it, and what became of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from sm121.client.completions import Completion

#: ``complete`` reads to the end; ``cancel`` closes the connection in the middle of the stream;
#: ``disconnect`` goes away before the first byte; ``slow`` reads, but slowly; ``bad`` is a request
#: that must be refused.
Behaviour = Literal["complete", "cancel", "disconnect", "slow", "bad"]


@dataclass(frozen=True)
class Job:
    """A request to /v1/completions.

    ``alone`` is the answer to the same prompt, asked alone; None where there is none to compare.
    """

    name: str
    body: dict[str, Any]
    tokens: int
    alone: Completion | None = None
    behaviour: Behaviour = "complete"

    @property
    def streamed(self) -> bool:
        """Whether the answer comes as a stream."""
        return bool(self.body.get("stream"))


@dataclass
class JobOutcome:
    """What became of a job; also what a crash bundle shows of those in flight. Times are of
    ``time.monotonic``."""

    number: int
    job: Job
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    status: int | None = None
    #: Tokens so far.
    received: int = 0
    answer: Completion | None = None
    #: Why there is no answer, as (kind, text) of a fault.
    problem: tuple[str, str] | None = None

    def progress(self, tokens: int) -> None:
        """Something came."""
        self.last = time.monotonic()
        if tokens and self.first is None:
            self.first = self.last
        self.received += tokens

    @property
    def seconds(self) -> float | None:
        """From the request to the end of the answer."""
        return None if self.ended is None else self.ended - self.started

    def silent_s(self, now: float) -> float:
        """For how long nothing has come."""
        return now - (self.last or self.started)

    def record(self) -> dict[str, Any]:
        """For a file: neither the prompt nor the answer, which may be long."""
        now = time.monotonic()
        prompt = self.job.body.get("prompt")
        return {
            "number": self.number,
            "name": self.job.name,
            "behaviour": self.job.behaviour,
            "prompt_tokens": len(prompt) if isinstance(prompt, list) else None,
            "asked_tokens": self.job.tokens,
            "received_tokens": self.received,
            "status": self.status,
            "running_s": round((self.ended or now) - self.started, 3),
            "silent_s": round(self.silent_s(self.ended or now), 3),
            "problem": self.problem,
        }
