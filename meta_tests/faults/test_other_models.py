"""A trusted run detects faults of another model than gpt-oss on the real vLLM."""

import dataclasses
import subprocess

import pytest

from meta_tests.fakes.warm_pytest import WarmPytest
from meta_tests.faults import other_models, other_models_llama_cpp
from meta_tests.faults.other_models import FAMILIES, GOLDEN, GROUPS, OtherModel, one_scale
from meta_tests.releases import needs_torch
from sm121.core.server import Server
from sm121.core.verdict import Verdict
from sm121.run import verdict_file

#: The shortest checks that read the exam, chats and the golden file.
SAMPLE = dataclasses.replace(
    GROUPS[0],
    checks=(
        *("--plan", "quick", "tests/test_smoke.py", "tests/test_correctness.py"),
        *("-k", "one_ or known_answers or golden or chats_end"),
    ),
)


@dataclasses.dataclass
class WarmModel(OtherModel):
    """Forks its runs from a process that has imported the suite."""

    template: WarmPytest

    def _pytest(self, server: Server, words: list[str]) -> subprocess.CompletedProcess[str]:
        output = self.folder / "output.txt"
        options = [*words, *other_models.given(server)]
        run = self.template.start(options, output, other_models.variables_of(server))
        return subprocess.CompletedProcess(words, run.wait(600.0), output.read_text("utf-8"), "")


@needs_torch
@pytest.mark.timeout(600)
def test_the_second_run_of_an_unchanged_server_is_green(tmp_path, monkeypatch, warm_pytest):
    """With the three commands of docs/another-model.md, a second run on an unchanged server passes.

    The real vLLM is started once."""
    # Even with --enforce-eager, vLLM compiles its function that ranks log-probabilities, which
    # takes 8 s of the first request with log-probabilities.
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    model = WarmModel("qwen3", SAMPLE, tmp_path, warm_pytest())
    with model.serving() as server:
        model.init_profile(server)
        first = model.judge(server, "trusted run")
        second = model.judge(server, "nothing")
    assert first.status == 0 and model.golden.is_file(), first
    assert second.status == 0 and "not worse than the run of" in second.reason, second
    run = verdict_file.read(next(tmp_path.glob("tmp*/verdict.json")))
    passed = [test.id.rpartition("::")[2] for test in run.tests if test.verdict is Verdict.PASS]
    assert {GOLDEN, "test_one_chat", "test_known_answers"} <= {*passed}, passed


@pytest.mark.slow("starts the real vLLM twice; test_init_command.py has the profile, without one")
@pytest.mark.timeout(1800)
def test_a_trusted_run_tells_the_same_model_from_a_wrong_one(tmp_path):
    model = OtherModel("qwen3", GROUPS[0], tmp_path)
    with model.serving() as server:
        model.init_profile(server)
        for _ in range(2):
            same = model.judge(server, "nothing")
            assert same.status == 0 and not same.detected_by, same
    (scaled,) = (fault for fault in model.group.faults if fault.change is one_scale)
    with model.serving(scaled) as server:
        wrong = model.judge(server, scaled.name)
    assert wrong.status == 1 and GOLDEN in wrong.detected_by, wrong


@pytest.mark.parametrize("made_by", [other_models, other_models_llama_cpp], ids=["vLLM", "llama"])
def test_the_published_table_of_other_models_has_these_faults(made_by):
    published = made_by.TABLE.read_text("utf-8")
    names = []
    for group in made_by.GROUPS:
        for fault in group.faults:
            names.append(fault.name)
    missing = [name for name in names if f"| {name} |" not in published]
    assert not missing, f"run python -m {made_by.__name__}"
    assert "not tried" not in published
    for family in FAMILIES:
        assert f" {family}: detected by |" in published
