"""The correctness level notices wrong models: a sample of the catalogue in `model_faults.py`."""

import json
import re
from pathlib import Path

import model_faults
import pytest
from model_faults import FAULTS, NOT_FOR, SabotagedServer

pytestmark = pytest.mark.timeout(900)

SAMPLE = {
    "one block's scale one step up": model_faults.ORACLE,
    "wrong in a batch only": model_faults.BATCH,
    "wrong after a hit of the prefix cache only": model_faults.CACHE,
}
SABOTEUR = Path(__file__).parent / "in_vllm" / "model_saboteur.py"


@pytest.fixture(scope="module")
def sabotaged(canary_bf16, tmp_path_factory):
    """The real vLLM, one start for all tests here."""
    with SabotagedServer(canary_bf16, tmp_path_factory.mktemp("sabotaged")) as server:
        yield server


@pytest.fixture
def judge(sabotaged, run_pytest):
    """Run tests of the level with a fault in force, as a user does."""

    def run(fault: str, *tests: str, options: tuple[str, ...] = ()):
        sabotaged.put(fault)
        return run_pytest(*sabotaged.arguments(tests), *options, timeout_s=300.0)

    return run


@pytest.mark.slow("`make conformance` runs the same tests on a server of its own")
def test_the_intact_model_passes(judge, tmp_path):
    """And its answers are recorded, for the test after the next."""
    status, run = judge(model_faults.CLEAN, *SAMPLE.values())
    assert status == 0, run.output
    assert sum(test["verdict"] == "PASS" for test in run.verdict["tests"]) == len(SAMPLE)


@pytest.mark.parametrize("fault", SAMPLE)
def test_a_wrong_model_is_noticed(judge, fault):
    status, run = judge(fault, SAMPLE[fault])
    assert status == 1, f"{fault}: not noticed\n{run.output}"
    failed = [test for test in run.verdict["tests"] if test["verdict"] == "FAIL"]
    assert failed and all("required" in test["message"] for test in failed), failed


@pytest.mark.slow("what such a file tells is in test_golden.py, without an engine")
def test_a_golden_file_tells_the_intact_model_from_a_wrong_one(judge, tmp_path):
    golden = tmp_path / "golden.json"
    status, run = judge(model_faults.CLEAN, "golden", options=("--record-golden", str(golden)))
    assert status == 0, run.output
    status, run = judge(model_faults.CLEAN, "golden", options=("--golden", str(golden)))
    assert status == 0, run.output
    assert any("top-1 agreement 100.00%" in line for line in run.verdict["remarks"])
    status, run = judge("YaRN factor 16 for 32", "golden", options=("--golden", str(golden)))
    assert status == 1, run.output
    message = run.verdict["tests"][0]["message"]
    assert re.search(r"prompt '[\w ]+' is the first of \d that differ", message), message


def test_an_accuracy_slice_is_judged_and_kept(judge, tmp_path):
    capitals = {"France": "Paris", "Spain": "Madrid", "Japan": "Tokyo", "Italy": "Rome"}
    questions = tmp_path / "questions.jsonl"
    lines = [
        {
            "prompt": f"The capital of {country} is",
            "answer": city,
            "kind": "begins",
            "id": f"{n}{country}",
        }
        for n in range(5)
        for country, city in capitals.items()
    ]
    questions.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    status, run = judge(model_faults.CLEAN, "accuracy", options=("--questions", str(questions)))
    assert status == 0, run.output
    kept = run.report / "accuracy.jsonl"
    assert len(kept.read_text().splitlines()) == len(lines)
    options = ("--questions", str(questions), "--questions-baseline", str(kept))
    status, run = judge("embedding rows shifted by one", "accuracy", options=options)
    assert status == 1 and "no worse than the baseline" in run.output, run.output


def test_the_saboteur_and_the_catalogue_name_the_same_faults():
    text = SABOTEUR.read_text("utf-8")
    names = re.findall(r'^(?:@patch\w*\(|    )"(.+?)"(?:\)$|: )', text, re.M)
    assert set(names) == set(FAULTS)
    assert len(FAULTS) >= 25


def test_the_published_table_is_of_these_faults():
    published = model_faults.TABLE.read_text("utf-8")
    missing = [name for name in FAULTS if f"| {name} |" not in published]
    assert not missing, "run python meta_tests/model_faults.py"
    assert "**survives**" not in published
    assert all(reason in published for table in NOT_FOR.values() for reason in table.values())
