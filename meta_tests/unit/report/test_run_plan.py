"""The checks of a planned run: pytest passes them to ``sm121 plan`` in a file, which prints
them."""

import pytest

from sm121.report import run_plan

PLAN = run_plan.RunPlan(
    checks={"smoke": 2, "kernel": 1},
    not_run={"no server": ["a", "b"]},
    deselected=["c"],
    machine=run_plan.Machine(
        arch=None, evidence="NVML", processor="GB10", cores=20, memory_gib=120, faults=["slow"]
    ),
    target=run_plan.PlannedTarget(
        arch="sm121",
        profile="p",
        configuration="cutlass",
        attached_at=None,
        engine=run_plan.StartedEngine(name="vllm", version=None, python="python", model="m"),
        nodes=run_plan.SpannedNodes(
            count=2, tensor_parallel=2, launcher="ray", transports=["ib"], commands=["ssh b"]
        ),
        facts=["start: warm"],
        problem=None,
        plans=[
            run_plan.PlanTime(name="quick", checks=3, timed=1, levels={"smoke": None}, time="9 s")
        ],
        shipped=run_plan.ShippedTimes(start="9 s", start_source="a run", plans={"quick": "two"}),
    ),
)


def test_a_plan_answer_is_read_as_written(tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    monkeypatch.setenv(run_plan.VARIABLE, str(file))
    assert run_plan.read_answer(file) == run_plan.PlanAnswer()
    for answer in (run_plan.PlanAnswer(plan=PLAN), run_plan.PlanAnswer(refusal="--x: no")):
        run_plan.write_answer(answer)
        assert run_plan.read_answer(file) == answer


def test_no_plan_file_is_written_without_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv(run_plan.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    run_plan.write_answer(run_plan.PlanAnswer(plan=PLAN))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "line",
    [
        "would run: 3 checks (smoke 2, kernel 1)",
        "would not run: 2 (a ...)",
        "  because: no server",
        "would not run: 1 deselected (c ...)",
        "machine: unknown (GB10, 20 cores, 120 GiB; NVML)",
        "slow",
        "target: arch sm121, profile p, configuration cutlass",
        "engine: vllm (version unknown) of python, model m",
        "nodes: 2, tensor parallel 2, by ray; between them ib",
        "node 1: by ssh b",
        "start: warm",
        "| quick | 3 | ? | - | - | - | - | - | - | 9 s |",
        "- a start: 9 s (a run)",
        "- plan quick: two",
    ],
)
def test_the_text_has_each_field(line):
    assert line in run_plan.text(PLAN).splitlines()


def test_an_attached_server_is_named_by_its_address():
    target = PLAN.target.model_copy(update={"attached_at": "http://a:1"})
    text = run_plan.text(PLAN.model_copy(update={"target": target}))
    assert "engine: attached at http://a:1\n" in text and "of python" not in text


def test_a_plan_without_a_target_has_the_reasons_alone():
    plan = PLAN.model_copy(update={"target": None, "machine": None, "deselected": []})
    assert run_plan.text(plan).splitlines()[1:] == [
        "would not run: 2 (a ...)",
        "  because: no server",
    ]
