"""With `-n N`, one worker has the server, nothing is timed, and the parts give one report."""

import re
from types import SimpleNamespace

import pytest

from meta_tests.folders import ROOT
from sm121.core.errors import UsageError
from sm121.plugin import workers
from sm121.plugin.stash import ID, LEVEL, SETTINGS

SCENARIOS = "meta_tests/whole/scenarios/spread.py"
SPREAD = []
for name in ("test_spread", "test_in_order"):
    for n in range(6):
        SPREAD.append(f"{name}[{n}]")


def decided(run) -> dict[str, str]:
    return {test["id"].partition("::")[2]: test["verdict"] for test in run.verdict["tests"]}


@pytest.mark.usefixtures("canary_bf16")
def test_workers_make_one_report(run_pytest):
    status, run = run_pytest("-n", "2", "-v", "--arch", "cpu", SCENARIOS, "-k", "not kills")
    assert status == 1, run.output
    assert decided(run) == {
        **dict.fromkeys(("test_passes", "test_runs_all_the_same", *SPREAD), "PASS"),
        **dict.fromkeys(("test_is_timed", "test_is_not_for_this"), "NOT_RUN"),
        "test_fails": "FAIL",
    }, run.output
    (timed,) = [test for test in run.verdict["tests"] if test["id"].endswith("test_is_timed")]
    assert "run this test without -n" in timed["message"]
    assert run.verdict["verdict"] == "FAIL" and run.verdict["finished"], run.verdict["reason"]
    assert run.verdict["levels"]["kernel"]["passed"] == 14 and run.verdict["shard"] is None
    assert "PytestBenchmarkWarning" not in run.output
    assert "@server" not in str(run.verdict["tests"])
    assert (run.report / "report.html").is_file() and "FAIL: test_fails" in run.output
    grouped = set(re.findall(r"::(\w+)\S*?@server\b", run.output))
    assert grouped == {"test_passes", "test_fails", "test_in_order", "test_runs_all_the_same"}
    # On a busy machine, one worker may run all tests that pass. However, xdist gives each worker at
    # least one test.
    ran = re.findall(r"\[(gw\d)\].* (?:PASSED|FAILED|SKIPPED) \S+::(\w+)", run.output)
    assert len({worker for worker, name in ran if name == "test_in_order"}) == 1, run.output
    assert len({worker for worker, _ in ran}) == 2, run.output


@pytest.mark.usefixtures("canary_bf16")
def test_a_test_that_kills_its_worker_fails_and_is_not_tried_again(run_pytest):
    chosen = (f"{SCENARIOS}::test_kills_among_others", f"{SCENARIOS}::test_runs_all_the_same")
    status, run = run_pytest("-n", "2", "--arch", "cpu", *chosen)
    assert status == 1 and run.verdict["verdict"] == "FAIL", run.output
    assert decided(run) == {
        "test_kills_among_others": "FAIL", "test_runs_all_the_same": "NOT_RUN",
    }, run.output  # fmt: skip
    (killer,) = [test for test in run.verdict["tests"] if "kills" in test["id"]]
    assert "crashed while running" in killer["message"] and not run.verdict["finished"]
    assert len(re.findall(r"^worker 'gw\d+' crashed", run.output, re.MULTILINE)) == 1


def test_workers_name_the_tests_that_were_left_out(run_pytest, fault_server):
    chosen = ("tests", "-k", "golden_file or test_health or long_documents", "--plan=quick")
    exam = f"--exam={ROOT / 'fixtures' / 'exams' / 'gpt-oss-120b.jsonl'}"
    words = ("--arch", "sm121", *fault_server().options, "--served-model-name", "canary")
    _, run = run_pytest("-n", "2", *words, *chosen, exam)
    assert re.search(r"^plan quick left out \d+ checks?: --plan", run.output, re.M), run.output
    assert "2 tests are left out; they need --golden, --record-golden" in run.output
    assert run.output.count("the questions about a document are not in plan quick") == 1


@pytest.mark.slow("workers again")
def test_a_green_run_of_workers_is_green(run_pytest):
    chosen = [f"{SCENARIOS}::{name}" for name in ("test_spread", "test_in_order")]
    status, run = run_pytest("-n", "2", "--arch", "cpu", *chosen)
    assert status == 0 and run.verdict["verdict"] == "PASS", run.output
    assert run.verdict["levels"]["kernel"]["passed"] == 12


@pytest.mark.slow("workers again")
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "an exception"])
def test_a_worker_that_dies_outside_its_tests_is_reported(run_pytest, monkeypatch, how):
    """A worker that dies outside of its tests is reported.

    All its tests had passed, and it may have been stopping its server."""
    monkeypatch.setenv("SM121_META_ENDS_BY", how)
    plugin = ("-p", "meta_tests.whole.scenarios.dies_at_its_end")
    chosen = ("-n", "2", "--arch", "cpu", f"{SCENARIOS}::test_spread")
    status, run = run_pytest(*plugin, *chosen)
    assert status == 1 and run.verdict["verdict"] == "FAIL", run.output
    (end,) = [t for t in run.verdict["tests"] if t["id"] == "end of the run::worker gw0"]
    assert end["verdict"] == "FAIL" and "gw0: expected the worker to end" in end["message"]


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        pytest.param(["-n2", "--dist", "load"], "expected -n N alone", id="dist"),
        pytest.param(["-n2", "--max-worker-restart=3"], "expected -n N alone", id="restart"),
        pytest.param(["-n2", "--shard", "1/2"], "--shard with -n: expected one", id="shard"),
    ],
)
@pytest.mark.slow("workers again")
def test_another_division_of_the_levels_is_refused(run_pytest, words, refusal):
    status, run = run_pytest(*words, "--arch", "cpu", f"{SCENARIOS}::test_spread")
    assert status == 4, run.output
    assert refusal in run.output and "INTERNALERROR" not in run.output


@pytest.mark.parametrize("words", [["-n", "2"], ["-n2"], ["--numprocesses=2"]], ids=" ".join)
def test_n_without_xdist_names_the_package(run_pytest, words):
    status, run = run_pytest("-p", "no:xdist", *words, "--arch", "cpu", SCENARIOS)
    assert status == 4, run.output
    (line,) = [line for line in run.output.splitlines() if line.startswith("ERROR")]
    assert "expected the package pytest-xdist, got none. Install it: pip install" in line
    assert "sm121-conformance[parallel]" in line


def test_n_beside_certify_is_not_taken_for_a_missing_package():
    with pytest.raises(pytest.UsageError, match="without workers, got -n2"):
        workers.refuse_without_xdist(["-n2"], certify=True)


@pytest.mark.parametrize("named", ["", "@mine_server"], ids=["not named", "another group"])
def test_a_test_with_the_server_is_in_no_other_group(named):
    """A test that uses the server is in no other group.

    The groups have the names that xdist gives them with pytest 9.1 and 9.2."""
    settings = SimpleNamespace(worker=object())
    config = SimpleNamespace(
        stash={SETTINGS: settings}, workerinput={workers.GROUPED: True}, getoption=lambda _: None
    )
    test = "tests/test_smoke.py::test_health[a@b]"
    item = SimpleNamespace(
        stash={ID: test, LEVEL: "smoke"}, fixturenames=["server"], nodeid=f"{test}{named}"
    )
    item.id = SimpleNamespace(parse=lambda nodeid: setattr(item, "nodeid", nodeid))
    if named:
        with pytest.raises(UsageError, match=r"xdist_group of tests/test_smoke.*expected none"):
            workers.name_groups(config, [item])
    else:
        workers.name_groups(config, [item])
        assert item.nodeid == f"{test}@server"


GATES = [SimpleNamespace(metric="tg32@d0"), SimpleNamespace(metric="moe_decode_us")]


@pytest.mark.parametrize(
    ("gates", "level", "left_out"),
    [
        pytest.param(GATES, "performance", "-m 'not performance'", id="gates of rates"),
        pytest.param([], "performance", None, id="no gate"),
        pytest.param([], "stress", "-m 'not stress'", id="limits of the stress level"),
        pytest.param(GATES, "moe_decode_us", "-k 'not test_kernel_speed'", id="a kernel's gate"),
        pytest.param(GATES, "moe_prefill_us", None, id="a kernel without a gate"),
        pytest.param(GATES, "kernel", None, id="no time of a kernel"),
        pytest.param(GATES, "correctness", None, id="no test of these"),
    ],
)
@pytest.mark.parametrize("worker", [None, object()], ids=["without workers", "beside workers"])
def test_gates_that_workers_leave_unmeasured_are_refused(gates, worker, level, left_out):
    config = SimpleNamespace(stash={SETTINGS: SimpleNamespace(worker=worker)})
    profile = SimpleNamespace(name="mine", performance=SimpleNamespace(gates=gates))
    is_timed_kernel = level.endswith("_us")
    item = SimpleNamespace(stash={LEVEL: "kernel" if is_timed_kernel else level})
    item.get_closest_marker = {"kernel_benchmarks": True if is_timed_kernel else None}.get
    item.callspec = SimpleNamespace(params={"case": SimpleNamespace(metric=level)})
    items = [SimpleNamespace(stash={}), item]
    if left_out is not None and worker is not None:
        with pytest.raises(UsageError, match=f"-n: expected no workers.*leave.*out: {left_out}$"):
            workers.refuse_gates(config, items, profile)
    else:
        workers.refuse_gates(config, items, profile)
