"""Send the loads of the stress level to one server, and check the answers."""

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
    """Sends loads to one server.

    Args:
        client: Sends the requests.
        endpoint: The server.
        sizes: The profile's sizes and limits.
        bound: How far an answer may differ from the answer to the same prompt sent alone.

    Attributes:
        client: Sends the requests.
        bound: The bound.
        streams: The number of concurrent requests in most loads.
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
            source: Yields jobs whose answers have the given number of tokens.
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
            concurrency: The number of concurrent requests.
            arrivals: The start times of the requests, in seconds. None: each starts after another
                one ended.
            tails: Whether the slowest request is checked.
            preempts: Whether the server may preempt requests, which then receive nothing for a
                while.
            least_share: The fraction of the jobs that is sent even after the profile's ``load_s``.

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
        """Return the faults of a load; if it has none, the faults of the server after the load.

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
        """Return a fault if the server still has requests or KV blocks after its last answer."""
        busy = aftermath.not_idle(self._endpoint)
        return [] if busy is None else [busy]
