"""Prompts that join decoding requests, crowds, and long answers: each kind of harm is reported."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest

from meta_tests.fakes import servers
from meta_tests.fakes.run_events import stand_in
from sm121.client.jobs import Job
from sm121.client.load import LoadClient
from sm121.client.patience import Patience
from sm121.core import level_settings, profile, profile_fields, unmet, verdict
from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_arguments import at_once
from sm121.core.server import Server
from sm121.engines import capabilities
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.log_start import LogStart
from sm121.plugin import outcomes
from sm121.run.servers import NoCrashReports
from sm121.stress import shapes, soak
from sm121.stress.afterwards import Afterwards
from sm121.stress.checks import UnderLoad
from sm121.stress.joining import LONGEST, SHORTEST
from sm121.stress.level import Stress

EXACT = level_settings.AgreementBound(max_abs=1e-3, mean_abs=1e-4, fork=0, source="a test")
CPU = profile.load("cpu-tiny-gpt-oss")
SIZES = {
    "joining_s": profile_fields.Sourced(value=1.5, source="a test"),
    "stalled_after_s": profile_fields.Sourced(value=3, source="a test"),
    "request_within_s": profile_fields.Sourced(value=20, source="a test"),
}
NEIGHBOUR = pytest.mark.slow("its neighbour proves the same, as far as one case can")


@pytest.fixture
def level() -> Iterator[Callable[..., tuple[Stress, list[str]]]]:
    """The stress level on the stress server with a fault, and the lines that it shows."""
    serving = ExitStack()

    def begin(fault: str = "none", *arguments: str, bound=EXACT) -> tuple[Stress, list[str]]:
        endpoint = serving.enter_context(servers.stress_server(fault, *arguments))
        lines: list[str] = []
        run = stand_in(
            profile=CPU.model_copy(update={"stress": CPU.stress.model_copy(update=SIZES)}),
            aborted=None, abort=lambda _text: None, pool=None, crashes=NoCrashReports(),
            target=SimpleNamespace(arch="cpu"),
            remark=lambda _text: None,
            say=lambda _what, line: lines.append(line), processes=lambda: [],
            of=lambda _server: KernelPath(log=LogStart(asked="{'max_num_seqs': 8}")),
        )  # fmt: skip
        its = ServerConfiguration("own", "vllm", "", "", "canary", arguments) if arguments else None
        server = Server(endpoint, False, "vllm", "0.32.0", None, its, None)
        level = Stress(run, server, capabilities.capabilities_of("vllm", "0.32.0"), bound)
        serving.callback(level.timeline.stop)
        return level, lines

    with serving:
        yield begin


def test_each_number_that_decodes_is_joined_up_to_all_places(level):
    healthy, lines = level()
    healthy.joining()
    assert [f"{n}: " in lines[-1] for n in range(9)] == [True] * 8 + [False], lines
    few, lines = level("none", "--max-num-seqs", "2")
    few.joining()
    assert "0: " in lines[-1] and "1: " in lines[-1] and "2: " not in lines[-1], lines


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            "join-five",
            r"a prompt of \d+ tokens joins 5 that decode.*: .*connection",
            id="join-five, a prompt of d+ tokens joins 5 that decode.*",
        ),
        pytest.param(
            "join-one",
            r"a prompt of \d+ tokens joins 1 that decode.*: .*connection",
            id="join-one, a prompt of d+ tokens joins 1 that decode.*",
            marks=NEIGHBOUR,
        ),
        pytest.param(
            "join-garbage",
            r"short prompts that join .*corrupted_answer: request \d+ \(a prompt of \d+ ",
            id="join-garbage, short prompts that join .*corrupted_answer",
        ),
        pytest.param(
            "join-refused",
            r"a prompt of \d+ tokens joins 5 that decode.*: .* got 1 of .*refused",
            id="join-refused, a prompt of d+ tokens joins 5 that",
        ),
        # The stall appears seconds later, after more requests have joined on a busy machine.
        pytest.param(
            "join-stalls",
            "joins [5-7] that decode.*: .*(stuck_request|hang)",
            id="join-stalls, joins (5-7) that decode.*",
        ),
        pytest.param(
            "join-more", "joins [567] that decode.*: .*connection", marks=pytest.mark.slow
        ),
        pytest.param("join-last", "joins 7 that decode.*: .*connection", marks=pytest.mark.slow),
        pytest.param("join-lengths", "joins 5 that decode.*: .*connection", marks=pytest.mark.slow),
    ],
)
def test_a_prompt_that_harms_decoding_requests_is_named(level, fault, said):
    sick, _ = level(fault)
    with pytest.raises(UnderLoad, match=said):
        sick.joining()
    if said.endswith("connection"):
        lost = [outcome.record() for outcome in sick.client.under_way()]
        assert lost and {entry["problem"][0] for entry in lost} <= {"connection", "bad_stream"}
        assert all(SHORTEST <= entry["prompt_tokens"] <= LONGEST for entry in lost), lost


CROWDS = (
    {"fault": "none"},
    {
        "fault": "neighbours",
        "text": r"anothers_answer: request \d+ \(.*completion.*got that of",
    },
    {"fault": "neighbours-of-80", "text": "a crowd of 80 requests: .*anothers_answer: request"},
    {
        "fault": "neighbours-in-chats",
        "text": r"anothers_answer: request \d+ \(.*chat.*got that of",
    },
    {
        "fault": "neighbours-in-responses",
        "text": r"anothers_answer: request \d+ \(response.*got that of",
    },
    {
        "fault": "neighbours-in-choices",
        "text": r"anothers_answer: request \d+ \(choice.*got that of choice",
    },
    {"fault": "neighbours-in-two", "text": r"anothers_answer: request \d+ \(two completions"},
    {
        "fault": "neighbours-of-a-prefix",
        "text": r"anothers_answer: request \d+ \(one beginning",
    },
    {
        "fault": "neighbours-of-a-prefix-of-80",
        "text": r"a crowd of 80 requests: .*anothers_answer: request \d+ \(one beginning",
    },
    {
        "fault": "two-of-a-prefix",
        "text": r"one beginning, asked alone|anothers_answer: request \d+ \(one beginning",
    },
    {"fault": "forgets-logit_bias", "text": r": request \d+ \(changed completion 1"},
    {"fault": "forgets-presence_penalty", "text": r": request \d+ \(changed completion 1"},
    {"fault": "forgets-bad_words", "text": r": request \d+ \(changed completion 2"},
    {"fault": "forgets-stop", "text": r": request \d+ \(changed completion 3"},
    {
        "fault": "forgets-top_k",
        "text": r"corrupted_answer: request \d+ \((sampled|two) completion",
    },
    {"fault": "no-text", "text": r"corrupted_answer: request \d+ \(.*(chat|response)"},
    {"fault": "junk-text", "text": r"corrupted_answer: request \d+ \(.*(chat|response)"},
    {"fault": "loop-text", "text": r"corrupted_answer: request \d+ \(.*(chat|response)"},
)
SOAKS = (
    {"fault": "none", "slow": False},
    {
        "fault": "neighbours-in-chats",
        "slow": False,
        "text": r"anothers_answer: request \d+ \(.*chat",
    },
    {
        "fault": "neighbours-in-responses",
        "slow": True,
        "text": r"anothers_answer: request \d+ \(response",
    },
    {
        "fault": "neighbours-in-choices",
        "slow": True,
        "text": r"anothers_answer: request \d+ \(choice",
    },
    {
        "fault": "neighbours-of-a-prefix",
        "slow": True,
        "text": r"anothers_answer: request \d+ \(one beginning",
    },
)


def _crowds() -> Iterator:
    for number, crowd in enumerate(CROWDS):
        for fork in (0,) if crowd["fault"] == "forgets-top_k" else (0, 0.1):
            marks = [NEIGHBOUR] * (number > 7 or (number > 1 and fork > 0))
            yield pytest.param(crowd, fork, marks=marks, id=f"{crowd['fault']}-{fork}")


@pytest.mark.parametrize(("crowd", "fork"), [*_crowds()])
def test_each_answer_in_a_crowd_is_its_own(level, crowd, fork):
    fault = crowd["fault"]
    text = crowd.get("text")
    crowded, lines = level(fault, bound=EXACT.model_copy(update={"fork": fork}))
    for times in (2, 10):
        holds = text is None or (times == 2 and ("of-80" in fault or "forgets" in fault))
        with nullcontext() if holds else pytest.raises(UnderLoad, match=text):
            crowded.crowd(times)
    assert text is not None or "changed completion 3, choice, chat" in lines[-1]


def test_requests_that_wait_for_a_place_are_not_stuck(monkeypatch):
    """Requests that wait for a place on the server do not count as stuck.

    The server runs few requests at a time. No request streams, and the last ones wait longer than a
    request may be silent.
    """
    monkeypatch.setenv("SM121_META_STEP_S", "0.05")
    job = Job("waits", {"model": "canary", "prompt": "x", "max_tokens": 10}, 10)
    with servers.stress_server() as endpoint:
        load = LoadClient(endpoint, Patience(20.0, 1.5)).run([job] * 40)
    assert [outcome.problem for outcome in load.outcomes] == [None] * 40 and load.seconds > 2.0


@pytest.mark.parametrize(
    ("fault", "preempts", "problem"),
    [
        ("preempts", True, None),
        ("preempts", False, "stuck_request"),
        ("preempts-and-loses", True, "stuck_request"),
    ],
)
def test_a_preempted_request_waits_for_the_end_of_others(monkeypatch, fault, preempts, problem):
    """A preempted request may be silent for longer than others, but not if no other request makes
    progress."""
    monkeypatch.setenv("SM121_META_STEP_S", "0.1")
    body = {"model": "canary", "prompt": "x", "stream": True}
    jobs = [Job(f"{n}", {**body, "max_tokens": n}, n) for n in (20, 40, 60, 50)]
    with servers.stress_server(fault) as endpoint:
        # This time is shorter than the time that a preempted request waits here. It cannot be much
        # shorter, because on a busy machine a test server may send nothing for a second, and a
        # server counts as hung if no request gets anything.
        patience = Patience(within_s=40.0, silent_s=2.0)
        outcomes = LoadClient(endpoint, patience).run(jobs, preempts=preempts).outcomes
    assert {o.problem[0] for o in outcomes if o.problem} - {"stopped"} == {problem} - {None}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("none", None),
        ("noise", "tokens 256 to 320"),
        pytest.param("drifts", "896 to", marks=NEIGHBOUR),
        ("loops", "576 to 640"),
        pytest.param("noisy-text", "896 to", marks=NEIGHBOUR),
        ("lost-text", "448 to"),
        pytest.param("cut-text", "960 to", marks=NEIGHBOUR),
    ],
)
def test_a_long_answer_is_compared_to_its_end(level, monkeypatch, fault, text):
    monkeypatch.setenv("SM121_META_STEP_S", "0.0005")
    whole, _ = level(fault)
    wrong = pytest.raises(UnderLoad, match=f"corrupted_answer: .*{text}")
    with wrong if text is not None else nullcontext():
        whole.long_generation()


def test_joining_counts_without_a_counter_are_not_passed(level, monkeypatch):
    monkeypatch.setattr("sm121.stress.joining._MORE_S", 1.0)
    uncounted, _ = level("uncounted")
    with pytest.raises(verdict.NotRun, match="has no counter"):
        uncounted.joining()
    fewer, _ = level("fewer")
    with pytest.raises(verdict.Inconclusive, match=r"never [^:]*6, 7, 8: .*--max-num-seqs"):
        fewer.joining()


def test_the_limit_of_concurrent_requests_comes_from_the_arguments():
    assert at_once(["--max-num-seqs", "8", "--max_num_seqs=2"]) == 2
    assert at_once(["--max-running-requests=16"]) == 16
    assert at_once(["--max-num-batched-tokens", "8192"]) is None


def test_ten_minutes_on_a_gpu_and_only_where_all_is_asked():
    name = "test_short_prompts_join_those_that_decode"
    for gpu in map(profile.load, ("sm121-gpt-oss-120b", "sm90-tiny-gpt-oss", "sm121-tiny-gpt-oss")):
        assert gpu.stress.joining_s.value >= 600 and gpu.test_timeout_s["stress"] > 1230
        plans = ("quick", "merge", "full")
        assert [plan for plan in plans if gpu.plan(plan).asks("stress", name, ())] == ["full"]
    assert CPU.stress.joining_s.value <= 10


@pytest.mark.parametrize(
    ("version", "crash", "named"),
    [
        ("0.14.0+mxfp4", "illegal_memory_access", True),
        # another cause of death
        ("0.14.0+mxfp4", "oom", False),
        # the release on which the build is based
        ("0.14.0", "illegal_memory_access", False),
        ("0.32.0", "illegal_memory_access", False),
    ],
)
def test_the_defect_is_known_of_the_build_alone_and_by_the_crash(version, crash, named):
    test = "tests/test_stress.py::test_short_prompts_join_those_that_decode"
    engine = SimpleNamespace(name="vllm", version=version, identity=None)
    file = SimpleNamespace(engine=engine, crashes=[SimpleNamespace(kind=crash, test=test)])
    session = SimpleNamespace(run=stand_in(redact=str, file=file))
    item = SimpleNamespace(stash={outcomes.ID: test})
    lost = unmet.Fact("no fault", "6: connection", "a prompt of 401 tokens joins 5 that decode")
    text = outcomes._message(session, item, [lost]).text
    bug = "known bug of mxfp4: "
    assert (bug in text and "spark-vllm-mxfp4-docker/issues/7" in text) is named, text
    assert text.startswith(str(lost))


@pytest.mark.parametrize(
    "fault",
    [
        "none",
        "metrics-gone",
        pytest.param("no-metrics", marks=pytest.mark.slow),
        pytest.param("metrics-fail", marks=pytest.mark.slow),
        pytest.param("metrics-empty", marks=pytest.mark.slow),
    ],
)
def test_counters_that_vanish_are_not_taken_for_idle(level, fault):
    served, _ = level(fault)
    with served._server.endpoint.http() as http:
        served.timeline.sample(http)
    served.concurrent()
    wrong = pytest.raises(UnderLoad, match="expected /metrics as before the load, got none")
    with wrong if "metrics-" in fault else nullcontext():
        served.afterwards.check_idle()


@pytest.mark.parametrize("crowd", [pytest.param(c, marks=[NEIGHBOUR] * c["slow"]) for c in SOAKS])
def test_a_soak_has_what_users_send(level, monkeypatch, crowd):
    monkeypatch.setattr(Afterwards, "check_throughput", lambda _self: None)
    monkeypatch.setattr(shapes, "moments", lambda *_arguments, **_seed: None)
    rounds = lambda _duration_s, play, _write, _say: [play(n).requests for n in range(1, 5)]  # noqa: E731
    monkeypatch.setattr(soak, "run", rounds)
    soaked, _ = level(crowd["fault"])
    wrong = pytest.raises(UnderLoad, match=f"soak, round 4: .*{crowd.get('text')}")
    with wrong if "text" in crowd else nullcontext():
        soaked.soak(1.0)
