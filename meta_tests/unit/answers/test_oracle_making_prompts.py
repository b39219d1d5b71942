"""The oracle's answers to some prompts are computed alone, in a process beside the tests."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from sm121.answers import (
    log_probabilities,
    oracle_file,
    oracle_making,
    oracle_process,
    oracle_texts,
)
from sm121.answers.oracle_file import OracleFile
from sm121.answers.oracle_process import OracleProcess
from sm121.answers.oracle_tolerance import OracleReference, computed_tolerance
from sm121.core.verdict import NotRun
from sm121.oracles.formats import EXACT, Rounding

NAME = "capitals"
FORMATS = Rounding.parse("qkv=mxfp4-ceil,kv=fp8,experts=mxfp8-identity")


@pytest.fixture(scope="module")
def one(canary_mxfp4) -> OracleFile:
    return oracle_making.make_prompts(canary_mxfp4, FORMATS, [NAME])


@pytest.fixture
def alone(one, monkeypatch) -> list[None]:
    """A list with an entry for each computation. Each computation gives the same file."""
    entries: list[None] = []

    def compute(*_arguments: object, **_options: object) -> OracleFile:
        entries.append(None)
        return one

    monkeypatch.setattr(oracle_making, "make_prompts", compute)
    return entries


def test_prompts_alone_have_the_values_of_the_whole_file(canary_bf16):
    whole = oracle_file.shipped(canary_bf16)
    assert whole is not None
    made = oracle_making.make_prompts(canary_bf16, EXACT, [NAME])
    expected = oracle_file.only_prompts(whole, [NAME])
    right = expected.prompts[NAME].following
    assert made.prompts[NAME].following == pytest.approx(right, abs=1e-6)
    assert made.rounded["bf16"][NAME] == pytest.approx(expected.rounded["bf16"][NAME], abs=1e-6)
    assert [*made.prompts] == [NAME] and [*made.rounded] == ["bf16"]
    assert not made.exact and not made.mistakes and not expected.exact and not expected.mistakes


def test_a_server_that_rounds_activations_has_both_tolerances(one):
    assert [*one.rounded] == ["bf16", "float32"] and one.rounding == FORMATS.formats
    assert computed_tolerance(one, "bf16").mean_abs > 0


def test_prompts_are_computed_once(canary_mxfp4, alone, tmp_path):
    assert oracle_making.kept_prompts(canary_mxfp4, FORMATS, tmp_path, [NAME]) is None
    for _ in range(2):
        oracle_making.prompts_kept_or_made(canary_mxfp4, FORMATS, tmp_path, [NAME])
    assert len(alone) == 1
    oracle_making.prompts_kept_or_made(canary_mxfp4, FORMATS, tmp_path, [NAME], anew=True)
    oracle_making.prompts_kept_or_made(canary_mxfp4, FORMATS, tmp_path, ["chat"])
    assert len(alone) == 3


def test_prompts_are_taken_from_a_whole_file(canary_bf16, alone, monkeypatch, tmp_path):
    whole = oracle_file.shipped(canary_bf16)
    assert whole is not None
    monkeypatch.setattr(oracle_making, "make", lambda *_, **__: whole)
    monkeypatch.setattr(oracle_making, "shipped", lambda *_: None)
    oracle_making.kept_or_made(canary_bf16, EXACT, tmp_path)
    taken = oracle_making.prompts_kept_or_made(canary_bf16, EXACT, tmp_path, [NAME])
    assert taken.prompts[NAME].following == whole.prompts[NAME].following
    assert [*taken.prompts] == [NAME] and not alone


def test_only_the_prompts_of_the_file_are_sent(one):
    sent = []

    class Asked:
        def ask(self, request):
            sent.append(list(request.prompt))
            return SimpleNamespace(prompt_log_probabilities=one.prompts[NAME].following)

        def need(self, value, _name):
            return value

    reference = OracleReference(one, "bfloat16", computed_tolerance(one, "bf16"), "bf16")
    assert "off by 0 nats" in log_probabilities.prompts_agree(Asked(), reference)
    assert sent == [dict(oracle_texts.prompts())[NAME]]


@pytest.fixture(autouse=True)
def normal_priority(monkeypatch):
    """With the lowest priority, a process would take a minute beside other tests."""
    monkeypatch.setattr(oracle_process, "_NICE", 0)


def test_the_process_fills_the_cache(canary_mxfp4, tmp_path):
    process = OracleProcess(canary_mxfp4, EXACT, tmp_path, [NAME])
    process.wait(lambda: None)
    process.close()
    kept = oracle_making.kept_prompts(canary_mxfp4, EXACT, tmp_path, [NAME])
    assert kept is not None
    assert [*kept.prompts] == [NAME]


def test_a_closed_process_has_ended(canary_mxfp4, tmp_path):
    process = OracleProcess(canary_mxfp4, FORMATS, tmp_path, [NAME])
    process.close()
    assert process._process.poll() is not None
    assert not [*Path(tmp_path).glob("*.json")]


def test_a_failed_process_is_not_run_with_its_reason(tmp_path):
    process = OracleProcess(tmp_path / "none", EXACT, tmp_path, [NAME])
    with pytest.raises(NotRun, match=r"got status 1: FileNotFoundError: .*none"):
        process.wait(lambda: None)
    process.close()


def test_a_slow_process_is_not_run(canary_mxfp4, tmp_path, monkeypatch):
    monkeypatch.setattr(oracle_process, "_WAIT_S", 0.0)
    process = OracleProcess(canary_mxfp4, EXACT, tmp_path, [NAME])
    with pytest.raises(NotRun, match="expected its answers within 0 s"):
        process.wait(lambda: None)
    process.close()
