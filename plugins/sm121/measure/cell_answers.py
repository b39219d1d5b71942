"""The answers of a cell, and the delays that the client itself caused."""

from dataclasses import dataclass, field
from typing import Any

from sm121.client.timed import TimedBatch
from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.measure import timing

#: After this many failed requests, a cell sends no more requests.
_FAILURES = 2


@dataclass
class CellAnswers:
    """The timed answers of a cell, of which some may be excluded."""

    #: The long answers; one list for each round.
    long: list[list[TimedAnswer]] = field(default_factory=list)
    short: list[TimedAnswer] = field(default_factory=list)
    #: The answers of excluded rounds. A round is excluded if a delay of the client disturbed it.
    left_out: list[TimedAnswer] = field(default_factory=list)
    rounds_left_out: int = 0
    #: All measured batches, including those of excluded rounds.
    batches: list[TimedBatch] = field(default_factory=list)

    @property
    def answers(self) -> list[TimedAnswer]:
        """The long answers of all rounds."""
        return [answer for batch in self.long for answer in batch]

    @property
    def all_answers(self) -> list[TimedAnswer]:
        """The long answers of all rounds, then the short ones."""
        return [*self.answers, *self.short]

    @property
    def clock(self) -> Clock | None:
        """How the tokens of all answers are counted; None if no answer has a token."""
        return timing.clock_of(self.all_answers)

    @property
    def counted_by(self) -> Clock:
        """How the tokens of all answers are counted: `clock`; without any token, ``chunks``."""
        return self.clock or "chunks"

    def answers_of(self, tokens: int) -> list[TimedAnswer]:
        """Return the answers to requests of at least a given length, in the order of sending.

        Args:
            tokens: The minimum number of tokens that a request asked for.
        """
        answers = [answer for answer in self.all_answers if answer.asked_tokens >= tokens]
        return sorted(answers, key=lambda answer: answer.sent_ns)

    @property
    def has_failed(self) -> bool:
        """Whether so many requests failed that no more are sent.

        Each further request might take minutes to fail.
        """
        failed = [answer for answer in self.all_answers if not answer.ok]
        return len(failed) >= _FAILURES

    @property
    def retries(self) -> int:
        """How many requests were sent twice."""
        return sum(answer.retries for batch in self.batches for answer in batch.answers)

    @property
    def worst_lag_ns(self) -> int:
        """The longest delay of one of the client's timestamps, in nanoseconds."""
        return max((batch.worst_lag_ns for batch in self.batches), default=0)

    def client_account(self) -> dict[str, Any]:
        """Return the client's event loop, CPU share, longest delay in ms and number of retries."""
        wall_s = sum(batch.wall_s for batch in self.batches)
        cpu_s = sum(batch.cpu_s for batch in self.batches)
        return {
            "client_loop": self.batches[-1].event_loop if self.batches else None,
            "client_cpu": round(cpu_s / wall_s, 4) if wall_s else 0.0,
            "client_worst_lag_ms": round(self.worst_lag_ns / 1e6, 3),
            "rounds_left_out": self.rounds_left_out,
            "retries": self.retries or None,
        }
