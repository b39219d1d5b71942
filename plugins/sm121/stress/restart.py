"""Stop a server during a load, and start it again."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sm121.client.jobs import Job, JobOutcome, LoadResult
from sm121.client.load import LoadClient
from sm121.core import level_settings, verdict
from sm121.core.unmet import Fact, Unmet, require
from sm121.engines.capabilities import Deviation
from sm121.run.run import Run
from sm121.stress import checks
from sm121.stress.checks import UnderLoad

#: Seconds after the server's end within which all clients must have ended.
_LEARN_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.005
#: Faults that a stop may cause in running requests.
_BROKEN_OFF = ("connection", "bad_stream", "http_5xx")
#: Maximum number of requests that a fact lists.
_LISTED = 8


@dataclass(frozen=True)
class _StoppedLoad:
    """A load during which the server was stopped."""

    result: LoadResult
    #: When the stop began (``time.monotonic``).
    stopped_at: float
    #: The server's log, for messages.
    log: str


def under_load(
    run: Run,
    client: LoadClient,
    jobs: Sequence[Job],
    concurrency: int,
    bound: level_settings.AgreementBound,
    before_stop: Callable[[], None],
    learned_within_s: float,
    excuse: Deviation | None = None,
) -> str:
    """Stop the server during a load, start it again, and send one job of each name.

    Args:
        run: Starts its own server, which runs.
        client: Sends the requests.
        jobs: More jobs than the server can complete before it is stopped.
        concurrency: The number of concurrent requests.
        bound: How far an answer may differ from the answer to the same prompt sent alone.
        before_stop: Called right before the stop.
        learned_within_s: Maximum seconds that a client may wait without data after the stop.
        excuse: The known deviation of a release that does not end its running requests, or None.

    Returns:
        A line with the number of broken requests and the longest wait.

    Raises:
        Unmet: A client waits too long, or processes or memory of the server are left.
        UnderLoad: An answer is wrong.
        Inconclusive: No request was broken off by the stop, or all were.
    """
    stopped = _stop_under_load(run, client, jobs, concurrency, before_stop)
    stopped_at = stopped.stopped_at
    found = checks.faults(stopped.result, bound, stopped_at=stopped_at)
    faults = [fault for fault in found if fault.kind not in _BROKEN_OFF]
    if faults:
        raise UnderLoad("stopped under load", faults, len(jobs))
    outcomes = stopped.result.outcomes
    waited = {outcome.number: silent_after(outcome, stopped_at) for outcome in outcomes}
    longest = max(waited.values(), default=0.0)
    late = [number for number, seconds in waited.items() if seconds > learned_within_s]
    if late:
        silence = Fact(
            "each client of the stopped server to get an answer, an error or a disconnect within",
            f"for {len(late)} of {len(waited)} requests",
            value=longest,
            limit=learned_within_s,
            unit="s",
            evidence=f"numbers {', '.join(map(str, late[:_LISTED]))}; {stopped.log}",
        )
        if excuse is None or len(late) > concurrency:
            raise Unmet(silence)
        run.record.remark(f"restart under load: a known deviation of {excuse.versions}: {silence}")
    _play_again(run, client, jobs, concurrency, bound)
    broken_off = len([outcome for outcome in outcomes if _is_broken_off(outcome, stopped_at)])
    if not 0 < broken_off < len(jobs):
        raise verdict.Inconclusive(
            "expected that the stop of the server cancels some requests, but not all; it "
            f"cancelled {broken_off} of {len(jobs)}"
        )
    return f"{broken_off} requests were cancelled; the last error came after {longest:.1f} s"


def _is_broken_off(outcome: JobOutcome, stopped_at: float) -> bool:
    return outcome.problem is not None or checks.is_aborted(outcome, stopped_at)


def _play_again(
    run: Run,
    client: LoadClient,
    jobs: Sequence[Job],
    concurrency: int,
    bound: level_settings.AgreementBound,
) -> None:
    """Start the server again, and send one job of each name."""
    again = LoadClient(run.server().endpoint, client.patience, stop=client.stop)
    once = list({job.name: job for job in jobs}.values())
    faults = checks.faults(again.run(once, concurrency=concurrency), bound)
    if faults:
        raise UnderLoad("after the restart", faults, len(once))


def _stop_under_load(
    run: Run,
    client: LoadClient,
    jobs: Sequence[Job],
    concurrency: int,
    before_stop: Callable[[], None],
) -> _StoppedLoad:
    """Begin a load, and stop the server after ``concurrency`` requests have ended."""
    earlier = {outcome.number for outcome in client.under_way()}
    ended_before = client.completed
    loads: list[LoadResult] = []
    loading = threading.Thread(
        target=lambda: loads.append(client.run(jobs, concurrency=concurrency)), daemon=True
    )
    loading.start()
    while loading.is_alive():
        under_way = {outcome.number for outcome in client.under_way()} - earlier
        if client.completed - ended_before >= concurrency and under_way:
            break
        time.sleep(_LOOK_EVERY_S)
    before_stop()
    stopped_at = time.monotonic()
    report = run.servers.stop()
    loading.join(timeout=_LEARN_WITHIN_S)
    requirement = f"an end of every request within {_LEARN_WITHIN_S:.0f} s of the stop"
    require(not loading.is_alive(), requirement, "some that still wait")
    if report is None or not report.clean:
        raise Unmet(Fact("nothing left of the server that was stopped under load", f"{report}"))
    return _StoppedLoad(loads[0], stopped_at, str(report.log or "the server's log"))


def silent_after(outcome: JobOutcome, stopped_at: float) -> float:
    """Return how many seconds a request waited without data after a stop until it ended.

    Data that comes after the stop restarts the wait: the server may still serve running requests.

    Args:
        outcome: The request.
        stopped_at: When the stop began (``time.monotonic``).

    Returns:
        The seconds; 0.0 if the request ended before the stop.
    """
    if outcome.ended is None or outcome.ended <= stopped_at:
        return 0.0
    return outcome.ended - max(stopped_at, outcome.started, outcome.last or 0.0)
