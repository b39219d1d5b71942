"""The criteria of the stress level on constructed numbers: growth, answers, tails, causes."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sm121.client.completion_json import Completion, Position
from sm121.client.jobs import Job, JobOutcome, LoadResult
from sm121.core import errors, level_settings, profile
from sm121.core.redaction import redact
from sm121.core.verdict import Verdict
from sm121.evidence import crash_bundle, death, kernel_messages
from sm121.evidence.failure import Basis, Cause
from sm121.evidence.kernel_messages import KernelMessages
from sm121.machine import timeline
from sm121.measure import growth
from sm121.stress import checks, memory, shapes, soak

EXACT = level_settings.AgreementBound(max_abs=1e-3, mean_abs=1e-4, fork=0, source="a test")
ALONE = Completion("abcd", "length", (1, 2, 3, 4), (9,), None, None, 4, 1)
MIB = 2**20


def judged(per_request: float, *, noise: float, samples: int = 40, seed: int = 1) -> growth.Growth:
    source = random.Random(seed)
    requests = [10.0 * n for n in range(samples)]
    values = [2000 * MIB + per_request * x + source.gauss(0, noise) for x in requests]
    return growth.judge_growth(
        "bytes", requests, values, limit_total=200 * MIB, limit_per_request=0.5 * MIB
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_of_1_mb_a_request_is_seen_and_noise_is_none(seed):
    assert judged(MIB, noise=20 * MIB, seed=seed).verdict is Verdict.FAIL
    assert judged(0.0, noise=20 * MIB, seed=seed).verdict is Verdict.PASS


def test_neither_noise_nor_one_step_is_a_leak():
    """Neither noise nor a pool that grows once is a leak; a mean or a fit would report one."""
    assert judged(0.5 * MIB, noise=200 * MIB).verdict is Verdict.INCONCLUSIVE
    assert judged(0.0, noise=1, samples=5).verdict is Verdict.INCONCLUSIVE, "too few samples"
    began = time.monotonic()
    assert judged(MIB, noise=20 * MIB, samples=86_400).verdict is Verdict.FAIL, "a soak of a day"
    assert time.monotonic() - began < 20.0
    requests = [10.0 * n for n in range(40)]
    values = [1000 * MIB + (150 * MIB if x > 350 else 0) for x in requests]
    limits = {"limit_total": 100 * MIB, "limit_per_request": 0.5 * MIB}
    assert growth.judge_growth("bytes", requests, values, **limits).verdict is Verdict.PASS


def filled(until: float, *, samples: int = 120, loads: int = 1) -> list[timeline.TimelineSample]:
    """Return a load that touches 5 GiB of memory for the first time, evenly until a share of the
    load. Later loads touch nothing new."""
    source = random.Random(1)
    taken = [5 * GIB * min(n / samples / until, 1.0) for n in range(samples * loads)]
    return [
        replace(sample, available_bytes=int(100 * GIB - bytes_ + source.gauss(0, 10 * MIB)))
        for sample, bytes_ in zip(sampled(samples * loads), taken, strict=True)
    ]


@pytest.mark.parametrize("until", [0.2, 0.4, 0.6, 0.8])
def test_a_kv_cache_that_fills_and_then_stays_is_no_leak(until):
    """A KV cache that fills and then stays full is no leak (model-serving-minefield, trap 106)."""
    assert verdicts(filled(until), 128 * GIB)["machine"] is not Verdict.FAIL
    assert verdicts(filled(until, loads=4), 128 * GIB)["machine"] is Verdict.PASS


def test_a_leak_that_grows_to_the_end_fails():
    assert verdicts(filled(1.0), 128 * GIB)["machine"] is Verdict.FAIL
    assert verdicts(filled(4.0, loads=4), 128 * GIB)["machine"] is Verdict.FAIL, "a slow one"


@pytest.mark.parametrize("hours", [0.5, 2.0, 5.4, 13.0])
def test_a_transient_that_is_longer_than_the_soak_is_no_leak(hours):
    """Trap 107 of model-serving-minefield: the processes grow by 0.32 GiB within 7.4 hours of 157
    requests each, and release it until the thirteenth."""
    source = random.Random(1)
    samples = []
    for sample in sampled(200):
        hour = hours * sample.at_s / 200
        more = 0.32 * (hour / 7.4 if hour < 7.4 else (13.0 - hour) / 5.6)
        held = int((3.2 + more + source.gauss(0, 0.002)) * GIB)
        samples.append(
            replace(
                sample, at_s=3600 * hour, completed=int(157 * hour),
                rss_bytes=held, pss_bytes=held, device_bytes=80 * GIB,
            )
        )  # fmt: skip
    limits = profile.load("sm121-gpt-oss-120b").stress
    growths = memory.judged(samples, limits, machine_bytes=128 * GIB)
    assert {growth.verdict for growth in growths} == {Verdict.PASS}, growths


def sampled(count: int = 60, *, device=None, taken: int = 0) -> list[timeline.TimelineSample]:
    """Return one sample per second, with ten requests in each. The processes do not change."""
    return [
        timeline.TimelineSample(
            at_s=float(n), completed=10 * n, processes=1, rss_bytes=2 * GIB, pss_bytes=2 * GIB,
            handles=50, device_bytes=device(n) if device is not None else None,
            available_bytes=100 * GIB - n * taken, cache_usage=None, running=None, waiting=None,
        )
        for n in range(count)
    ]  # fmt: skip


GIB = 2**30
#: The limits are 10 % and at most 5 GB, 512 KiB per request, and 0.1 handles per request.
LIMITS = profile.load("cpu-tiny-gpt-oss").stress


def verdicts(samples: list[timeline.TimelineSample], machine: int | None) -> dict[str, Verdict]:
    growths = memory.judged(samples, LIMITS, machine_bytes=machine)
    return {item.quantity.removeprefix("bytes of the "): item.verdict for item in growths}


def test_a_device_leak_without_nvml_shows_in_the_machines_memory():
    """A leak of device memory that NVML does not report is found in the machine's memory."""
    leak = verdicts(sampled(taken=GIB), 128 * GIB)
    assert leak["machine"] is Verdict.FAIL and leak["processes"] is Verdict.PASS
    assert verdicts(sampled(), 128 * GIB)["machine"] is Verdict.PASS
    assert "machine" not in verdicts(sampled(taken=GIB), None), "on a CPU it is others' too"
    on_device = verdicts(sampled(device=lambda _n: 8 * GIB, taken=GIB), 128 * GIB)
    assert on_device["device"] is Verdict.PASS and "machine" not in on_device


# The server has 50 handles at first, and `each` more at each sample, up to `most`.
@pytest.mark.parametrize(
    ("requests_a_sample", "each", "most", "verdict"),
    [
        # a pool fills while few requests end
        (1, 0.334, 99, "PASS"),
        (1, 1, 99, "FAIL"),
        (10, 0.334, 99, "PASS"),
        # one handle for five requests
        (10, 2, 199, "FAIL"),
        # a pool becomes full
        (1, 1, 30, "PASS"),
    ],
)
def test_handles_that_a_pool_holds_are_no_leak(requests_a_sample, each, most, verdict):
    samples = [
        replace(sample, completed=n * requests_a_sample, handles=50 + min(int(n * each), most))
        for n, sample in enumerate(sampled())
    ]
    assert verdicts(samples, None)["open handles and threads"] is Verdict(verdict)


def test_samples_without_a_value_are_left_out_and_too_few_decide_nothing():
    leak = sampled(device=lambda n: None if n % 5 == 0 else (8 + n) * GIB)
    assert verdicts(leak, 128 * GIB)["device"] is Verdict.FAIL
    silent = sampled(device=lambda n: 8 * GIB if n < 25 else None)
    growths = {g.quantity: g for g in memory.judged(silent, LIMITS, machine_bytes=128 * GIB)}
    device = growths["bytes of the device"]
    assert device.verdict is Verdict.INCONCLUSIVE and "stopped reporting" in device.reason
    assert verdicts(silent, 128 * GIB)["machine"] is Verdict.PASS


def test_a_soak_that_fails_says_in_which_round_and_of_what():
    written: list[dict] = []
    faults = ["token_lost: request 7"]

    def play(number: int) -> soak.SoakRound:
        return soak.SoakRound(number, 0.0, 24, 100, 1.0, faults if number == 3 else [])

    soak.run(60.0, play, written.append)
    last = written[-1]["last_rounds"][-1]
    assert written[-1]["state"] == "a fault" and written[-1]["faults"] == last["faults"] == faults
    assert last["number"] == 3


def outcome(ids, *, completion=None, finish="length", **options) -> JobOutcome:
    answer = Completion("abcd", finish, ids, (9,), None, None, completion or len(ids), 1)
    job = Job("a prompt", {"prompt": "x"}, 4, ALONE)
    return JobOutcome(1, job, answer=answer, status=200, **options)


@pytest.mark.parametrize(
    ("ids", "options", "kind"),
    [
        pytest.param((1, 2, 3, 4), {}, None, id="1 2 3 4"),
        pytest.param((1, 2, 3), {}, "token_lost", id="1 2 3, token_lost"),
        pytest.param((1, 2, 2, 3, 4), {}, "token_doubled", id="1 2 2 3 4, token_doubled"),
        pytest.param(
            (1, 2, 2, 3),
            {"completion": 4},
            "token_doubled",
            id="1 2 2 3, completion 4, token_doubled",
        ),
        pytest.param((1, 3, 4, 7), {}, "token_lost", id="1 3 4 7, token_lost"),
        pytest.param((1, 2, 9, 4), {}, "corrupted_answer", id="1 2 9 4, corrupted_answer"),
        pytest.param(
            (1, 2, 3, 4), {"completion": 5}, "wrong_usage", id="1 2 3 4, completion 5, wrong_usage"
        ),
        pytest.param(
            (1, 2, 3, 4),
            {"finish": "stop"},
            "wrong_finish",
            id="1 2 3 4, finish stop, wrong_finish",
        ),
    ],
)
def test_each_wrong_answer_has_its_class(ids, options, kind):
    fault = checks.fault(outcome(ids, **options), EXACT)
    assert (fault.kind if fault else None) == kind, fault


def stopped(job: JobOutcome) -> list[checks.Fault]:
    """Return the faults of a request of a load whose server was stopped."""
    return checks.faults(LoadResult([job], 0.0, 9.0), EXACT, stopped_at=5.0)


@pytest.mark.parametrize(
    ("ids", "options", "kind"),
    [
        pytest.param((), {}, None, id="nothing"),
        pytest.param((1, 2), {}, None, id="1 2"),
        pytest.param((1, 3), {}, "token_lost", id="1 3, token_lost"),
        pytest.param((9, 2), {}, "corrupted_answer", id="9 2, corrupted_answer"),
        pytest.param((1, 2, 3, 4, 4), {}, "token_doubled", id="1 2 3 4 4, token_doubled"),
        pytest.param((1, 2), {"completion": 4}, "wrong_usage", id="1 2, completion 4, wrong_usage"),
        pytest.param(None, {"completion": 4}, "bad_stream", id="completion 4, bad_stream"),
        pytest.param(
            (1, 2),
            {"problem": ["stuck_request", "no token for 30 s"]},
            "stuck_request",
            id="1 2, problem stuck_request no token for 30 s",
        ),
        # the answer ended before the stop
        pytest.param((1, 2), {"ended": 4.0}, "token_lost", id="1 2, ended 4.0, token_lost"),
        # the answer ended without a message about the stop
        pytest.param(
            (1, 2), {"finish": "length"}, "token_lost", id="1 2, finish length, token_lost"
        ),
    ],
)
def test_a_server_that_is_stopped_may_end_a_request_and_say_so(ids, options, kind):
    """A request that vLLM ends with finish_reason "abort", because it is stopped, is no fault."""
    ended = outcome(ids, **{"finish": "abort", "ended": 6.0, **options})
    assert [fault.kind for fault in stopped(ended)] == [kind] * bool(kind)
    running = checks.faults(LoadResult([ended], 0.0, 9.0), EXACT)
    assert running, "no server that is not stopped may do so"


def test_faults_that_a_stop_does_not_excuse():
    ended = outcome((1, 2), finish="abort", ended=6.0)
    ended.answer = replace(ended.answer, prompt_tokens=4711)
    (fault,) = stopped(ended)
    assert fault.kind == "wrong_usage" and "prompt tokens" in fault.text
    bad = outcome((1, 2), finish="abort", ended=6.0)
    bad.job = replace(bad.job, behaviour="bad")
    assert [fault.kind for fault in stopped(bad)] == ["bad_request_accepted"]


NOISY = level_settings.AgreementBound(max_abs=0.5, mean_abs=0.1, fork=0.25, source="a test")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            {"text": "of somebody else"},
            "expected the text 'abcd' of the same tokens",
            id="text of somebody else, expected the text 'abcd' of the",
        ),
        pytest.param(
            {"ids": [1, 2, 3, 5]},
            "got 4 in place of 5 at 3",
            id="ids 1 2 3 5, got 4 in place of 5 at 3",
        ),
    ],
)
def test_another_requests_text_or_ids_are_no_noise(change, said):
    positions = tuple(Position(f"token_id:{n}", -0.1, {}) for n in (1, 2, 3, 4))
    whole = outcome((1, 2, 3, 4))
    whole.answer = replace(whole.answer, positions=positions)
    whole.job = replace(whole.job, alone=replace(ALONE, positions=positions))
    assert checks.fault(whole, NOISY) is None
    whole.answer = replace(whole.answer, **change)
    fault = checks.fault(whole, NOISY)
    assert fault is not None and fault.kind == "corrupted_answer" and said in fault.text, fault


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        pytest.param({"ids": None}, "bad_stream", id="ids None, bad_stream"),
        pytest.param(
            {"completion_tokens": None}, "wrong_usage", id="completion_tokens None, wrong_usage"
        ),
        pytest.param({"prompt_tokens": None}, "wrong_usage", id="prompt_tokens None, wrong_usage"),
        pytest.param({"prompt_tokens": 4711}, "wrong_usage", id="prompt_tokens 4711, wrong_usage"),
    ],
)
def test_an_answer_under_load_has_the_fields_of_the_answer_alone(change, kind):
    whole = outcome((1, 2, 3, 4))
    whole.answer = replace(whole.answer, text="abcd", **change)
    assert checks.fault(whole, EXACT).kind == kind
    whole.job = replace(whole.job, alone=replace(ALONE, **dict.fromkeys(change)))
    assert checks.fault(whole, EXACT) is None, "not sent to who asks alone either"


@pytest.mark.parametrize(
    ("text", "ids", "kind"),
    [
        pytest.param(" ", (1, 2), None, id="as alone"),
        pytest.param(" ", (1, 2, 3), None, id="a step of several tokens"),
        pytest.param(" Paris. The", (1, 2, 3, 4), "corrupted_answer", id="it goes on"),
    ],
)
def test_an_answer_ends_at_its_stop_string(text, ids, kind):
    """An answer must end at its stop string, even if it begins like the answer sent alone."""
    alone = Completion(" ", "stop", (1, 2), (9,), None, None, 2, 1)
    job = Job("one", {"stop": ["Paris."]}, 4, alone=alone, may_end=True)
    finish = "stop" if kind is None else "length"
    answer = Completion(text, finish, ids, (9,), None, None, len(ids), 1)
    fault = checks.fault(JobOutcome(1, job, status=200, answer=answer), EXACT)
    assert (fault.kind if fault is not None else None) == kind, fault


@pytest.mark.parametrize("behaviour", ["disconnect", "cancel", "slow", "bad"])
def test_no_client_is_answered_with_500_and_a_bad_request_is_refused(behaviour):
    job = Job("x", {"prompt": "x"}, 4, behaviour=behaviour)
    assert checks.fault(JobOutcome(1, job, status=500), EXACT).kind == "http_5xx"
    if behaviour == "bad":
        refused = JobOutcome(1, job, status=400, problem=("refused", "status 400"))
        assert checks.fault(refused, EXACT) is None
        accepted = checks.fault(JobOutcome(1, job, status=200), EXACT)
        failed = JobOutcome(1, job, status=500, problem=("http_5xx", "status 500"))
        assert accepted.kind == "bad_request_accepted"
        assert checks.fault(failed, EXACT).kind == "http_5xx"


@pytest.mark.parametrize(
    ("others", "slowest", "kind"), [(1.0, 1.0, None), (1.0, 12.0, "slow_tail"), (0.1, 1.9, None)]
)
def test_the_slowest_of_a_load_is_bounded(others, slowest, kind):
    """The slowest request of a load is limited; a short pause of the machine does not count."""
    done = [outcome((1, 2, 3, 4), started=0.0, ended=s) for s in (*[others] * 29, slowest)]
    tail = checks.slow_tail(LoadResult(done, 0.0, 1.0), 10, 2)
    assert (tail.kind if tail else None) == kind


def test_arrivals():
    assert shapes.moments("closed", 5, 2) is None
    bursts = shapes.moments("burst", 20, 4)
    assert bursts.count(0.0) == 8 and bursts[8] == 2.0
    poisson = shapes.moments("poisson", 400, 4)
    assert poisson == sorted(poisson) and 80 < poisson[-1] < 120


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("2h", 7200), ("1.5m", 90)])
def test_durations(text, seconds):
    assert soak.parse_duration(text) == seconds
    for wrong in (text[:-1], "", f"-{text}", "0s", "2 weeks", "31d", f"{'9' * 400}h"):
        with pytest.raises(errors.UsageError, match="expected a duration"):
            soak.parse_duration(wrong)


SIGKILL_GUESS = Cause(
    kind="oom", summary="killed by SIGKILL, no cause in the log: probably the host's OOM killer",
    owner="host memory", basis=Basis.SIGKILL_ALONE,
)  # fmt: skip
KILLED = [{"pid": 7, "name": "VLLM::EngineCor", "status": -9}]
NO_KERNEL = KernelMessages()
OOM_LINE = "[ 9.1] Out of memory: Killed process 7 (VLLM::EngineCor) total-vm:1kB"


def cause_of(cause: Cause, kernel=NO_KERNEL, exits=KILLED, kills: int = 0) -> Cause:
    return death.cause_of(cause, exits=exits, kernel=kernel, kills=kills, pids={7})


@pytest.mark.parametrize(
    ("kernel", "kills", "exits", "kind"),
    [
        pytest.param(
            KernelMessages([OOM_LINE]),
            0,
            KILLED,
            "oom",
            id="KernelMessages OOM_LINE, 0, KILLED, oom",
        ),
        pytest.param(
            KernelMessages([OOM_LINE.replace(" 7 ", " 8 ")]),
            0,
            KILLED,
            "killed",
            id="KernelMessages OOM_LINE.replace 7 8, 0, KILLED, killed",
        ),
        pytest.param(KernelMessages(), 1, KILLED, "oom", id="KernelMessages, 1, KILLED, oom"),
        pytest.param(KernelMessages(), 0, KILLED, "killed", id="KernelMessages, 0, KILLED, killed"),
        pytest.param(
            KernelMessages(unavailable="not permitted"),
            0,
            KILLED,
            "killed",
            id="KernelMessages unavailable not permitted, 0, KILLED",
        ),
        pytest.param(
            KernelMessages(unavailable="not permitted"),
            0,
            (),
            "oom",
            id="KernelMessages unavailable not permitted, 0, oom",
        ),
        pytest.param(
            KernelMessages(["[ 9.2] NVRM: Xid (PCI:0000:01:00): 13, x"]),
            0,
            (),
            "xid",
            id="KernelMessages ( 9.2) NVRM: Xid (PCI:0000:01:00): 13",
        ),
    ],
)
def test_sigkill_is_the_oom_killer_only_where_something_says_so(kernel, kills, exits, kind):
    assert cause_of(SIGKILL_GUESS, kernel, exits, kills).kind == kind


NO_MEMORY = (
    "[ 9.3] NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] "
    "(0x00000051) returned from _memdescAllocInternal(pMemDesc) @ mem_desc.c:1359"
)


@pytest.mark.parametrize(
    "logged",
    [
        pytest.param(SIGKILL_GUESS, id="SIGKILL_GUESS"),
        pytest.param(
            Cause(kind="engine_dead", summary="x", owner="y"),
            id="Cause kind engine_dead summary x owner y",
        ),
    ],
)
def test_a_failed_driver_allocation_explains_an_end_without_a_log_line(logged):
    cause = cause_of(logged, KernelMessages((NO_MEMORY,)))
    assert cause.kind == "oom" and "the NVIDIA driver found no memory" in cause.summary
    # The server answered after the message.
    of_start = KernelMessages((NO_MEMORY,), starts=[(9.0, 9.5)])
    assert "the NVIDIA driver found no memory" not in cause_of(logged, of_start).summary
    illegal = Cause(kind="illegal_memory_access", summary="an illegal access", owner="the kernel")
    assert cause_of(illegal, KernelMessages((NO_MEMORY,)), []) == illegal


def test_kernel_messages_before_the_start_are_left_out():
    text = "[    1.000000] NVRM: Xid old\n[  100.500000] NVRM: Xid new\n[  101.0] other"
    assert kernel_messages._later(text, 50.0) == text.splitlines()[1:]


def bundle(folder: Path, redacted=str, **more) -> Path:
    """The crash bundle of a killed server."""
    evidence = crash_bundle.Evidence(cause=SIGKILL_GUESS, what="the server ended", **more)
    return crash_bundle.write(evidence, folder / "crashes", redacted)


def test_a_bundle_is_written_with_missing_parts_and_without_secrets(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("started with key sk-0123456789abcdefghij\nHF_TOKEN=hf_0123456789abcdefghij\n")
    folder = bundle(tmp_path, lambda t: redact(t, ("started",)), log=log)
    index = json.loads((folder / "bundle.json").read_text())
    assert folder.name == "1-oom" and index["class"] == "oom"
    for name, part in index["parts"].items():
        assert (folder / name).is_file() == ("file" in part)
        assert part.get("file") or part["unavailable"], name
    written = "".join(path.read_text() for path in folder.iterdir())
    assert "0123456789" not in written and "started" not in written
    assert bundle(tmp_path, log=log).name == "2-oom", "an earlier bundle is never overwritten"


def test_a_bundle_that_cannot_be_written_goes_elsewhere(tmp_path):
    (tmp_path / "crashes").write_text("a file where the folder should be")
    evidence = crash_bundle.Evidence(cause=SIGKILL_GUESS, what="the server ended")
    folder, why = crash_bundle.write_somewhere(evidence, tmp_path / "crashes", lambda text: text)
    assert (folder / "bundle.json").is_file() and why and not folder.is_relative_to(tmp_path)


def test_a_huge_log_keeps_its_beginning_and_its_end(tmp_path, monkeypatch):
    for name, size in (("WHOLE_LOG", 1000), ("LOG_HEAD", 100), ("LOG_TAIL", 100)):
        monkeypatch.setattr(crash_bundle, f"_{name}_BYTES", size)
    log = tmp_path / "server.log"
    log.write_text("first\n" + "noise\n" * 10_000 + "last\n")
    text = (bundle(tmp_path, log=log) / "server.log").read_text()
    assert text.startswith("first") and text.endswith("last\n") and "bytes left out" in text


def test_flashinfers_log_is_one_for_each_process(tmp_path):
    (tmp_path / "api-7.log").write_text("of the worker\n")
    (tmp_path / "api-8.log").write_text("of somebody else\n")
    exits = [{"pid": 7, "name": "worker", "status": -9}, {"pid": 9, "status": 0}]
    logs = {"FLASHINFER_LOGLEVEL": "3", "FLASHINFER_LOGDEST": f"{tmp_path}/api-%i.log"}
    setup = crash_bundle.EngineSetup(environment=logs)
    folder = bundle(tmp_path, processes=crash_bundle.EngineProcesses(exits=exits), setup=setup)
    text = (folder / "flashinfer-api.log").read_text()
    assert "of the worker" in text and "somebody else" not in text
