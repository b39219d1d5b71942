"""Short prompts that join requests which decode, one at a time: a step holds both then. It is the
load in which the GB10 effort's own build dies in the replay of a CUDA graph
(eugr/spark-vllm-docker#31: a prompt of 320 to 643 new tokens joins five)."""

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

#: New tokens of the prompts that crashed it.
SHORTEST, LONGEST = 320, 643
#: Answers of those that only join, and at first of those that decode on: at least, and a place.
_JOINS_TOKENS, _DECODES_TOKENS, _DECODES_TOKENS_A_PLACE = 4, 64, 10
#: How long until the next look; shorter while the counters have not shown the number yet.
_LOOK_S, _COUNT_S = 0.02, 0.002
#: What was not shown is waited for so long, and once more for as long as the load lasts.
_MORE_S = 30.0


@dataclass
class Joining:
    """Gives the jobs (`sm121.client.load.Source`) in sweeps: a prompt joins nobody, then one that
    decodes, then two, up to all `most` places; then these end, and are joined meanwhile. `lasts_s`:
    for how long prompts join; `context`: most tokens of a prompt and its answer."""

    shapes: Shapes
    endpoint: server.Endpoint
    most: int
    lasts_s: float
    context: int
    #: How often a prompt joined so many that decode.
    joined: Counter[int] = field(default_factory=Counter)
    #: Numbers of running requests that the server's counters showed while one of them joined.
    observed: set[int] = field(default_factory=set)
    #: Whether it has such a counter, as far as it was asked.
    counts: bool = True
    _began: float = field(default_factory=time.monotonic)
    _sweep: int = 0
    _target: int = 0
    _rises: bool = False
    _tokens: int = SHORTEST
    #: Those that decode on answer with so many times more tokens: one ended before all places
    #: were taken.
    _longer: int = 1
    _ended_early: bool = False
    _random: random.Random = field(default_factory=lambda: random.Random(121))

    def __call__(self, under_way: Sequence[JobOutcome]) -> Job | float | None:
        decoding = sum(o.first is not None and o.job.tokens > _JOINS_TOKENS for o in under_way)
        if decoding < len(under_way):
            return self._count(len(under_way))
        took = time.monotonic() - self._began
        if took > self.lasts_s and (not self.missing() or took > 2 * self.lasts_s + _MORE_S):
            return None
        if not decoding and not self._rises:
            self._next_sweep()
        self.joined[decoding] += 1
        if self._rises and decoding < self._target:
            self._ended_early |= decoding < self._target - 1
            return self._stays(decoding)
        self._target += 1
        self._rises = self._rises and self._target < self.most
        return self._job(self._tokens, _JOINS_TOKENS, self._sweep, decoding)

    def missing(self) -> list[int]:
        """Numbers of running requests, one of them joining, that did not come about."""
        reached = self.observed if self.counts else {n + 1 for n in self.joined}
        return [n for n in range(1, self.most + 1) if n not in reached]

    def require_all(self) -> None:
        """Go on only if each number came about, by the server's own counters. Raises NotRun: it
        does not count them; Inconclusive: not all did."""
        if not self.counts:
            raise NotRun("how many requests ran is not known: /metrics has no counter of them")
        if missing := ", ".join(map(str, self.missing())):
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
        """The next prompts have another length; what they are answered alone is asked now."""
        self._sweep += 1
        self._target, self._rises = 0, self.most > 1
        self._longer *= 2 if self._ended_early else 1
        self._ended_early = False
        self._tokens = self._random.randint(SHORTEST, LONGEST)
        self._job(self._tokens, _JOINS_TOKENS, self._sweep, 0)
        for decoding in (0, 1):
            self._stays(decoding)

    def _stays(self, decoding: int) -> Job:
        """One that decodes on, so long that others join meanwhile in all numbers."""
        tokens = self._longer * max(_DECODES_TOKENS, _DECODES_TOKENS_A_PLACE * self.most)
        tokens = min(tokens, self.context - SHORTEST)
        return self._job(SHORTEST, tokens, decoding, decoding, " and decodes on")

    def _job(self, prompt: int, tokens: int, turn: int, decoding: int, then: str = "") -> Job:
        name = f"a prompt of {prompt} tokens joins {decoding} that decode{then}"
        return replace(self.shapes.of_length(prompt, tokens, turn=turn % 2), name=name)
