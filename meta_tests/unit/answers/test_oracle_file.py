"""The oracle's file of `sm121 golden` is computed once and stored, and servers are compared with
it."""

import dataclasses
import json
import shutil
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path

import pytest

from sm121 import cli
from sm121.answers import (
    log_probabilities,
    mistake_pattern,
    oracle_file,
    oracle_making,
    oracle_texts,
)
from sm121.answers.log_probabilities import generation_beyond
from sm121.answers.oracle_file import OracleFile, OraclePosition, Scored
from sm121.answers.oracle_texts import ExamText
from sm121.answers.oracle_tolerance import OracleReference, computed_tolerance
from sm121.client.completion_json import Completion, Position
from sm121.client.completions import Request
from sm121.core.errors import UsageError
from sm121.core.level_settings import LogProbabilityTolerance
from sm121.core.unmet import Unmet, facts_text
from sm121.core.verdict import Inapplicable, NotRun
from sm121.oracles.formats import EXACT, Rounding
from tools import roundings

FORMATS = "lm_head=mxfp4-ceil,kv=fp8,experts=mxfp8"


@pytest.fixture(scope="module")
def tokens():
    """The token ids of shorter prompts, which make the computation shorter."""
    patch = pytest.MonkeyPatch()
    every = dict(oracle_texts.prompts())
    few = [("capitals", every["capitals"][:20]), ("languages and code", every["tool call"][:60])]
    few.append(("mixture of 300", every["mixture of 300"][:140]))
    few += [(name, every["tool call"][:n]) for name, n in (("tool call", 150), ("prose of 127", 9))]
    few.append(("mixture of 600", every["mixture of 600"][:135]))
    exam = oracle_texts.exams()["canary"]
    tokens = sorted({*range(0, 100_000, 50), *exam.token_ids}.union(*dict(few).values()))
    few = [(name, [*map(tokens.index, ids)]) for name, ids in few]
    exam = ExamText(token_ids=map(tokens.index, exam.token_ids), answers=exam.answers)
    long = ("long", dict(few)["tool call"][:130])
    patch.setattr(oracle_texts, "prompts", lambda: few)
    patch.setattr(oracle_texts, "long_prompt", lambda: long)
    patch.setattr(oracle_texts, "exams", lambda: {"canary": exam})
    patch.setattr(oracle_texts, "GENERATED", 3)
    yield tokens
    patch.undo()


@pytest.fixture(scope="module")
def checkpoint(tokens, canary_mxfp4, tmp_path_factory) -> Path:
    """The canary with only these tokens."""
    folder = tmp_path_factory.mktemp("checkpoint") / "canary"
    return roundings.with_few_tokens(canary_mxfp4, folder, tokens)


@pytest.fixture(scope="module")
def made(checkpoint) -> OracleFile:
    return oracle_making.make(checkpoint)


@pytest.fixture(scope="module")
def served(checkpoint) -> OracleFile:
    """The oracle's file for a server that rounds more than the checkpoint requires."""
    return oracle_making.make(checkpoint, Rounding.parse(FORMATS))


def wide(made: OracleFile) -> OracleFile:
    """The oracle's file with a rounding that hides every fault."""
    far = {}
    for k, of in made.rounded.items():
        far[k] = {n: [v - 9 for v in vs] for n, vs in of.items()}
    return made.model_copy(update={"rounded": far})


def test_the_oracle_file_agrees_with_the_model_in_memory(made, checkpoint):
    import torch

    from tools import small_oracle

    weights = small_oracle.load(checkpoint, torch.float64)
    for name, ids in oracle_texts.prompts()[:2]:
        scored = made.prompts[name]
        every = small_oracle.log_probabilities(weights, ids)
        right = every[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        assert scored.following == pytest.approx(right.tolist(), abs=1e-6)
        assert len(scored.places) == len(ids) and len(scored.places[0].ids) == 20
        every = small_oracle.log_probabilities(weights, [*ids, *scored.generated])[[len(ids)]]
        assert scored.generated_places[1].values[0] == pytest.approx(float(every.max()), abs=1e-6)
    assert made.dtype == "float64" and len(made.prompts["long"].generated) == 3


def test_coarser_rounding_has_a_wider_tolerance_than_bf16(made):
    bf16, w4a8 = (computed_tolerance(made, path) for path in ("bf16", "w4a8"))
    assert 0 < bf16.mean_abs < w4a8.mean_abs < 0.2
    # The difference by rounding is larger than that of any mistake.
    with pytest.raises(NotRun, match="cannot be distinguished from a right"):
        computed_tolerance(wide(made), "bf16")
    for mistake in made.mistakes.values():
        assert any(values != made.prompts[name].following for name, values in mistake.items())


@pytest.fixture
def makings(made, monkeypatch) -> list[None]:
    """A list with an entry for each computation of a file. Each computation gives the same file."""
    entries: list[None] = []
    monkeypatch.setattr(oracle_making, "make", lambda *_a, **_k: entries.append(None) or made)
    return entries


def test_it_is_made_once_for_a_checkpoint(made, makings, checkpoint, tmp_path):
    """A file that is damaged, of another release, or of a changed checkpoint is computed again."""
    linked = tmp_path / "checkpoint"
    folder = tmp_path / "kept"
    linked.mkdir()
    for file in filter(Path.is_file, checkpoint.iterdir()):
        (linked / file.name).hardlink_to(file.resolve())

    def makings_after_another_call() -> int:
        assert oracle_making.kept_or_made(linked, EXACT, folder) == made
        return len(makings)

    assert [makings_after_another_call() for _ in range(2)] == [1, 1]
    (file,) = folder.glob("*.json")
    file.write_text(file.read_text()[:-50])
    assert makings_after_another_call() == 2
    file.write_text(json.dumps(json.loads(file.read_text()) | {"prompts_digest": "other"}))
    assert makings_after_another_call() == 3
    (weights,) = linked.glob("*.safetensors")
    shutil.copyfile(weights, tmp_path / "copy").replace(weights)
    assert makings_after_another_call() == 4 and len(list(folder.glob("*.json"))) == 2


def test_a_certificate_computes_the_oracle_file_again(made, makings, checkpoint, tmp_path):
    """A certificate computes the oracle's file again.

    This also works in a container with a read-only folder, in which nothing can be stored."""
    folder = tmp_path / "kept"
    oracle_making.kept_or_made(checkpoint, EXACT, folder)
    (file,) = folder.glob("*.json")
    oracle_file.save(wide(made), file)
    assert oracle_making.kept_or_made(checkpoint, EXACT, folder) != made
    assert oracle_making.kept_or_made(checkpoint, EXACT, folder, anew=True) == made
    assert oracle_making.kept_or_made(checkpoint, EXACT, folder) == made
    (tmp_path / "file").write_text("in the way")
    assert oracle_making.kept_or_made(checkpoint, EXACT, tmp_path / "file" / "kept") == made


def test_a_file_of_another_checkpoint_or_rounding_is_refused(made, checkpoint, canary_bf16):
    oracle_file.refuse_other(made, Path("golden.json"), checkpoint)
    with pytest.raises(UsageError, match="made from another checkpoint"):
        oracle_file.refuse_other(made, Path("golden.json"), canary_bf16)
    served = made.model_copy(update={"rounding": FORMATS})
    oracle_file.refuse_other_rounding(made, EXACT)
    oracle_file.refuse_other_rounding(served, Rounding.parse(FORMATS))
    with pytest.raises(
        UsageError, match=rf"formats checkpoint, but the server rounds to {FORMATS}; make it again"
    ):
        oracle_file.refuse_other_rounding(made, Rounding.parse(FORMATS))
    with pytest.raises(UsageError, match=rf"formats {FORMATS}, but the server rounds to kv=fp8;"):
        oracle_file.refuse_other_rounding(served, Rounding.parse("kv=fp8"))


@pytest.mark.parametrize("what", ["{}", "not JSON", '{"format": 2}'])
def test_a_file_not_written_by_sm121_golden_is_refused(tmp_path, what):
    (tmp_path / "file").write_text(what)
    with pytest.raises(UsageError, match="expected a file of `sm121 golden`"):
        oracle_file.load(tmp_path / "file")


def test_the_command_makes_it(makings, checkpoint, tmp_path, capsys):
    out = tmp_path / "golden.json"
    assert cli.main(["golden", str(checkpoint), "-o", str(out)]) == 0
    assert oracle_file.load(out).checkpoint and "GiB of memory" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["golden.json"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("nowhere", "-o", "file"), id="nowhere -o file"),
        pytest.param((".", "-o", "nowhere/file"), id=". -o nowhere/file"),
        pytest.param((".", "-o", "file", "--rounding", "kv=fp4"), id=". -o file --rounding kv=fp4"),
    ],
)
def test_the_command_refuses_what_is_not_there(arguments, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(checkpoint if arguments[0] == "." else tmp_path)
    assert cli.main(["golden", *arguments]) == 4


# ------------------------------------------------------------------ Comparisons with the file

TOLERANCE = LogProbabilityTolerance(max_abs=0.4, mean_abs=0.1, likely_max_abs=0.1, source="a test")
PLACES = [
    OraclePosition(ids=[7, 9], values=[-0.3, -1.5]),
    OraclePosition(ids=[8, 7], values=[-0.1, -3]),
]
FIELDS = {"tokens": 3, "following": [-1.0, -2.0], "places": []}
RIGHT = Scored(**FIELDS, generated=[7, 8], generated_places=PLACES)


def position(token: int, value: float, **top: float) -> Position:
    named = {f"token_id:{name[1:]}": each for name, each in top.items()}
    return Position(token=f"token_id:{token}", log_probability=value, top=named)


# `judged` is the number of judged tokens.
@pytest.mark.parametrize(
    ("positions", "wrong", "judged"),
    [
        pytest.param(((7, -0.31, {"t9": -1.4}), (8, -0.1, {})), None, 2, id="its tokens"),
        pytest.param(
            ((9, -1.5, {}),),
            "the most likely token 7, got 9 (1.2 nats less likely)",
            0,
            id="an unlikely token",
        ),
        pytest.param(((5, -0.3, {}),), "at least", None, id="a strange token"),
        pytest.param(
            ((7, -0.3, {"t9": -0.9}), (8, -0.1, {})), "largest difference", None, id="a wrong value"
        ),
        pytest.param(
            ((7, -0.3, {"t4": -0.5}),),
            "a log-probability of token 4 of at most -",
            None,
            id="a wrong other",
        ),
    ],
)
def test_a_generated_answer_is_held_to_the_oracles_own(positions, wrong, judged):
    answered = [position(token, value, **top) for token, value, top in positions]
    facts, number = generation_beyond(TOLERANCE, RIGHT, [each[0] for each in positions], answered)
    assert wrong in facts_text(facts) if wrong else facts == []
    assert judged in (None, number)


def test_nothing_is_judged_behind_another_token_as_likely():
    likely = [
        OraclePosition(ids=[7, 9], values=[-0.7, -0.8]),
        OraclePosition(ids=[8, 7], values=[-0.1, -3]),
    ]
    right = RIGHT.model_copy(update={"generated_places": likely})
    answered = [position(9, -0.8), position(3, -0.1)]
    assert generation_beyond(TOLERANCE, right, [9, 3], answered) == ([], 1)


def reference(made: OracleFile, rounding: str | None) -> OracleReference:
    return OracleReference(made, "bfloat16", TOLERANCE, rounding)


class Asked:
    """A server that reports the log-probabilities of a prompt."""

    def __init__(self, values: dict[str, list[float]]) -> None:
        self.names = {tuple(ids): name for name, ids in oracle_texts.prompts()}
        self.values = values

    def ask(self, request: Request) -> Completion:
        following = tuple(self.values[self.names[request.prompt]])
        return Completion("", None, None, None, None, following, None, None)

    def need(self, value, name):
        return value


Values = dict[str, list[float]]


def with_share(right: Values, wrong: Values, share: float) -> Values:
    """Return `right` + `share` * (`wrong` - `right`)."""
    changed = dict(right)
    for prompt, values in wrong.items():
        pairs = zip(right[prompt], values, strict=True)
        changed[prompt] = [value + share * (other - value) for value, other in pairs]
    return changed


@pytest.mark.parametrize("name", oracle_texts.SMALL_MISTAKES)
def test_a_small_mistake_is_detected_or_reported_as_too_small(made, name):
    """If rounding alone could look like the fault, no decision is made, and the fault is reported
    as too small."""
    right = {prompt: scored.following for prompt, scored in made.prompts.items()}
    for rounding in (None, "bf16"):
        oracle = reference(made, rounding)
        noise = mistake_pattern.Pattern.of(made, name, rounding).noise()
        if log_probabilities._SIGMAS * noise < 0.5:
            log_probabilities.mistake_is_absent(Asked(right), oracle, name)
            for times in (1.0, 0.6, 0.4, -0.4, -0.6, -0.86):
                part = with_share(right, made.mistakes[name], times)
                words = f"between -0.5 and 0.5, got {'-' * (times < 0)}[01]"
                red = pytest.raises(AssertionError, match=words)
                with red if abs(times) > 0.5 else nullcontext():
                    log_probabilities.mistake_is_absent(Asked(part), oracle, name)
        else:
            assert rounding is not None
            with pytest.raises(NotRun, match="cannot be distinguished from rounding"):
                log_probabilities.mistake_is_absent(Asked(right), oracle, name)


@pytest.fixture(scope="module")
def canarys() -> OracleFile:
    file = files("sm121.fixtures") / "canary" / "oracle.json"
    return OracleFile.model_validate_json(file.read_text("utf-8"))


@pytest.mark.parametrize(
    ("times", "says"),
    [
        pytest.param(1.0, "", id="the-mistake-itself"),
        pytest.param(0.6, "", id="most-of-it"),
        pytest.param(-0.69, "which shows another mistake", id="against-it"),
        pytest.param(1.8, "which shows another mistake", id="more-than-it"),
        pytest.param(1.3, "which shows another mistake", id="a-little-more-than-it"),
    ],
)
def test_a_pattern_share_far_from_0_and_1_is_another_fault(canarys, times, says):
    """A share of the pattern that is far from 0 and 1 is reported as another fault.

    An injected fault of one expert's scale was once reported as a window of 129, with a share of
    -0.69."""
    name = "a sliding window of 129"
    right = {prompt: scored.following for prompt, scored in canarys.prompts.items()}
    part = with_share(right, canarys.mistakes[name], times)
    with pytest.raises(Unmet) as error:
        log_probabilities.mistake_is_absent(Asked(part), reference(canarys, None), name)
    (fact,) = error.value.facts
    assert (fact.about, fact.observed) == (name, says)
    assert fact.value == pytest.approx(times)


def test_a_pattern_share_within_the_rounding_is_this_fault(canarys, monkeypatch):
    """A share that differs from 1 by no more than the rounding still is this fault.

    Six standard deviations of 0.07 reach from 1 to 1.42."""
    monkeypatch.setattr(log_probabilities.Pattern, "noise", lambda _pattern: 0.07)
    name = "a sliding window of 129"
    right = {prompt: scored.following for prompt, scored in canarys.prompts.items()}
    part = with_share(right, canarys.mistakes[name], 1.3)
    with pytest.raises(Unmet) as error:
        log_probabilities.mistake_is_absent(Asked(part), reference(canarys, None), name)
    assert error.value.facts[0].observed == ""


def test_a_pattern_share_is_this_fault_if_the_oracle_check_passes(canarys):
    """If all values are within the tolerance, there is no evidence of another fault."""
    name = "a sliding window of 129"
    oracle = reference(canarys, None)
    wide = oracle.tolerance.model_copy(update={"max_abs": 1e9})
    right = {prompt: scored.following for prompt, scored in canarys.prompts.items()}
    part = with_share(right, canarys.mistakes[name], -0.69)
    with pytest.raises(Unmet) as error:
        log_probabilities.mistake_is_absent(
            Asked(part), dataclasses.replace(oracle, tolerance=wide), name
        )
    assert error.value.facts[0].observed == ""


def absent(file: OracleFile, others: dict[str, list[float]], way: str | None = None) -> str:
    """Check that a server has no other rounding than the file's, and return the message.

    The server's answers equal those of the file, except for the prompts in `others`."""
    right = {prompt: scored.following for prompt, scored in file.prompts.items()}
    return log_probabilities.roundings_are_absent(Asked(right | others), reference(file, way))


def test_another_rounding_is_named(made):
    others = made.mistakes["a sliding window of 127"]
    others = {"kv=checkpoint": {name: others[name] for name in oracle_texts.ROUNDING_PROMPTS}}
    served = made.model_copy(update={"rounding": "kv=fp8", "other_roundings": others})
    assert "1 other roundings are absent" in absent(served, {})
    with pytest.raises(AssertionError, match=r"rounding as kv=fp8, .* kv=checkpoint"):
        absent(served, others["kv=checkpoint"])
    with pytest.raises(NotRun, match="none of kv=checkpoint can be distinguished from rounding"):
        absent(wide(served), {}, "bf16")
    with pytest.raises(Inapplicable, match="nothing beyond the checkpoint"):
        absent(made, {})


@pytest.mark.slow("an oracle of a server that rounds more: minutes on a busy machine")
def test_each_different_rounding_is_named_with_its_part(served):
    """Each different rounding is reported with its part.

    This includes values that float32 may round differently than exact arithmetic."""
    assert {*served.other_roundings} == {
        *("lm_head=checkpoint", "lm_head=mxfp4-even", "lm_head=mxfp4-floor"),
        *("kv=checkpoint", "kv=fp8-cut", "experts=checkpoint", "experts=mxfp8-identity"),
    }
    assert "7 other roundings are absent" in absent(served, {})
    for name, other in served.other_roundings.items():
        with pytest.raises(AssertionError, match=rf"rounded as {FORMATS}, .* {name}"):
            absent(served, other)
    assert 0.0 < computed_tolerance(served, "float32").mean_abs < 0.01
    assert computed_tolerance(served, "bf16").mean_abs < 0.2


@pytest.mark.parametrize(
    ("key", "table"),
    [
        pytest.param(
            "correctness.prices",
            (
                "[[correctness.prices]]\n"
                'rounding = "kv=fp9"\n'
                'gates = [{metric = "price_kl", unit = "nats", at_most = 1, source = "this '
                'test"}]\n'
            ),
            id="correctness.prices, ((correctness.prices)) rounding =",
        ),
        pytest.param(
            "correctness.rounding",
            ('[correctness]\nrounding = "kv=fp9"\n'),
            id='correctness.rounding, (correctness) rounding = "kv=fp9"',
        ),
    ],
)
def test_a_rounding_of_a_profile_that_is_none_is_refused_at_once(run_pytest, tmp_path, key, table):
    (tmp_path / "p.toml").write_text(f'name = "p"\nextends = "cpu-tiny-gpt-oss"\n{table}')
    status, run = run_pytest("--profile", str(tmp_path / "p.toml"), "tests/test_smoke.py")
    assert status == 4 and "'kv=fp9': expected" in run.output and key in run.output, run.output
