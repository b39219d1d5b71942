"""An A/B comparison records the process and the known answers of a side's server at its first
use."""

from types import SimpleNamespace

import pytest

from meta_tests.fakes.run_events import stand_in
from sm121.core import profile
from sm121.core.server import Endpoint, Server
from sm121.core.verdict import Invalid
from sm121.engines.life import Alive, Dead
from sm121.engines.signs import Signs
from sm121.regression import ab, side_watch
from sm121.regression.ab import Visit
from sm121.regression.ab_run import AbRun

CPU = profile.load("cpu-tiny-gpt-oss")
SIDES = ab.parse_sides(["", "--x"])


def test_a_server_that_was_replaced_between_visits_counts_for_nothing(monkeypatch, tmp_path):
    starts = iter([1.0, 2.0])
    states = iter([*[Alive()] * 3, Dead("it ended", None, 0.0, None, "its process began at 3.0")])
    monkeypatch.setattr(side_watch, "AttachedLife", lambda _server: SimpleNamespace(
        unwatched=None, signs=Signs(started=next(starts)), state=lambda: next(states)
    ))  # fmt: skip
    sides = ab.parse_sides(["http://a:1", "http://a:2"])
    unproven: dict[str, None] = {}  # the keys are the lines, so each line is there once
    parts = stand_in(unproven=unproven.setdefault)
    run = AbRun(parts, sides, None, lambda _side: None)
    server = Server(Endpoint("http://a:1", "x", "m"), False, "x", None, None, None, None)
    for name, side in zip("ABA", (*sides, sides[0]), strict=True):
        run._check(Visit(name), server, side)
    assert len(unproven) == 2, "the path of either is called unproven, once"
    assert "http://a:1 --server-log PATH" in next(iter(unproven))
    with pytest.raises(Invalid, match="process that answered at http://a:2 was replaced"):
        run._check(Visit("B"), server, sides[1])


def test_side_b_fails_if_it_lost_an_answer_of_side_a(fault_server, timed_server):
    unproven: list[str] = []
    parts = stand_in(redact=str, profile=CPU, unproven=unproven.append)
    clever = fault_server()
    noise = timed_server("--model", "canary", "--rate", "5000").base_url

    def forgotten(run: AbRun, side: str, url: str) -> str | None:
        endpoint = Endpoint(url, clever.key, "canary")
        return run.watch.forgotten(side, Server(endpoint, False, "x", None, None, None, None))

    run, dull = (AbRun(parts, SIDES, None, lambda _side: None) for _ in range(2))
    assert forgotten(run, "A", clever.base_url) is None
    assert forgotten(run, "B", clever.base_url) is None
    reason = forgotten(run, "B", noise)
    assert (
        reason is not None
        and "'The capital of France is'" in reason
        and "which A answered correctly" in reason
    )
    with pytest.raises(Invalid, match="A answers"):
        forgotten(run, "A", noise)
    assert forgotten(dull, "A", noise) is None and forgotten(dull, "B", noise) is None
    assert any("A itself answers wrongly" in line for line in unproven)
