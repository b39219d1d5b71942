"""Play the loads of the level on one server, and check their answers."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from sm121.client.jobs import Job, LoadResult
from sm121.client.load import LoadClient
from sm121.core.level_settings import AgreementBound, StressSizes
from sm121.core.server import Endpoint
from sm121.stress import aftermath, checks
from sm121.stress.checks import Fault, UnderLoad


class LoadPlayer:
    """Plays loads on one server.

    Args:
        client: Sends the requests.
        endpoint: The server.
        sizes: The profile's sizes and limits.
        bound: How far an answer may be from the answer to the same prompt alone.

    Attributes:
        client: Sends the requests.
        bound: The bound.
        streams: The requests at a time of most loads.
    """

    def __init__(
        self, client: LoadClient, endpoint: Endpoint, sizes: StressSizes, bound: AgreementBound
    ) -> None:
        self.client = client
        self.bound = bound
        self.streams = int(sizes.load_concurrency.value)
        self._endpoint = endpoint
        self._sizes = sizes

    def take(self, source: Callable[[int], Iterator[Job]], count: int) -> list[Job]:
        """Take jobs from a source.

        Args:
            source: Yields jobs with answers of so many tokens.
            count: The number of jobs.
        """
        tokens = int(self._sizes.answer_tokens.value)
        return list(itertools.islice(source(tokens), count))

    def play(
        self,
        name: str,
        jobs: Sequence[Job],
        *,
        concurrency: int,
        arrivals: Sequence[float] | None = None,
        tails: bool = True,
        preempts: bool = False,
        least_share: float = 1.0,
    ) -> LoadResult:
        """Send jobs and check the answers.

        Args:
            name: The name of the load, for errors.
            jobs: The jobs.
            concurrency: The requests at a time.
            arrivals: The moments of the requests, in seconds. None: one follows another.
            tails: Whether the slowest request is checked.
            preempts: Whether the server may preempt requests, which are silent then.
            least_share: The share of the jobs that is sent however long it takes; the rest is sent
                within the profile's `load_s`.

        Raises:
            UnderLoad: An answer is wrong, or the server is not idle afterwards.
        """
        lasts_s = self._sizes.load_s
        load = self.client.run(
            jobs,
            concurrency=concurrency,
            arrivals=arrivals,
            preempts=preempts,
            lasts_s=lasts_s.value if lasts_s is not None else None,
            at_least=math.ceil(least_share * len(jobs)),
        )
        faults = self.faults(load, tails=tails)
        if faults:
            raise UnderLoad(name, faults, len(load.outcomes))
        return load

    def faults(self, load: LoadResult, *, tails: bool) -> list[Fault]:
        """Find the faults of a load; if it has none, those of the server after it.

        Args:
            load: The load.
            tails: Whether the slowest request is checked.
        """
        faults = checks.faults(load, self.bound)
        if tails:
            factor = self._sizes.tail_factor.value
            tail = checks.slow_tail(load, factor, self._sizes.tail_floor_s.value)
            if tail is not None:
                faults.append(tail)
        return faults or self.kept()

    def kept(self) -> list[Fault]:
        """Return the fault that the server keeps something after its last answer, if it does."""
        busy = aftermath.not_idle(self._endpoint)
        return [] if busy is None else [busy]
