"""The shape of a cell's requests: their lengths, and how many run at once."""

from dataclasses import dataclass

from sm121.measure.plan import Plan

#: With several streams, answers are this many times as long as the part that is measured, because
#: some tokens arrive before all streams decode.
_STREAMS_FACTOR = 2


@dataclass(frozen=True)
class CellShape:
    """The length and concurrency of a cell's requests, and the names that contain these numbers."""

    plan: Plan
    #: The number of tokens in front of the plan's prompt.
    depth: int
    #: The number of concurrent streams.
    concurrency: int = 1
    #: How many requests the server runs at a time (--max-num-seqs); None if the server chooses.
    slots: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """The length of a request's prompt: the depth plus the plan's prompt.

        None of it is cached.
        """
        return self.depth + self.plan.prompt_tokens

    @property
    def tokens(self) -> int:
        """The length of the long answers, in tokens."""
        if self.concurrency == 1:
            return self.plan.longest
        return _STREAMS_FACTOR * self.tokens_together

    @property
    def tokens_together(self) -> int:
        """The number N in the name ``tgN_cC``: the tokens of the plan's shortest answers."""
        return min(self.plan.generated_tokens)

    @property
    def queued(self) -> bool:
        """Whether there are more streams than the server runs at a time, so that some wait."""
        return self.slots is not None and self.concurrency > self.slots

    @property
    def suffix(self) -> str:
        """The suffix of a metric's name, which tells the number of streams.

        It is ``_c4`` for 4 concurrent streams, and ``_q10`` for 10 of which some wait in the queue.
        """
        if self.concurrency == 1:
            return ""
        letter = "q" if self.queued else "c"
        return f"_{letter}{self.concurrency}"

    @property
    def title(self) -> str:
        """A short name for output, for example ``pp2048 tg128 @ d0``."""
        title = f"pp{self.plan.prompt_tokens} tg{self.tokens} @ d{self.depth}"
        if self.concurrency > 1:
            title += f", {self.concurrency} streams"
        return title
