"""A server that is stopped in the middle of a load, and started again."""

import threading
import time
from collections.abc import Callable, Sequence

from sm121.client.jobs import Job, JobOutcome, LoadResult
from sm121.client.load import LoadClient
from sm121.core import level_settings, verdict
from sm121.core.unmet import Fact, Unmet, require
from sm121.engines.capabilities import Deviation
from sm121.run.harness import Harness
from sm121.stress import checks
from sm121.stress.checks import UnderLoad

#: Within which every client must have ended once the server is gone.
_LEARN_WITHIN_S = 30.0
#: What a stop may do to a request that is under way.
_BROKEN_OFF = ("connection", "bad_stream", "http_5xx")


def under_load(
    harness: Harness,
    client: LoadClient,
    jobs: Sequence[Job],
    concurrency: int,
    bound: level_settings.AgreementBound,
    before_stop: Callable[[], None],
    learned_within_s: float,
    excuse: Deviation | None = None,
) -> str:
    """Stop the server under a load, and play one job of each name on the server started again.
    `harness`: starts its own server, which runs; `jobs`: more than can have ended when the stop
    arrives; `bound`: how far an answer may be from the one alone; `before_stop`: called right
    before; `learned_within_s`: how long a client may wait in silence after the stop; `excuse`: that
    this release leaves those in silence whose requests its engine had. Returns: how the clients
    learned of it, a line. Raises AssertionError: a client waits for too long, or something of the
    server is left; UnderLoad: an answer is wrong; Inconclusive: no request was under way when the
    server was stopped, or all were."""
    load, stopped_at, log = _stopped(harness, client, jobs, concurrency, before_stop)
    faults = checks.faults(load, bound, stopped_at=stopped_at)
    if faults := [fault for fault in faults if fault.kind not in _BROKEN_OFF]:
        raise UnderLoad("stopped under load", faults, len(jobs))
    waited = {o.number: silent_after(o, stopped_at) for o in load.outcomes}
    longest = max(waited.values(), default=0.0)
    if late := [number for number, seconds in waited.items() if seconds > learned_within_s]:
        silence = Fact(
            "an answer, an error or a closed connection for each client, after the stop within",
            f"for {len(late)} of {len(waited)} requests",
            value=longest,
            limit=learned_within_s,
            unit="s",
            evidence=f"numbers {', '.join(map(str, late[:8]))}; {log}",
        )
        if excuse is None or len(late) > concurrency:
            raise Unmet(silence)
        harness.remark(f"restart under load: known of {excuse.versions}: {silence}")
    broken_off = sum(
        outcome.problem is not None or checks.is_aborted(outcome, stopped_at)
        for outcome in load.outcomes
    )
    again = LoadClient(harness.server().endpoint, client.patience, stop=client.stop)
    once = list({job.name: job for job in jobs}.values())
    if faults := checks.faults(again.run(once, concurrency=concurrency), bound):
        raise UnderLoad("after the restart", faults, len(once))
    if not 0 < broken_off < len(jobs):
        raise verdict.Inconclusive(
            "required a server that was stopped while requests were under way, seen: "
            f"{broken_off} of {len(jobs)} broken off"
        )
    return f"{broken_off} requests were broken off; the last to learn of it waited {longest:.1f} s"


def _stopped(
    harness: Harness,
    client: LoadClient,
    jobs: Sequence[Job],
    concurrency: int,
    before_stop: Callable[[], None],
) -> tuple[LoadResult, float, str]:
    """The load in whose middle the server was stopped, when that was, and the server's log."""
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
        time.sleep(0.005)
    before_stop()
    stopped_at = time.monotonic()
    report = harness.stop()
    loading.join(timeout=_LEARN_WITHIN_S)
    requirement = f"every client learns of the stop within {_LEARN_WITHIN_S:.0f} s"
    require(not loading.is_alive(), requirement, "some still wait")
    if report is None or not report.clean:
        raise Unmet(Fact("nothing left of a server stopped under load", f"{report}"))
    return loads[0], stopped_at, str(report.log or "the server's log")


def silent_after(outcome: JobOutcome, stopped_at: float) -> float:
    """Seconds that a client waited for a word after the stop; 0.0 where it had ended before. What
    came after the stop begins the silence anew: requests under way may be served."""
    if outcome.ended is None or outcome.ended <= stopped_at:
        return 0.0
    return outcome.ended - max(stopped_at, outcome.started, outcome.last or 0.0)
