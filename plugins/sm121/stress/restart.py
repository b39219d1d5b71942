"""A server that is stopped in the middle of a load, and started again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from sm121.client.load import Job, LoadClient, LoadResult
from sm121.core.profile import AgreementBound
from sm121.core.verdict import Inconclusive
from sm121.run.harness import Harness
from sm121.stress import checks
from sm121.stress.fault import UnderLoad

#: Within which every client must learn of the stop.
_LEARN_WITHIN_S = 30.0
#: What a stop may do to a request that is under way.
_BROKEN_OFF = ("connection", "bad_stream", "http_5xx")


def under_load(
    harness: Harness,
    client: LoadClient,
    jobs: Sequence[Job],
    concurrency: int,
    bound: AgreementBound,
    before_stop: Callable[[], None],
) -> None:
    """Stop the server under a load, and play one job of each name on the server started again.

    Args:
        harness: starts its own server, which runs.
        client: of that server.
        jobs: more than can have ended when the stop arrives.
        concurrency: requests at a time.
        bound: how far an answer may be from the one that its prompt has alone.
        before_stop: called right before the stop.

    Raises:
        AssertionError: a client waits for ever, or something of the server is left.
        UnderLoad: an answer is wrong, before the stop or after the start.
        Inconclusive: no request was under way when the server was stopped, or all were.
    """
    known = {outcome.number for outcome in client.under_way()}
    ended_before = client.completed
    loads: list[LoadResult] = []
    loading = threading.Thread(
        target=lambda: loads.append(client.run(jobs, concurrency=concurrency)), daemon=True
    )
    loading.start()
    while loading.is_alive():
        under_way = {outcome.number for outcome in client.under_way()} - known
        if client.completed - ended_before >= concurrency and under_way:
            break
        time.sleep(0.005)
    before_stop()
    stopped_at = time.monotonic()
    report = harness.stop()
    loading.join(timeout=_LEARN_WITHIN_S)
    assert not loading.is_alive(), (
        f"required: every client learns of the stop within {_LEARN_WITHIN_S:.0f} s, "
        "seen: some still wait"
    )
    assert report is not None and report.clean, (
        f"required: nothing left of a server stopped under load, seen: {report}"
    )
    faults = [
        fault
        for fault in checks.faults(loads[0], bound, stopped_at=stopped_at)
        if fault.kind not in _BROKEN_OFF
    ]
    if faults:
        raise UnderLoad("stopped under load", faults, len(jobs))
    broken_off = sum(
        outcome.problem is not None or checks.is_aborted(outcome, stopped_at)
        for outcome in loads[0].outcomes
    )
    again = LoadClient(harness.server().endpoint, client.patience, stop=client.stop)
    once = list({job.name: job for job in jobs}.values())
    if faults := checks.faults(again.run(once, concurrency=concurrency), bound):
        raise UnderLoad("after the restart", faults, len(once))
    if not 0 < broken_off < len(jobs):
        raise Inconclusive(
            "required a server that was stopped while requests were under way, seen: "
            f"{broken_off} of {len(jobs)} broken off"
        )
