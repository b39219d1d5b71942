"""Golden files: the comparison, the refusals, and the messages."""

import dataclasses
import math
import shutil

import pytest

from sm121.answers import golden
from sm121.answers.golden_comparison import GoldenComparison
from sm121.answers.prompts import PromptSet
from sm121.client.completion_json import Completion, Position, ids_of
from sm121.client.completions import Request
from sm121.core import level_settings, profile, unmet
from sm121.core.errors import UsageError

PROMPTS = PromptSet(
    schema_version=1,
    name="two",
    prompts=[{"name": "one", "text": "a", "tokens": 4}, {"name": "two", "text": "b", "tokens": 4}],
)
BOUND = level_settings.GoldenBound(
    max_abs=0.1, mean_abs=0.05, fork=0.1, mean_divergence=1e-3, top1_at_least=0.7, source="meta"
)
PROMPT_IDS = {"a": (1,), "b": (2, 3)}


def at(token: int, p: float = 0.6, other: int = 99, q: float = 0.2) -> Position:
    name = f"token_id:{token}"
    return Position(name, math.log(p), {name: math.log(p), f"token_id:{other}": math.log(q)})


class Engine:
    """A replacement for a server that returns greedy answers from a table of prompts and
    positions."""

    def __init__(self, table, prompt_ids=PROMPT_IDS):
        self.table = table
        self.prompt_ids = prompt_ids

    def ask(self, request: Request) -> Completion:
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


def against_trusted(engine: Engine, bound=BOUND, **environment) -> GoldenComparison:
    return golden.compare(record(Engine(TRUSTED)), engine, PROMPTS, bound, environment)


def compare(table, **environment):
    return against_trusted(Engine(table), **(environment or {"host": {}}))


def test_a_file_is_written_and_read_again(tmp_path):
    recorded = record(Engine(TRUSTED))
    golden.save(recorded, tmp_path / "golden.json")
    assert golden.load(tmp_path / "golden.json") == recorded
    assert [answer.prompt_ids for answer in recorded.answers] == [(1,), (2, 3)]


def test_the_same_run_agrees():
    comparison = compare(TRUSTED)
    assert comparison.beyond(BOUND) == []
    assert comparison.mean_divergence == 0 and comparison.top1 == 1 and comparison.worst[2] == 0
    assert "top-1 agreement 100.00%" in comparison.summary()


def test_the_first_prompt_that_differs_is_named():
    wrong = {**TRUSTED, "b": [at(20), at(5), at(6), at(7)]}
    fact = str(compare(wrong).beyond(BOUND)[0])
    assert fact.startswith("prompt 'two': token 1: expected ")
    assert fact.endswith("the first of 1 that differ)")


def test_a_larger_difference_is_seen_and_the_worst_token_named():
    comparison = compare({**TRUSTED, "a": [at(10), at(11, 0.8), at(12), at(13)]})
    assert comparison.beyond(BOUND)[0].about.startswith("prompt 'one'")
    assert comparison.worst == ("one", 1, pytest.approx(math.log(0.8 / 0.6)))


def test_small_differences_everywhere_are_seen_by_the_divergence():
    starts = {"a": 10, "b": 20}
    drifted = {}
    for key, start in starts.items():
        drifted[key] = [at(start + n, 0.6, q=0.21) for n in range(4)]
    tight = BOUND.model_copy(update={"mean_divergence": 1e-6, "mean_abs": 1.0})
    assert "KL divergence" in unmet.facts_text(compare(drifted).beyond(tight))


def test_the_golden_token_is_continued_after_two_right_continuations():
    close = [at(10), at(11, 0.41, 55, 0.4), at(12), at(13)]
    other = [at(10), at(55, 0.41, 11, 0.4), at(70), at(71)]
    trusted = record(Engine({**TRUSTED, "a": close}))

    def resumed(*tokens: int) -> GoldenComparison:
        engine = Engine({**TRUSTED, "a": other, (1, 10, 11): [at(token) for token in tokens]})
        return golden.compare(trusted, engine, PROMPTS, BOUND, {})

    right = resumed(12, 13)
    assert right.beyond(BOUND) == [], right
    assert right.top1 == 7 / 8 and "1 accepted forks" in right.summary()
    assert any(agreed.disagreement for agreed in resumed(70, 71).agreements.values())


def test_another_tokenizer_is_refused_by_its_tokens():
    with pytest.raises(UsageError, match=r"another tokenizer: prompt 'two'") as error:
        against_trusted(Engine(TRUSTED, {"a": (1,), "b": (2, 4)}))
    assert "\n" not in str(error.value)


def test_differences_of_environments_are_named():
    differences = compare(TRUSTED, engine_arguments=[], host={"cores": 4}).differences
    assert 'engine_arguments: ["--enforce-eager"] -> []' in differences
    assert "host.cores: 2 -> 4" in differences


def test_other_models_prompts_and_tokenizers_are_refused(canary_bf16, tmp_path):
    identity = golden.identity("canary", canary_bf16)
    assert identity.weights_sha256 and identity.config_sha256 and identity.tokenizer_sha256
    trusted = record(Engine(TRUSTED), identity)

    def refuse(other: golden.Identity, prompts: PromptSet = PROMPTS) -> None:
        golden.refuse_other(trusted, "--golden x", other, prompts)

    refuse(identity)
    refuse(golden.identity("elsewhere", None))
    others = {
        "config.json": {"config_sha256": "0" * 64},
        "weight files": {"weights_sha256": "0" * 64},
        "tokenizer": {"tokenizer_sha256": "0" * 64},
        "set of weights": {"weights_digest": "0" * 16},
    }
    for name, change in others.items():
        with pytest.raises(UsageError, match=f"another .*{name}"):
            refuse(identity.model_copy(update=change))
    with pytest.raises(UsageError, match="another prompt set"):
        refuse(identity, PROMPTS.model_copy(update={"prompts": PROMPTS.prompts[:1]}))
    copy = tmp_path / "copy"
    shutil.copytree(canary_bf16, copy)
    assert golden.identity("canary", copy) == identity
    weights = next(copy.glob("*.safetensors"))
    values = weights.read_bytes()
    weights.write_bytes(values[:-1] + bytes([values[-1] ^ 1]))
    changed = golden.identity("canary", copy)
    assert changed.weights_sha256 == identity.weights_sha256
    with pytest.raises(UsageError, match="another set of weights"):
        refuse(changed)


# How a second rank changes log-probabilities, in nats: those of each token, of every second token
# with the other sign, and of token 20.
@pytest.mark.parametrize(
    ("shifts", "within"),
    [
        pytest.param((0.0, 0.0, 0.0), True, id="the same sums"),
        pytest.param((0.0, 1e-05, 0.0), True, id="sums in another order"),
        pytest.param((0.0, 0.0, 0.00039), True, id="one token near the bound"),
        pytest.param((0.0, 0.0, 0.2), False, id="a rank's part is lost at one token"),
        pytest.param((0.0, 0.005, 0.0), False, id="a rank sums in bfloat16"),
        pytest.param((0.002, 0.0, 0.0), False, id="one head is computed twice"),
    ],
)
def test_two_nodes_against_one_within_the_bound_of_the_profile(shifts, within):
    each, other, one_token = shifts
    bound, one = (
        profile.load(f"cpu-tiny-gpt-oss{nodes}").correctness.golden["float32"]
        for nodes in ("-tp2", "")
    )
    assert bound == one, "what one node recorded holds for two"

    def shifted(n: int) -> Position:
        return at(n, 0.6 * math.exp(each + other * (-1) ** n + one_token * (n == 20)))

    two = {}
    for key, start in (("a", 10), ("b", 20)):
        two[key] = [shifted(start + n) for n in range(4)]
    beyond = against_trusted(Engine(two), bound).beyond(bound)
    assert (not beyond) == within, beyond


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": 2}', "\x00"])
def test_an_invalid_golden_file_gives_one_line(tmp_path, content):
    file = tmp_path / "golden.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="expected a file of --record-golden") as error:
        golden.load(file)
    assert "\n" not in str(error.value)


def test_options_are_checked_before_anything_starts(run_pytest, tmp_path, canary_bf16):
    """A golden file of another model is refused before a server starts."""
    file = tmp_path / "golden.json"
    other = golden.identity("canary", canary_bf16).model_copy(update={"config_sha256": "0" * 64})
    golden.save(record(Engine(TRUSTED), other), file)
    status, run = run_pytest("--arch", "cpu", "tests/test_correctness.py", "--golden", str(file))
    assert status == 4 and "another model's config.json" in run.output, run.output
    assert not (run.report / "verdict.json").exists(), "a refused request leaves no report"
    assert not list(run.report.glob("server-*"))


def test_a_file_with_other_answers_than_one_a_prompt_is_refused():
    whole = record(Engine(TRUSTED))
    golden.refuse_other(whole, "--golden x", whole.model, PROMPTS)
    first, second = whole.answers
    renamed = second.model_copy(update={"name": "three"})
    for answers in ((first,), (first, renamed), (second, first), (first, second, second)):
        edited = whole.model_copy(update={"answers": answers})
        with pytest.raises(UsageError, match=r"^[^\n]*one answer to each of the 2 prompts[^\n]*$"):
            golden.refuse_other(edited, "--golden x", whole.model, PROMPTS)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_run_without_finite_log_probabilities_is_not_recorded(value):
    broken = [Position("token_id:10", -0.1, {"token_id:10": -0.1, "token_id:9": value})]
    with pytest.raises(AssertionError, match="'one': expected finite log-probabilities"):
        record(Engine({**TRUSTED, "a": broken}))


class Mangled(Engine):
    def __init__(self, text: str) -> None:
        super().__init__(TRUSTED)
        self.text = text

    def ask(self, request: Request) -> Completion:
        return dataclasses.replace(super().ask(request), text=self.text)


def test_half_a_surrogate_pair_is_not_recorded():
    with pytest.raises(AssertionError, match="'one': expected text"):
        record(Mangled("a\ud83d"))


def test_another_text_of_the_same_tokens_is_a_difference():
    beyond = against_trusted(Mangled("a\ufffd")).beyond(BOUND)
    assert "prompt 'one': the same tokens: " in unmet.facts_text(beyond)


def test_an_engine_that_lists_the_chosen_token_alone_is_compared():
    bare = {}
    for key, positions in TRUSTED.items():
        bare[key] = [Position(p.token, p.log_probability, {}) for p in positions]
    comparison = golden.compare(record(Engine(bare)), Engine(bare), PROMPTS, BOUND, {})
    assert comparison.beyond(BOUND) == [] and comparison.mean_divergence == 0


def test_a_comparison_without_tokens_does_not_pass():
    nothing = GoldenComparison({}, ())
    assert math.isnan(nothing.mean_divergence)
    assert "KL divergence" in unmet.facts_text(nothing.beyond(BOUND))


def test_missing_checkpoint_files_are_reported_as_unproven(canary_bf16):
    at_hand = golden.identity("canary", canary_bf16)
    elsewhere = golden.identity("other", None)
    trusted = record(Engine(TRUSTED), at_hand)
    assert golden.unproven(trusted, at_hand) is None
    text = golden.unproven(trusted, elsewhere)
    assert text is not None and "weights" in text and "'canary'" in text and "'other'" in text


def test_a_certificate_takes_answers_of_a_trusted_run_alone(tmp_path):
    """A certificate accepts only golden files of trusted runs.

    Any other file is refused before anything starts."""
    path = tmp_path / "golden.json"
    golden.save(record(Engine(TRUSTED)), path)
    assert "the end of the run" in golden.load(path).doubt
    golden.conclude(path, "level correctness of the run that recorded it is FAIL")
    with pytest.raises(UsageError, match="trusted run; level correctness") as error:
        golden.refuse_doubtful(golden.load(path), f"--golden {path}")
    # Without a path, the plan would be quick, which leaves out checks of correctness.
    assert str(error.value).endswith("pytest tests/test_correctness.py --record-golden=PATH")
    golden.conclude(path, None)
    golden.refuse_doubtful(golden.load(path), f"--golden {path}")
