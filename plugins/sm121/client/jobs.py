"""The requests ("jobs") of a load, and their outcomes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sm121.client.completion_json import Completion

#: What the client does with an answer:
#:
#: - ``complete`` reads to the end;
#: - ``cancel`` closes the connection in the middle of the stream;
#: - ``disconnect`` closes the connection before the first byte;
#: - ``slow`` reads slowly;
#: - ``bad`` is an invalid request, which the server must refuse.
Behaviour = Literal["complete", "cancel", "disconnect", "slow", "bad"]
#: The kind and the text of a fault.
Problem = tuple[str, str]


@dataclass(frozen=True)
class Job:
    """A request of a load."""

    #: The name of the request, for messages.
    name: str
    #: The JSON of the request.
    body: dict[str, Any]
    #: The maximum number of generated tokens per choice.
    tokens: int
    #: The answer to the same prompt without other load, with which to compare; None for no
    #: comparison.
    alone: Completion | None = None
    behaviour: Behaviour = "complete"
    path: str = "/v1/completions"
    #: Whether the answer may end before ``tokens``.
    may_end: bool = False
    #: The group of similar requests to which this one belongs.
    kind: str = ""

    @property
    def choices(self) -> int:
        """The number of choices in the answer.

        It is ``n`` times the number of texts in the prompt.
        """
        per_prompt = int(self.body.get("n", 1))
        prompt = self.body.get("prompt")
        if not prompt or not isinstance(prompt, list):
            return per_prompt
        if not all(isinstance(text, str) for text in prompt):
            return per_prompt
        return per_prompt * len(prompt)

    @property
    def streamed(self) -> bool:
        """Whether the answer is streamed."""
        return bool(self.body.get("stream"))


@dataclass
class JobOutcome:
    """The state of a job during a load, and its outcome. Times are values of ``time.monotonic``.

    A crash bundle contains the states of the jobs in flight.
    """

    #: The number of the request, counted over all loads of the client.
    number: int
    job: Job
    started: float = field(default_factory=time.monotonic)
    #: When the first token arrived.
    first: float | None = None
    #: When the latest data arrived.
    last: float | None = None
    ended: float | None = None
    #: The HTTP status; None before the answer begins.
    status: int | None = None
    #: The number of tokens that have arrived.
    received: int = 0
    #: The answer; if it has several choices, the first one.
    answer: Completion | None = None
    #: The other choices of the answer.
    others: tuple[Completion, ...] = ()
    #: Why there is no answer; None if there is one.
    problem: Problem | None = None

    def progress(self, tokens: int) -> None:
        """Record that data has arrived.

        Args:
            tokens: The number of tokens in the data.
        """
        self.last = time.monotonic()
        if tokens and self.first is None:
            self.first = self.last
        self.received += tokens

    @property
    def last_sign(self) -> float:
        """When the latest data arrived, or when the request began."""
        return self.last or self.started

    @property
    def seconds(self) -> float | None:
        """Seconds from the request to the end of the answer; None before the answer has ended."""
        if self.ended is None:
            return None
        return self.ended - self.started

    def silent_s(self, now: float) -> float:
        """Return the number of seconds since the latest data, or since the request began.

        Args:
            now: The current time, as ``time.monotonic()`` returns it.
        """
        return now - self.last_sign

    def set_choices(self, choices: Sequence[Completion]) -> None:
        """Set the answer.

        Args:
            choices: The choices of the answer; at least one.

        Raises:
            ValueError: ``choices`` is empty.
        """
        self.answer, *others = choices
        self.others = tuple(others)

    def record(self) -> dict[str, Any]:
        """Return the state as JSON, without prompt and answer, because these may be long."""
        until = self.ended or time.monotonic()
        prompt = self.job.body.get("prompt")
        return {
            "number": self.number,
            "name": self.job.name,
            "behaviour": self.job.behaviour,
            "prompt_tokens": len(prompt) if isinstance(prompt, list) else None,
            "asked_tokens": self.job.tokens,
            "received_tokens": self.received,
            "status": self.status,
            "running_s": round(until - self.started, 3),
            "silent_s": round(self.silent_s(until), 3),
            "problem": self.problem,
        }


@dataclass
class LoadResult:
    """The outcomes of a load. Times are values of ``time.monotonic``."""

    outcomes: list[JobOutcome]
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first request to the end of the last one."""
        return self.ended - self.started

    @property
    def tokens(self) -> int:
        """The number of tokens that arrived."""
        return sum(outcome.received for outcome in self.outcomes)
