"""The suite on a GB10 that is not there (`gb10/`): a healthy one passes, a sick one is named."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meta_tests.fakes.ci_runner import Runner
from meta_tests.fakes.gb10.catalogue import HEALTHY, SICK, Case
from meta_tests.fakes.gb10.machine import Behind, Machine, vllm_on_the_cpu
from meta_tests.fakes.gb10.server import Gb10
from meta_tests.faults import catalogue_rows
from sm121.core import vocabulary

#: Of a machine whose server refuses to start.
NOBODY = Behind("http://127.0.0.1:9", "nobody")


@pytest.fixture(scope="module")
def behind(canary_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """The real vLLM that answers for all of them."""
    with vllm_on_the_cpu(canary_bf16, tmp_path_factory.mktemp("behind") / "log") as running:
        yield running


def _said(verdict: dict) -> str:
    question = f" (asked: {verdict['question']}?)" if verdict["question"] else ""
    doubts = f" (not proven: {'; '.join(verdict['unproven'])})" if verdict["unproven"] else ""
    parts = [verdict["reason"] + question + doubts, verdict["box"].get("reason") or ""]
    parts += verdict["remarks"]
    parts += [f"{crash['kind']}: {crash['summary']}" for crash in verdict["crashes"]]
    parts += [test["message"] or "" for test in verdict["tests"] if test["verdict"] != "PASS"]
    return "\n".join(parts)


def _marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (not case.sample))


@pytest.mark.parametrize("case", [_marked(case) for case in (*HEALTHY, *SICK)])
def test_the_suite_says_what_is_so(case: Case, request: pytest.FixtureRequest, tmp_path: Path):
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
    assert re.fullmatch(case.verdict, verdict["verdict"]), (
        f"required: {case.verdict}\n{done.stdout}"
    )
    failed = [test["id"] for test in verdict["tests"] if test["verdict"] not in ("PASS", "NOT_RUN")]
    others = [name for name in failed if case.alone and not re.fullmatch(case.alone, name)]
    assert not others, f"required: {case.alone} alone, seen: {others}\n{text}"
    missing = [word for word in case.says if not re.search(word, text)]
    assert not missing, f"required: {missing} in what is said, seen:\n{text}"
    assert (done.returncode == 0) == (case.verdict == "PASS"), f"status {done.returncode}\n{text}"


def test_what_is_timed_is_text_of_the_checkpoints_tokenizer(canary_bf16):
    ids = [*range(Gb10.vocabulary)]
    tokens = vocabulary.load(canary_bf16 / vocabulary.FILE)
    assert tokens.differs(ids, Gb10.text_of(None, ids)) is None


def test_the_action_has_the_verdict(tmp_path):
    runner = Runner(tmp_path, NOBODY)
    wrong = "--engine-arg=--moe-backend=no-such"
    status, output, outputs = runner.action(f"-m sm121 --plan quick {wrong} tests/test_smoke.py")
    assert status == 1 and "verdict=FAIL\n" in outputs, output
    assert "report=conformance-report" in outputs
    for again in ("--no-such-option [a-z]*", "-p no_such_plugin"):
        status, output, outputs = runner.action(again)
        assert status and "verdict=" not in outputs, f"that of the first run: {output}"
        if again.startswith("--"):
            assert status == 4 and "--no-such-option" in output


@pytest.mark.slow("two runs more that pytest refuses")
def test_the_action_has_no_verdict_where_pytest_refuses(tmp_path):
    runner = Runner(tmp_path, NOBODY)
    wrong = "--engine-arg=--moe-backend=no-such"
    _, output, outputs = runner.action(f"-m sm121 --plan quick {wrong} tests/test_smoke.py")
    assert "verdict=FAIL\n" in outputs, output
    for again in ("-c no-such.ini", "--rootdir=no/such/folder"):
        status, output, outputs = runner.action(again)
        assert status and "verdict=" not in outputs, f"that of the first run: {output}"


def test_a_drafter_that_is_not_here_is_not_run(tmp_path):
    """No server is started, and the line says how to fetch it."""
    box = Machine(tmp_path / "gb10", "0.33.0", NOBODY, environment={"HF_HOME": str(tmp_path)})
    box.build()
    done = box.run("--plan", "quick", "--configuration", "eagle3-short", "tests/test_smoke.py")
    line = next(line for line in done.stdout.splitlines() if line.startswith("NOT_RUN: "))
    assert "`hf download nvidia/gpt-oss-120b-Eagle3-short-context` first" in line
    assert done.returncode == 5, done.stdout
