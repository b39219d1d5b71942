"""The suite on the simulated GB10 (`gb10/`): a healthy machine passes, and a faulty one fails with
its cause."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meta_tests.fakes.ci_runner import Runner
from meta_tests.fakes.fat_binaries import SMALL_KERNEL
from meta_tests.fakes.gb10.catalogue import HEALTHY, SICK, TAGGED, Case
from meta_tests.fakes.gb10.machine import BUILD, LIBRARIES, Behind, Machine, vllm_on_the_cpu
from meta_tests.fakes.gb10.server import Gb10
from meta_tests.fakes.timed_server import Pace, Plan
from meta_tests.faults import catalogue_rows
from meta_tests.folders import ROOT
from sm121.core import vocabulary

#: An address without a server, for the cases in which the simulated start is refused.
NOBODY = Behind("http://127.0.0.1:9", "nobody")


@pytest.fixture(scope="module")
def behind(canary_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """Start the real vLLM that generates the answers of all simulated GB10s."""
    with vllm_on_the_cpu(canary_bf16, tmp_path_factory.mktemp("behind") / "log") as running:
        yield running


def _said(verdict: dict) -> str:
    question = f" (question: {verdict['question']}?)" if verdict["question"] else ""
    doubts = f" (not proven: {'; '.join(verdict['unproven'])})" if verdict["unproven"] else ""
    parts = [verdict["reason"] + question + doubts, verdict["box"].get("reason") or ""]
    parts += verdict["remarks"]
    parts += [f"{crash['kind']}: {crash['summary']}" for crash in verdict["crashes"]]
    parts += [test["message"] or "" for test in verdict["tests"] if test["verdict"] != "PASS"]
    return "\n".join(parts)


def _marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (not case.sample))


@pytest.mark.parametrize("case", [_marked(case) for case in (*HEALTHY, *SICK)])
def test_each_stand_in_has_its_expected_verdict(
    case: Case, request: pytest.FixtureRequest, tmp_path: Path
):
    behind = NOBODY if case.sample else request.getfixturevalue("behind")
    box = Machine(tmp_path / "gb10", case.release, behind, **case.changes)
    box.build()
    began = time.monotonic()
    nothing = contextlib.nullcontext(())
    with nothing if case.served is None else box.served(*case.served, tail=case.tail) as attached:
        done = box.run("--plan", "quick", *case.arguments, *attached)
    assert (box.report / "verdict.json").is_file(), done.stdout
    verdict = box.verdict
    text = _said(verdict)
    catalogue_rows.keep({
        "name": case.name, "release": case.release, "healthy": case in HEALTHY,
        "verdict": verdict["verdict"], "said": text.partition("\n")[0],
        "seconds": round(time.monotonic() - began), "asked": " ".join(case.arguments),
    })  # fmt: skip
    assert re.fullmatch(case.verdict, verdict["verdict"]), f"expected {case.verdict}\n{done.stdout}"
    failed = [test["id"] for test in verdict["tests"] if test["verdict"] not in ("PASS", "NOT_RUN")]
    messages = [test["message"] or "" for test in verdict["tests"]]
    bare = [message for message in messages if message.startswith("assert ")]
    assert not bare, f"expected a sentence in each finding, got an assertion of Python: {bare}"
    others = [name for name in failed if case.alone and not re.fullmatch(case.alone, name)]
    assert not others, f"expected {case.alone} alone, got {others}\n{text}"
    missing = [word for word in case.says if not re.search(word, text)]
    assert not missing, f"expected {missing} in the text, got:\n{text}"
    assert (done.returncode == 0) == (case.verdict == "PASS"), f"status {done.returncode}\n{text}"


@pytest.mark.slow("a real vLLM of its own, whose model is wrong")
def test_a_wrong_model_is_detected_by_the_oracle_alone(canary_bf16: Path, tmp_path: Path):
    """In the plan quick, a wrong factor of YaRN fails the comparison with the oracle."""
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for file in canary_bf16.iterdir():
        (wrong / file.name).symlink_to(file.resolve())
    config = json.loads((canary_bf16 / "config.json").read_text("utf-8"))
    rope = config.get("rope_parameters") or config["rope_scaling"]
    rope["factor"] /= 2
    (wrong / "config.json").unlink()
    (wrong / "config.json").write_text(json.dumps(config), "utf-8")
    box = Machine(tmp_path / "gb10", "0.33.0", NOBODY)
    with vllm_on_the_cpu(wrong, tmp_path / "log") as box.behind:
        box.build()
        done = box.run("--configuration", "stock")
    failed = [test["id"] for test in box.verdict["tests"] if test["verdict"] == "FAIL"]
    name = "tests/test_correctness.py::test_prompt_log_probabilities_agree_with_the_oracle"
    assert failed == [name], done.stdout


def test_timed_answers_are_text_of_the_checkpoints_tokenizer(canary_bf16):
    ids = [*range(Gb10.vocabulary)]
    tokens = vocabulary.load(canary_bf16 / vocabulary.FILE)
    assert tokens.differs(ids, Gb10.text_of(None, ids)) is None


def test_streamed_answers_are_text_of_the_checkpoints_tokenizer():
    server = Gb10.__new__(Gb10)
    server.model = "gpt-oss-120b"
    steps = [(token, -0.5, {}) for token in range(3)]
    events = server._events({}, Plan(3, [1, 2, 3]), steps, 4, False, Pace())
    chunks = [json.loads(payload.removeprefix(b"data: ")) for _, payload, _ in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == server.text_of([0, 1, 2])


def test_the_action_has_the_verdict(tmp_path):
    runner = Runner(tmp_path, NOBODY)
    wrong = "--engine-arg=--moe-backend=no-such"
    status, output, outputs = runner.action(f"-m sm121 --plan quick {wrong} tests/test_smoke.py")
    assert status == 1 and "verdict=FAIL\n" in outputs, output
    assert "report=conformance-report" in outputs
    status, output, outputs = runner.action("--no-such-option [a-z]*")
    assert status == 4 and "--no-such-option" in output
    assert "verdict=" not in outputs, f"that of the first run: {output}"


@pytest.mark.slow("three runs more that pytest refuses")
def test_the_action_has_no_verdict_where_pytest_refuses(tmp_path):
    runner = Runner(tmp_path, NOBODY)
    wrong = "--engine-arg=--moe-backend=no-such"
    _, output, outputs = runner.action(f"-m sm121 --plan quick {wrong} tests/test_smoke.py")
    assert "verdict=FAIL\n" in outputs, output
    for again in ("-c no-such.ini", "--rootdir=no/such/folder", "-p no_such_plugin"):
        status, output, outputs = runner.action(again)
        assert status and "verdict=" not in outputs, f"that of the first run: {output}"


def test_a_drafter_that_is_not_here_is_not_run(tmp_path):
    """If a drafter is not on this machine, no server starts, and the reason contains the command
    that downloads the drafter."""
    box = Machine(tmp_path / "gb10", "0.33.0", NOBODY, environment={"HF_HOME": str(tmp_path)})
    box.build()
    done = box.run("--plan", "quick", "--configuration", "eagle3-short", "tests/test_smoke.py")
    line = next(line for line in done.stdout.splitlines() if line.startswith("NOT_RUN: "))
    assert "`hf download nvidia/gpt-oss-120b-Eagle3-short-context` first" in line
    assert done.returncode == 5, done.stdout


@pytest.mark.slow("two starts of the simulated server, in front of a real vLLM")
@pytest.mark.parametrize("faults", [[], ["drafter-ignored"]], ids=["drafts", "no drafts"])
def test_a_decode_with_a_drafter_is_profiled(faults, behind, tmp_path):
    """`sm121 profile eagle3-short` is judged by its drafts."""
    drafter = "nvidia/gpt-oss-120b-Eagle3-short-context"
    rates = {"FLASHINFER_CUTLASS_MXFP4_MXFP8": [[2048, 61.0, 4663.7], [34816, 48.0, 1398.8]]}
    box = Machine(
        tmp_path / "gb10", "0.33.0", behind, drafter=drafter, rates=rates,
        settings={"faults": faults},
    )  # fmt: skip
    box.build()
    command = [
        sys.executable, "-m", "sm121", "profile", "eagle3-short", f"--profile={box.profile}",
        f"--engine-python={box.python}", f"--output={tmp_path / 'decode'}",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=box.surroundings(), text=True, capture_output=True, check=False
    )
    fault = "speculative decoding: expected steps with drafts of eagle3, got steps of one token"
    assert (fault in done.stdout) == bool(faults), (done.stdout, done.stderr)
    assert done.returncode == (1 if faults else 0), (done.stdout, done.stderr)


def _documented_call(hypothesis: str) -> list[str]:
    """Return pytest's arguments from the header of a file of hypotheses."""
    text = (ROOT / "fixtures" / "hypotheses" / hypothesis).read_text("utf-8")
    header = [line[1:] for line in text.splitlines() if line.startswith("#")]
    words = shlex.split("\n".join(header).partition("pytest ")[2].replace("\\\n", " "))
    return words[: words.index("--hypothesis") + 2]


def _compile(box: Machine) -> None:
    """Put machine code for GB10 into vLLM's libraries, if this machine has an nvcc."""
    if nvcc := shutil.which("nvcc"):
        source = box.folder / "kernel.cu"
        source.write_text(SMALL_KERNEL)
        target = next(box.python.parent.parent.glob("lib/python*/site-packages/vllm"))
        made = target / LIBRARIES[0]
        flags = ["-shared", "-arch=sm_121a", "-Xcompiler", "-fPIC", "-cudart", "none"]
        subprocess.run([nvcc, *flags, "-o", str(made), str(source)], check=True)
        shutil.copy(made, target / LIBRARIES[1])


@pytest.mark.slow("a comparison of two starts, whole")
def test_the_gate_of_the_first_phase(behind: Behind, tmp_path: Path):
    """On a healthy machine, the documented call finds no fault, but misses a proof of the kernels.

    No GPU kernels run on the simulated GB10, so the gate does not pass. A start takes 4 s here, so
    the comparison of starts may be INCONCLUSIVE if other processes use the machine.
    """
    box = Machine(tmp_path / "gb10", BUILD, behind, version=TAGGED)
    box.build()
    _compile(box)
    done = box.run(*_documented_call("cutlass.toml"))
    by_name = {test["id"].rpartition("::")[2]: test for test in box.verdict["tests"]}
    assert by_name["test_engine_has_code_for_this_gpu"]["verdict"] == "PASS", done.stdout
    assert by_name["test_the_hypothesis_holds"]["verdict"] == "INCONCLUSIVE", done.stdout
    unchecked = by_name["test_the_hypothesis_holds"]["message"]
    assert "test_decode_runs_the_kernels_of_its_path passes: NOT_RUN" in unchecked
    assert unchecked.count(", A ") == 1, f"expected one criterion, got {unchecked}"
    for test in by_name.values():
        assert test["verdict"] in ("PASS", "NOT_RUN", "INCONCLUSIVE"), done.stdout
    changes = json.loads((box.report / "ab.json").read_text("utf-8"))["outcomes"]
    undecided = {each["metric"] for each in changes if each["verdict"] != "PASS"}
    assert undecided <= {"startup_s"}, done.stdout


@pytest.mark.slow("an interpreter of its own")
def test_libraries_without_code_for_gb10(tmp_path: Path):
    """The test of the libraries fails if vLLM was built for other GPUs."""
    box = Machine(tmp_path / "gb10", BUILD, NOBODY, version=TAGGED, code="90a")
    box.build()
    done = box.run("tests/test_kernel.py::test_engine_has_code_for_this_gpu")
    assert done.returncode == 1, done.stdout
    assert "machine code that runs on sm_121, got sm_90a" in _said(box.verdict)
