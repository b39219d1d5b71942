"""How long a compiling start may take."""

import os
import time
from types import SimpleNamespace

import pytest

from sm121.engines.server_errors import ServerTimedOut
from sm121.engines.start_watch import StartWatch
from sm121.engines.starting import StartHooks, StartLimits


def launch_of(log, latest):
    """Return a launch without processes, whose newest compiled file has the time `latest`, in
    seconds."""
    return SimpleNamespace(
        log=log,
        compilation=SimpleNamespace(latest=lambda: latest),
        look_at_tree=lambda: [],
        supervision=SimpleNamespace(stacks_folder=log.parent),
    )


@pytest.mark.parametrize(
    ("since_file_s", "since_start_s", "granted_s"),
    [
        pytest.param(1.0, 5.0, 3.0, id="a file a second ago"),
        pytest.param(5.0, 9.0, None, id="no file for longer than a warm start"),
        pytest.param(1.0, 58.0, 2.0, id="near the end of a cold start's time"),
        pytest.param(1.0, 61.0, None, id="after a cold start's time"),
        pytest.param(None, 5.0, None, id="no file at all"),
    ],
)
def test_a_start_over_its_time_goes_on_while_it_compiles(
    tmp_path, since_file_s, since_start_s, granted_s
):
    """A start may exceed its time limit while it compiles.

    Here, a warm start may take 4 s, and a cold one 60 s."""
    log = tmp_path / "server.log"
    log.touch()
    latest = None if since_file_s is None else time.time() - since_file_s
    launch = launch_of(log, latest)
    limits = StartLimits(ready_s=4.0, stalled_s=20.0, stop_s=5.0, cold_s=60.0)
    watch = StartWatch(launch, "x", limits, StartHooks(), lambda **_settle: None)
    now = time.monotonic()
    if granted_s is not None:
        later = watch._later_deadline(now - since_start_s, now)
        assert later - now == pytest.approx(granted_s, abs=0.5)
        return
    with pytest.raises(ServerTimedOut) as caught:
        watch._later_deadline(now - since_start_s, now)
    said = "after the last file that it compiled" in str(caught.value)
    assert said is (since_file_s is not None), caught.value


@pytest.mark.parametrize(("waiting", "is_said"), [(0.5, False), (500.0, True)])
def test_a_late_start_on_a_busy_machine_says_so(tmp_path, monkeypatch, waiting, is_said):
    monkeypatch.setattr(os, "getloadavg", lambda: (waiting, waiting, waiting))
    log = tmp_path / "server.log"
    log.touch()
    launch = launch_of(log, None)
    limits = StartLimits(ready_s=4.0, stalled_s=20.0, stop_s=5.0, cold_s=60.0)
    watch = StartWatch(launch, "x", limits, StartHooks(), lambda **_settle: None)
    now = time.monotonic()
    with pytest.raises(ServerTimedOut) as caught:
        watch._later_deadline(now - 5.0, now)
    assert ("this machine was busy: on average 500" in str(caught.value)) is is_said
