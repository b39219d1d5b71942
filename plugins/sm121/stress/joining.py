"""Short prompts join decoding requests, one at a time, so that one step processes both.

The build of the GB10 effort crashes under this load while it replays a CUDA graph
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

#: Range of the numbers of new tokens in the prompts that crashed the build of the GB10 effort.
SHORTEST = 320
LONGEST = 643
#: Number of tokens of the answer to a prompt that only joins.
_JOINS_TOKENS = 4
#: Initial number of tokens of the answers that keep decoding: the minimum, and the number per slot
#: of the server.
_DECODES_TOKENS = 64
_DECODES_TOKENS_A_PLACE = 10
#: Polling interval in seconds.
_LOOK_S = 0.02
#: Polling interval while the counters have not shown the current number of requests yet.
_COUNT_S = 0.002
#: Additional seconds for which the load continues if numbers of requests are missing.
_MORE_S = 30.0


@dataclass
class _Sweep:
    """The state of one sweep of prompts.

    Attributes:
        number: The number of the sweep; 0 before the first.
        target: How many decoding requests the next prompt should join.
        rises: Whether the sweep still adds requests that keep decoding.
        tokens: The number of tokens of the joining prompts.
        ended_early: Whether a request that should keep decoding ended before all slots were taken.
    """

    number: int = 0
    target: int = 0
    rises: bool = False
    tokens: int = SHORTEST
    ended_early: bool = False


@dataclass
class Joining:
    """The source of the load (`sm121.client.load.Source`).

    It sends its jobs in sweeps: a prompt joins no request, then one decoding request, then two, and
    so on up to all slots of the server. Then the decoding requests end one by one, and prompts join
    the remaining ones.

    Attributes:
        shapes: Makes the jobs.
        endpoint: The server.
        most: The number of slots of the server.
        lasts_s: The duration of the load in seconds.
        context: The maximum number of tokens of a prompt with its answer.
        joined: How many prompts joined each number of decoding requests.
        observed: The numbers of running requests that the server's counters showed while one of
            the requests joined.
        counts: Whether the server counts running requests; True until a reading lacks the counter.
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
    #: A factor for the lengths of the answers that keep decoding. It doubles after a sweep in which
    #: one of them ended too early.
    _longer: int = 1
    _random: random.Random = field(default_factory=lambda: random.Random(121))

    def __call__(self, under_way: Sequence[JobOutcome]) -> Job | float | None:
        """Return the next job, or the seconds until the next call, or None at the end."""
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
        """Return which numbers of running requests, from 1 to `most`, did not occur."""
        reached = self.observed
        if not self.counts:
            reached = {number + 1 for number in self.joined}
        return [number for number in range(1, self.most + 1) if number not in reached]

    def require_all(self) -> None:
        """Require that the server's counter showed each number of requests from 1 to the maximum.

        Raises:
            NotRun: The server has no such counter.
            Inconclusive: A number did not occur.
        """
        if not self.counts:
            raise NotRun("/metrics has no counter of the running requests")
        missing = ", ".join(map(str, self.missing()))
        if missing:
            raise Inconclusive(
                unmet.Fact(
                    "the server's counter of running requests to show each number from 1 to "
                    f"{self.most}",
                    f"never {missing}: the server runs fewer requests at once than were sent "
                    "(because of --max-num-seqs, or of a KV cache that is too small), or the "
                    "requests were too short for a reading of the counter",
                )
            )

    def _count(self, under_way: int) -> float:
        """Record the number of requests if the counter shows it; return the polling interval."""
        if not self.counts or under_way in self.observed:
            return _LOOK_S
        now = counters.fetch(self.endpoint)
        running = now.values.get("running") if now is not None else None
        self.counts = running is not None
        if running == under_way:
            self.observed.add(under_way)
        return _COUNT_S

    def _next_sweep(self) -> None:
        """Begin a sweep: choose its prompts, and request their answers alone."""
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
        """Return a job that keeps decoding until prompts have joined each number of requests."""
        tokens = self._longer * max(_DECODES_TOKENS, _DECODES_TOKENS_A_PLACE * self.most)
        tokens = min(tokens, self.context - SHORTEST)
        job = self._job(SHORTEST, tokens, decoding, decoding)
        return replace(job, name=f"{job.name} and decodes on")

    def _job(self, prompt: int, tokens: int, turn: int, decoding: int) -> Job:
        name = f"a prompt of {prompt} tokens joins {decoding} that decode"
        return replace(self.shapes.of_length(prompt, tokens, turn=turn % 2), name=name)


def _decodes_on(outcome: JobOutcome) -> bool:
    return outcome.first is not None and outcome.job.tokens > _JOINS_TOKENS
