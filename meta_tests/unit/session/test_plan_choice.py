"""The plan of a run whose command line names none, and what an option adds to a plan."""

import json
import re
import sys
import types
from pathlib import Path

import pytest

from meta_tests.folders import ROOT
from meta_tests.releases import needs
from sm121.core.profile_fields import FULL
from sm121.plugin.larger_plans import LargerPlan, LeftOut
from sm121.run.fingerprint import Fingerprint
from sm121.session import plan_choice
from sm121.session.plan_choice import DEFAULT, PlanChoice, Reason
from sm121.session.settings import Settings

PLANS = ("quick", "merge")
NOTHING = Reason.NOTHING_NAMED.value
TESTS = Reason.TESTS.value


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        pytest.param({}, (DEFAULT, Reason.NOTHING_NAMED), id="nothing named"),
        pytest.param({"named": "merge", "shard": True}, ("merge", Reason.NAMED), id="named"),
        pytest.param({"names_tests": True}, (FULL, Reason.TESTS), id="a level named"),
        pytest.param({"certify": True}, (FULL, Reason.CERTIFICATE), id="certificate"),
        pytest.param({"shard": True}, (FULL, Reason.SHARD), id="shard"),
        pytest.param({"trusted": "merge"}, ("merge", Reason.TRUSTED), id="trusted run of merge"),
        pytest.param({"trusted": FULL}, (DEFAULT, Reason.NOTHING_NAMED), id="trusted run of full"),
        pytest.param({"plans": ()}, (FULL, Reason.NO_DEFAULT), id="profile without quick"),
    ],
)
def test_the_plan_is_chosen_in_one_place(given, chosen):
    arguments = {"named": None, "plans": PLANS, **given}
    assert plan_choice.choose(**arguments) == PlanChoice(*chosen)


@pytest.fixture(scope="module")
def storage(tmp_path_factory) -> Path:
    """The storage of the run with which all tests of this module compare; empty before that run."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture
def history(run_pytest, fault_server, storage):
    """The option that names a storage with a run of plan full and the same run of plan quick."""
    option = f"--benchmark-storage={storage}"
    if any(storage.iterdir()):
        return option
    samples = {"tg32@d0": [90.0, 90.3, 89.7, 90.2, 89.8]}
    status, run = run_pytest(
        "--arch", "sm121", *fault_server().options, "--served-model-name", "canary", option,
        "meta_tests/whole/scenarios/measurements.py", "--benchmark-autosave",
        environment={"SM121_META_SAMPLES": json.dumps(samples)},
    )  # fmt: skip
    assert status == 0, run.output
    (file,) = storage.glob("*/*.json")
    content = json.loads(file.read_text())
    for benchmark in content["benchmarks"]:
        benchmark["extra_info"]["plan"]["plan"] = "quick"
    file.with_name("0002_quick.json").write_text(json.dumps(content))
    return option


def asked(run_pytest, *arguments):
    """Return the plan and its reason in the header, and the tests that would run."""
    status, run = run_pytest("--collect-only", *arguments)
    assert status == 0, run.output
    header = re.search(r"^plan: (\w+) \((.*)\)$", run.output, re.M)
    assert header, run.output
    levels = re.search(r"^would run: \d+ checks \((.*)\)$", run.output, re.M)
    return header.groups(), re.findall(r"[a-z]+", levels[1]), run.output


QUICK_LEVELS = ["smoke", "kernel", "correctness", "performance"]


@pytest.mark.parametrize(
    ("arguments", "header", "levels"),
    [
        pytest.param((), (DEFAULT, NOTHING), QUICK_LEVELS, id="bare"),
        pytest.param(("--arch", "cpu", "-m", "cpu"), (DEFAULT, NOTHING), QUICK_LEVELS, id="-m cpu"),
        pytest.param(
            ("-m", "sm121", "--base-url", "http://127.0.0.1:9"),
            (DEFAULT, NOTHING), QUICK_LEVELS, id="-m sm121",
        ),
        pytest.param(
            ("tests",), (DEFAULT, NOTHING), QUICK_LEVELS, id="tests",
            marks=pytest.mark.slow("as bare"),
        ),
        pytest.param(("-m", "not smoke"), (DEFAULT, NOTHING), QUICK_LEVELS[1:], id="-m not smoke"),
        pytest.param(("-m", "stress"), (FULL, TESTS), ["stress"], id="-m stress"),
        pytest.param(
            ("-m", "cpu and stress"), (FULL, TESTS), ["stress"], id="-m cpu and stress",
            marks=pytest.mark.slow("as -m stress"),
        ),
        pytest.param(("tests/test_stress.py",), (FULL, TESTS), ["stress"], id="a file"),
        pytest.param(
            ("tests/test_smoke.py::test_baseline_starts_and_answers",),
            (FULL, TESTS), ["smoke"], id="a node id",
        ),
        pytest.param(("-k", "sustained"), (FULL, TESTS), ["stress"], id="-k"),
        pytest.param(
            ("--plan", "quick", "--benchmark-compare"),
            (DEFAULT, Reason.NAMED.value), [*QUICK_LEVELS, "regression"], id="compare in a plan",
        ),
        pytest.param(
            ("--benchmark-autosave",),
            (DEFAULT, NOTHING), [*QUICK_LEVELS, "regression"], id="autosave",
        ),
        pytest.param(
            ("tests/test_performance.py", "--benchmark-compare"),
            (FULL, TESTS), ["performance", "regression"], id="compare beside a file",
        ),
        pytest.param(
            ("--benchmark-compare", "-k", "test_decode_rate"),
            (FULL, TESTS), ["performance", "regression"], id="compare beside -k",
        ),
        pytest.param(
            ("--benchmark-compare", "-m", "performance"),
            (FULL, TESTS), ["performance", "regression"], id="compare beside -m",
            marks=pytest.mark.slow("as beside -k"),
        ),
        pytest.param(
            ("--benchmark-compare", "-m", "performance and not regression"),
            (FULL, TESTS), ["performance"], id="regression excluded by name",
        ),
    ],
)  # fmt: skip
def test_a_run_asks_quick_unless_it_names_more(run_pytest, request, arguments, header, levels):
    if "--benchmark-compare" in arguments:  # the run that is compared must exist
        arguments = (request.getfixturevalue("history"), *arguments)
    assert asked(run_pytest, *arguments)[:2] == (header, levels)


def test_an_attached_server_is_asked_the_same(run_pytest, fault_server):
    server = fault_server()
    found, levels, _ = asked(run_pytest, "--arch", "cpu", *server.options)
    assert (found, levels) == ((DEFAULT, NOTHING), QUICK_LEVELS)


def test_a_named_test_misses_no_metric_of_other_tests(run_pytest, history):
    """A run of one named test does not report the metrics of other tests as missing.

    The history of a whole run has metrics that the named test does not measure.
    """
    _, _, output = asked(run_pytest, history, "-k", "test_decode_rate", "--benchmark-compare")
    assert "test_no_metric_is_worse" in output and "test_no_metric_is_missing" not in output


def test_a_plan_has_all_tests_that_compare(run_pytest, history):
    _, _, output = asked(run_pytest, history, "--benchmark-compare")
    assert "test_no_metric_is_missing" in output


def test_a_plan_asks_every_section_of_a_given_exam(run_pytest):
    """If an exam is given, plan quick also sends the questions of its sections facts, dialogues,
    tools and formats."""
    exam = ROOT / "fixtures" / "exams" / "canary.jsonl"
    sections = [
        "test_facts_are_known", "test_dialogues_are_followed", "test_the_right_tools_are_called",
        "test_answers_in_a_form_are_right",
    ]  # fmt: skip
    _, _, output = asked(run_pytest, f"--exam={exam}")
    assert [name for name in sections if name not in output] == []
    _, _, output = asked(run_pytest)
    assert "test_dialogues_are_followed" not in output


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (f"--depths={10**8}", f"--depths {10**8}: expected at most 4064 tokens"),
        ("--exam=README.md", "README.md: line 1: expected JSON"),
        ("--golden=README.md", "README.md: expected a file of --record-golden"),
        (f"--scores={sys.executable}", "expected a Python with lm-evaluation-harness"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(run_pytest, option, why):
    """`sm121 plan`, which only collects the tests, refuses a wrong value as a run does."""
    status, run = run_pytest("--arch", "cpu", "--collect-only", option)
    assert status == 4 and why in run.output, run.output


@pytest.mark.parametrize(
    ("arch", "exam", "plan", "line"),
    [
        ("sm121", "gpt-oss-120b", "quick", "are not in plan quick; --plan full has them"),
        ("sm121", "gpt-oss-120b", FULL, None),
        ("sm121", "canary", "quick", None),
        ("cpu", "gpt-oss-120b", "quick", "plan quick; profile cpu-tiny-gpt-oss leaves them out"),
    ],
)
def test_a_section_of_a_given_exam_that_the_plan_leaves_out_is_named(
    run_pytest, fault_server, arch, exam, plan, line
):
    """Head and end of a run name the questions of a given exam that its plan leaves out."""
    modules = ["test_long_documents_are_read", "test_facts_are_known"]
    _, run = run_pytest(
        "--arch", arch, *fault_server().options, "--served-model-name", "canary", "--plan", plan,
        f"--exam={ROOT / 'fixtures' / 'exams' / exam}.jsonl",
        *(f"tests/test_correctness.py::{name}" for name in modules),
    )  # fmt: skip
    lines = [each for each in run.output.splitlines() if "questions about a document" in each]
    assert len(lines) == (2 if line else 0), run.output
    assert all(line in each for each in lines), run.output


def test_the_trusted_run_decides_where_its_plan_is_larger_than_quick(run_pytest, tmp_path):
    """A run that is compared with a trusted run of plan merge has this plan, too."""
    from sm121.run import verdict_file
    from sm121.run.verdict_file import EngineReport, TestReport, VerdictFile

    engine = EngineReport(name="vllm", managed=True, model="m")
    test = TestReport(id="tests/test_smoke.py::test_health", level="smoke", verdict="PASS")
    file = VerdictFile(
        arch="cpu", profile="cpu-tiny-gpt-oss", started="2026-11-22T10:00:00", finished=True,
        engine=engine, fingerprint=Fingerprint(plan="merge"), tests=[test],
    )  # fmt: skip
    file.judge()
    file.reason = file.why()
    (tmp_path / "trusted").mkdir()
    verdict_file.write(file, tmp_path / "trusted" / "verdict.json")
    found, levels, _ = asked(run_pytest, f"--against={tmp_path / 'trusted'}")
    assert found == ("merge", Reason.TRUSTED.value) and "stress" in levels


def test_left_out_checks_are_shown_with_their_duration():
    larger = (LargerPlan("merge", 474, "about 29 min"), LargerPlan("full", 565, None))
    assert str(LeftOut("quick", 530, larger)) == (
        "plan quick left out 530 checks: --plan merge (474 checks, about 29 min), "
        "--plan full (565 checks)"
    )


def test_head_and_end_of_a_run_say_what_was_left_out(run_pytest, fault_server):
    server = fault_server()
    _, run = run_pytest("--arch", "cpu", *server.options, "--plan", "quick", "tests/test_smoke.py")
    line = r"^plan quick left out 2 checks: --plan merge \(13 checks, .*\), --plan full \(13 "
    assert len(re.findall(line, run.output, re.M)) == 2, run.output
    assert run.output.rindex("plan quick left out") > run.output.index("sm121 conformance")


@needs("pytest", "8.4", "it prints the progress of a run without tests")
def test_a_machine_that_cannot_is_one_line(run_pytest):
    status, run = run_pytest("-m", "sm121", environment={"CUDA_VISIBLE_DEVICES": ""})
    lines = [line for line in run.output.splitlines() if line.strip()]
    assert status == 5 and len(lines) == 1, run.output
    assert re.match(r"NOT_RUN: sm121 was requested, but this machine is \w+ \(", lines[0])
    assert "--base-url URL --arch sm121" in lines[0]
    assert run.verdict["verdict"] == "NOT_RUN" and run.verdict["exit_status"] == 5
    assert run.verdict["tests"]


def test_v_shows_the_levels_of_a_machine_that_cannot(run_pytest):
    status, run = run_pytest("-m", "sm121", "-v", "tests/test_smoke.py")
    assert status == 5 and re.search(r"^smoke +NOT_RUN", run.output, re.M), run.output


def test_workers_have_the_plan_of_their_controller():
    """A worker uses the plan that its controller has chosen.

    A worker parses the command line again, and sees other paths in it."""
    from sm121.plugin import spine, stash

    planned = PlanChoice("merge", Reason.TRUSTED)
    option = types.SimpleNamespace(dist="loadgroup", maxworkerrestart="0")
    kept = {stash.SETTINGS: Settings(planned=planned)}
    config = types.SimpleNamespace(stash=kept, option=option)
    node = types.SimpleNamespace(config=config, workerinput={})
    spine.pytest_configure_node(node)
    name, reason = node.workerinput["sm121_plan"]
    assert PlanChoice(name, Reason(reason)) == planned
