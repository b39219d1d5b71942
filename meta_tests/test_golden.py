"""Golden files: what is compared, what is refused, and what is said of it."""

import dataclasses
import json
import math
import shutil

import pytest
from data_rows import from_data

from sm121.answers import golden
from sm121.answers.prompts import Prompt, PromptSet
from sm121.client.completions import Completion, Position, Request, ids_of
from sm121.core import level_settings, profile, unmet
from sm121.core.errors import UsageError

PROMPTS = PromptSet(
    schema_version=1,
    name="two",
    prompts=(Prompt(name="one", text="a", tokens=4), Prompt(name="two", text="b", tokens=4)),
)
BOUND = level_settings.GoldenBound(
    max_abs=0.1, mean_abs=0.05, fork=0.1, mean_divergence=1e-3, top1_at_least=0.7, source="meta"
)
PROMPT_IDS = {"a": (1,), "b": (2, 3)}


def at(token: int, p: float = 0.6, other: int = 99, q: float = 0.2) -> Position:
    name = f"token_id:{token}"
    return Position(name, math.log(p), {name: math.log(p), f"token_id:{other}": math.log(q)})


class Engine:
    """An asker without a server: greedy answers from a table of prompt to positions."""

    def __init__(self, table, prompt_ids=PROMPT_IDS):
        self.table = table
        self.prompt_ids = prompt_ids
        self.asked: list[Request] = []

    def ask(self, request: Request) -> Completion:
        self.asked.append(request)
        positions = tuple(self.table[request.prompt])[: request.tokens]
        ids = request.prompt if isinstance(request.prompt, tuple) else None
        return Completion(
            text=str(request.prompt), finish_reason="length", ids=ids_of(positions),
            prompt_ids=ids or self.prompt_ids[request.prompt], positions=positions,
            prompt_log_probabilities=None, completion_tokens=len(positions), prompt_tokens=1,
        )  # fmt: skip

    def positions(self, answer: Completion):
        return answer.positions


TRUSTED = {"a": [at(n) for n in (10, 11, 12, 13)], "b": [at(n) for n in (20, 21, 22, 23)]}


def record(engine: Engine, identity: golden.Identity | None = None, **environment):
    return golden.record(
        engine, PROMPTS, model=identity or golden.Identity(served_name="canary"), dtype="float32",
        engine="vllm", engine_version="0.32.0", configuration="float32",
        environment=environment or {"engine_arguments": ["--enforce-eager"], "host": {"cores": 2}},
    )  # fmt: skip


def compare(table, **environment):
    return golden.compare(
        record(Engine(TRUSTED)), Engine(table), PROMPTS, BOUND, environment or {"host": {}}
    )


def test_a_file_is_written_and_read_again(tmp_path):
    found = record(Engine(TRUSTED))
    golden.save(found, tmp_path / "golden.json")
    assert golden.load(tmp_path / "golden.json") == found
    assert [answer.prompt_ids for answer in found.answers] == [(1,), (2, 3)]


def test_the_same_run_agrees():
    found = compare(TRUSTED)
    assert found.beyond(BOUND) == []
    assert found.mean_divergence == 0 and found.top1 == 1 and found.worst[2] == 0
    assert "top-1 agreement 100.00%" in found.summary()


def test_the_first_prompt_that_differs_is_named():
    wrong = {**TRUSTED, "b": [at(20), at(5), at(6), at(7)]}
    found = compare(wrong).beyond(BOUND)
    assert str(found[0]).startswith("prompt 'two': token 1: required: ")
    assert str(found[0]).endswith("the first of 1 that differ)")


def test_a_larger_difference_is_seen_and_the_worst_token_named():
    found = compare({**TRUSTED, "a": [at(10), at(11, 0.8), at(12), at(13)]})
    assert found.beyond(BOUND)[0].about.startswith("prompt 'one'")
    assert found.worst == ("one", 1, pytest.approx(math.log(0.8 / 0.6)))


def test_small_differences_everywhere_are_seen_by_the_divergence():
    drifted = {key: [at(p, 0.6, q=0.21) for p in ids] for key, ids in
               (("a", (10, 11, 12, 13)), ("b", (20, 21, 22, 23)))}  # fmt: skip
    tight = BOUND.model_copy(update={"mean_divergence": 1e-6, "mean_abs": 1.0})
    assert "KL divergence" in unmet.text(compare(drifted).beyond(tight))


def test_two_attractors_are_followed_from_the_golden_token():
    close = [at(10), at(11, 0.41, 55, 0.4), at(12), at(13)]
    other = [at(10), at(55, 0.41, 11, 0.4), at(70), at(71)]
    engine = Engine({**TRUSTED, "a": other, (1, 10, 11): [at(12), at(13)]})
    trusted = record(Engine({**TRUSTED, "a": close}))
    found = golden.compare(trusted, engine, PROMPTS, BOUND, {})
    assert found.beyond(BOUND) == [], found
    assert found.top1 == 7 / 8 and "1 accepted forks" in found.summary()
    broken = Engine({**TRUSTED, "a": other, (1, 10, 11): [at(70), at(71)]})
    agreements = golden.compare(trusted, broken, PROMPTS, BOUND, {}).agreements.values()
    assert any(agreed.disagreement for agreed in agreements)


def test_another_tokenizer_is_refused_by_its_tokens():
    other = Engine(TRUSTED, {"a": (1,), "b": (2, 4)})
    with pytest.raises(UsageError, match=r"another tokenizer: prompt 'two'") as error:
        golden.compare(record(Engine(TRUSTED)), other, PROMPTS, BOUND, {})
    assert "\n" not in str(error.value)


def test_environments_are_told_apart_by_name():
    found = compare(TRUSTED, engine_arguments=[], host={"cores": 4}).differences
    assert 'engine_arguments: ["--enforce-eager"] -> []' in found
    assert "host.cores: 2 -> 4" in found


def test_other_models_prompts_and_tokenizers_are_refused(canary_bf16, tmp_path):
    identity = golden.identity("canary", canary_bf16)
    assert identity.weights_sha256 and identity.config_sha256 and identity.tokenizer_sha256
    trusted = record(Engine(TRUSTED), identity)
    golden.refuse_other(trusted, "--golden x", identity, PROMPTS)
    golden.refuse_other(trusted, "--golden x", golden.identity("elsewhere", None), PROMPTS)
    others = {
        "config.json": {"config_sha256": "0" * 64},
        "weight files": {"weights_sha256": "0" * 64},
        "tokenizer": {"tokenizer_sha256": "0" * 64},
        "set of weights": {"weights_digest": "0" * 16},
    }
    for what, change in others.items():
        with pytest.raises(UsageError, match=f"another .*{what}"):
            golden.refuse_other(trusted, "--golden x", identity.model_copy(update=change), PROMPTS)
    fewer = PROMPTS.model_copy(update={"prompts": PROMPTS.prompts[:1]})
    with pytest.raises(UsageError, match="another prompt set"):
        golden.refuse_other(trusted, "--golden x", identity, fewer)
    copy = tmp_path / "copy"
    shutil.copytree(canary_bf16, copy)
    assert golden.identity("canary", copy) == identity
    weights = next(copy.glob("*.safetensors"))
    values = weights.read_bytes()
    weights.write_bytes(values[:-1] + bytes([values[-1] ^ 1]))
    changed = golden.identity("canary", copy)
    assert changed.weights_sha256 == identity.weights_sha256
    with pytest.raises(UsageError, match="another set of weights"):
        golden.refuse_other(trusted, "--golden x", changed, PROMPTS)


@from_data
def test_two_nodes_against_one_within_the_bound_of_the_profile(shifts, within):
    each, other, one_token = shifts
    bound = profile.load("cpu-tiny-gpt-oss-tp2").correctness.golden["float32"]
    one = profile.load("cpu-tiny-gpt-oss").correctness.golden["float32"]
    assert bound == one, "what one node recorded holds for two"
    starts = {"a": 10, "b": 20}

    def shift(n):
        return each + other * (-1) ** n + one_token * (n == 20)

    two = {
        prompt: [at(n, 0.6 * math.exp(shift(n))) for n in range(start, start + 4)]
        for prompt, start in starts.items()
    }
    beyond = golden.compare(record(Engine(TRUSTED)), Engine(two), PROMPTS, bound, {}).beyond(bound)
    assert (not beyond) == within, beyond


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": 2}', "\x00"])
def test_a_file_that_is_none_is_one_clear_line(tmp_path, content):
    file = tmp_path / "golden.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="expected a file of --record-golden") as error:
        golden.load(file)
    assert "\n" not in str(error.value)


def test_options_are_checked_before_anything_starts(run_pytest, tmp_path, canary_bf16):
    """A file of another model is refused; no server was started."""
    file = tmp_path / "golden.json"
    other = golden.identity("canary", canary_bf16).model_copy(update={"config_sha256": "0" * 64})
    golden.save(record(Engine(TRUSTED), other), file)
    status, run = run_pytest("--arch", "cpu", "tests/test_correctness.py", "--golden", str(file))
    assert status == 4 and "another model's config.json" in run.output, run.output
    assert not json.loads((run.report / "verdict.json").read_text())["starts"]


def test_a_file_with_other_answers_than_one_a_prompt_is_refused():
    whole = record(Engine(TRUSTED))
    golden.refuse_other(whole, "--golden x", whole.model, PROMPTS)
    first, second = whole.answers
    renamed = second.model_copy(update={"name": "three"})
    for answers in ((first,), (first, renamed), (second, first), (first, second, second)):
        edited = whole.model_copy(update={"answers": answers})
        with pytest.raises(UsageError, match="one answer to each of the 2 prompts") as error:
            golden.refuse_other(edited, "--golden x", whole.model, PROMPTS)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_run_without_finite_log_probabilities_is_not_recorded(value):
    broken = [Position("token_id:10", -0.1, {"token_id:10": -0.1, "token_id:9": value})]
    with pytest.raises(AssertionError, match="'one': required: finite log-probabilities"):
        record(Engine({**TRUSTED, "a": broken}))


def test_half_a_surrogate_pair_is_not_recorded():
    class Odd(Engine):
        def ask(self, request: Request) -> Completion:
            return dataclasses.replace(super().ask(request), text="a\ud83d")

    with pytest.raises(AssertionError, match="'one': required: text"):
        record(Odd(TRUSTED))


def test_another_text_of_the_same_tokens_is_a_difference():
    class Mangled(Engine):
        def ask(self, request: Request) -> Completion:
            return dataclasses.replace(super().ask(request), text="a\ufffd")

    found = golden.compare(record(Engine(TRUSTED)), Mangled(TRUSTED), PROMPTS, BOUND, {})
    assert "prompt 'one': the same tokens: " in unmet.text(found.beyond(BOUND))


def test_an_engine_that_lists_the_chosen_token_alone_is_compared():
    bare = {key: [Position(p.token, p.log_probability, {}) for p in positions]
            for key, positions in TRUSTED.items()}  # fmt: skip
    found = golden.compare(record(Engine(bare)), Engine(bare), PROMPTS, BOUND, {})
    assert found.beyond(BOUND) == [] and found.mean_divergence == 0


def test_a_divergence_of_nothing_is_no_agreement():
    nothing = golden.GoldenComparison({}, ())
    assert math.isnan(nothing.mean_divergence)
    assert "KL divergence" in unmet.text(nothing.beyond(BOUND))


def test_what_the_files_would_prove_is_said_where_they_are_not_at_hand(canary_bf16):
    here, elsewhere = golden.identity("canary", canary_bf16), golden.identity("other", None)
    trusted = record(Engine(TRUSTED), here)
    assert golden.unproven(trusted, here) is None
    said = golden.unproven(trusted, elsewhere)
    assert said is not None and "weights" in said and "'canary'" in said and "'other'" in said


def test_a_certificate_takes_answers_of_a_trusted_run_alone(tmp_path):
    """It is said before anything starts, also of a file whose run was cut off."""
    recorded = golden.record(
        Engine({"a": [at(1)], "b": [at(2)]}), PROMPTS, model=golden.Identity(served_name="canary"),
        dtype="float32", engine="vllm", engine_version="0.32.0", configuration="float32",
        environment={},
    )  # fmt: skip
    path = tmp_path / "golden.json"
    golden.save(recorded, path)
    assert "nothing says" in golden.load(path).doubt
    golden.conclude(path, "level correctness of the run that recorded it is FAIL")
    with pytest.raises(UsageError, match="expected answers of a trusted run; level correctness"):
        golden.refuse_doubtful(golden.load(path), f"--golden {path}")
    golden.conclude(path, None)
    golden.refuse_doubtful(golden.load(path), f"--golden {path}")
