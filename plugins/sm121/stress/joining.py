"""Short prompts join requests that decode, one at a time, so that a step has both.

The GB10 effort's own build dies of this load in the replay of a CUDA graph
(eugr/spark-vllm-docker#31: a prompt of 320 to 643 new tokens joins five requests).
"""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sm121.client.jobs import Job, JobOutcome
from sm121.core import server, unmet
from sm121.core.verdict import Inconclusive, NotRun
from sm121.measure import counters
from sm121.stress.shapes import Shapes

#: New tokens of the prompts that crashed that build.
SHORTEST = 320
LONGEST = 643
#: Tokens of the answer to a prompt that only joins.
_JOINS_TOKENS = 4
#: Tokens of the answers to those that decode on, at first: at least, and for each place.
_DECODES_TOKENS = 64
_DECODES_TOKENS_A_PLACE = 10
#: Seconds until the next look.
_LOOK_S = 0.02
#: Seconds until the next look while the counters have not shown the number yet.
_COUNT_S = 0.002
#: Seconds, beside the time of the load, in which missing numbers are awaited.
_MORE_S = 30.0


@dataclass
class _Sweep:
    """One sweep of prompts: how far it is.

    Attributes:
        number: Its number; 0 before the first.
        target: How many requests the next prompt is to join.
        rises: Whether it still adds requests that decode on.
        tokens: Tokens of its prompts.
        ended_early: Whether a request that decodes on ended before all places were taken.
    """

    number: int = 0
    target: int = 0
    rises: bool = False
    tokens: int = SHORTEST
    ended_early: bool = False


@dataclass
class Joining:
    """The source of the load (`sm121.client.load.Source`).

    It sends its jobs in sweeps: a prompt joins no request, then one that decodes, then two, up to
    all places. Then these requests end one by one, and prompts join those that are left.

    Attributes:
        shapes: Makes the jobs.
        endpoint: The server.
        most: The places of the server.
        lasts_s: For how many seconds prompts join.
        context: The most tokens of a prompt and its answer.
        joined: How often a prompt joined so many requests that decode.
        observed: Numbers of running requests that the server's counters showed while one of them
            joined.
        counts: Whether the server has such a counter, as far as is known.
    """

    shapes: Shapes
    endpoint: server.Endpoint
    most: int
    lasts_s: float
    context: int
    joined: Counter[int] = field(default_factory=Counter)
    observed: set[int] = field(default_factory=set)
    counts: bool = True
    _began: float = field(default_factory=time.monotonic)
    _sweep: _Sweep = field(default_factory=_Sweep)
    #: The factor of the tokens of those that decode on. It grows after one of them ended before all
    #: places were taken.
    _longer: int = 1
    _random: random.Random = field(default_factory=lambda: random.Random(121))

    def __call__(self, under_way: Sequence[JobOutcome]) -> Job | float | None:
        """Return the next job, the seconds until the next look, or None at the end."""
        decoding = len([outcome for outcome in under_way if _decodes_on(outcome)])
        if decoding < len(under_way):
            return self._count(len(under_way))
        if self._is_over():
            return None
        if not decoding and not self._sweep.rises:
            self._next_sweep()
        self.joined[decoding] += 1
        if self._sweep.rises and decoding < self._sweep.target:
            if decoding < self._sweep.target - 1:
                self._sweep.ended_early = True
            return self._job_that_stays(decoding)
        self._sweep.target += 1
        self._sweep.rises = self._sweep.rises and self._sweep.target < self.most
        return self._job(self._sweep.tokens, _JOINS_TOKENS, self._sweep.number, decoding)

    def _is_over(self) -> bool:
        took_s = time.monotonic() - self._began
        if took_s <= self.lasts_s:
            return False
        return not self.missing() or took_s > 2 * self.lasts_s + _MORE_S

    def missing(self) -> list[int]:
        """Return the numbers of running requests, one of them joining, that did not come about."""
        reached = self.observed
        if not self.counts:
            reached = {number + 1 for number in self.joined}
        return [number for number in range(1, self.most + 1) if number not in reached]

    def require_all(self) -> None:
        """Require that each number came about, by the server's own counters.

        Raises:
            NotRun: The server has no such counter.
            Inconclusive: A number did not come about.
        """
        if not self.counts:
            raise NotRun("how many requests ran is not known: /metrics has no counter of them")
        missing = ", ".join(map(str, self.missing()))
        if missing:
            raise Inconclusive(
                unmet.Fact(
                    f"1 to {self.most} requests running, one of them joining",
                    f"never {missing} by the server's counters: it runs fewer at once than it was "
                    "asked to (--max-num-seqs, or a KV cache that is too small), or too shortly",
                )
            )

    def _count(self, under_way: int) -> float:
        """Compare the server's counter with the requests under way; seconds until the next look."""
        if not self.counts or under_way in self.observed:
            return _LOOK_S
        now = counters.fetch(self.endpoint)
        running = now.values.get("running") if now is not None else None
        self.counts = running is not None
        if running == under_way:
            self.observed.add(under_way)
        return _COUNT_S

    def _next_sweep(self) -> None:
        """Choose the next prompts. Their answers alone are requested now."""
        if self._sweep.ended_early:
            self._longer *= 2
        self._sweep = _Sweep(
            number=self._sweep.number + 1,
            rises=self.most > 1,
            tokens=self._random.randint(SHORTEST, LONGEST),
        )
        self._job(self._sweep.tokens, _JOINS_TOKENS, self._sweep.number, 0)
        for decoding in (0, 1):
            self._job_that_stays(decoding)

    def _job_that_stays(self, decoding: int) -> Job:
        """Return a job that decodes until prompts have joined in all numbers."""
        tokens = self._longer * max(_DECODES_TOKENS, _DECODES_TOKENS_A_PLACE * self.most)
        tokens = min(tokens, self.context - SHORTEST)
        job = self._job(SHORTEST, tokens, decoding, decoding)
        return replace(job, name=f"{job.name} and decodes on")

    def _job(self, prompt: int, tokens: int, turn: int, decoding: int) -> Job:
        name = f"a prompt of {prompt} tokens joins {decoding} that decode"
        return replace(self.shapes.of_length(prompt, tokens, turn=turn % 2), name=name)


def _decodes_on(outcome: JobOutcome) -> bool:
    return outcome.first is not None and outcome.job.tokens > _JOINS_TOKENS
