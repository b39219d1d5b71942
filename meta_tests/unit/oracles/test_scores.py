"""The streamed oracle agrees with the oracle in memory, and continues after an interruption."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from sm121.answers.oracle_texts import SMALL_MISTAKES, prompts, with_window
from sm121.oracles import mxfp4, rounding, scores
from sm121.oracles.formats import BF16, Rounding
from sm121.oracles.rounded import rounded
from tools import roundings, small_oracle

_IDS = [ids[:n] for n, (_, ids) in zip((20, 136), prompts(), strict=False)]
#: The tokens of these texts, and some thousands more. A canary with only these tokens is faster.
TOKENS = sorted({*range(0, 100_000, 50)}.union(*_IDS))
TEXTS = [scores.Text(tuple(map(TOKENS.index, ids))) for ids in _IDS]


@pytest.fixture(scope="module")
def canary_mxfp4(canary_mxfp4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MXFP4 canary with only these tokens."""
    folder = tmp_path_factory.mktemp("mxfp4") / "canary"
    return roundings.with_few_tokens(canary_mxfp4, folder, TOKENS)


@pytest.fixture(scope="module")
def canary_bf16(canary_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The BF16 canary with only these tokens."""
    folder = tmp_path_factory.mktemp("bf16") / "canary"
    return roundings.with_few_tokens(canary_bf16, folder, TOKENS)


@pytest.mark.parametrize("twin", ["mxfp4", "bf16"])
def test_it_agrees_with_the_oracle_in_memory(twin, request):
    checkpoint: Path = request.getfixturevalue(f"canary_{twin}")
    weights = small_oracle.load(checkpoint, torch.float64)
    for text, says in zip(TEXTS, scores.score(checkpoint, TEXTS), strict=True):
        every = small_oracle.log_probabilities(weights, text.ids)
        right = every[:-1].gather(1, torch.tensor(text.ids)[1:, None])[:, 0]
        assert (says.following - right).abs().max() < 1e-9
        assert (says.top - every.topk(20, -1).values).abs().max() < 1e-9
        assert (every.gather(1, says.top_ids) - says.top).abs().max() < 1e-9


@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(
            "qkv=mxfp4-ceil,o=mxfp4-even,lm_head=mxfp4-floor,kv=fp8,experts=mxfp8",
            id="qkv=mxfp4-ceil,o=mxfp4-even,lm_head=mxfp4-floor,kv=fp8,e",
        ),
        pytest.param(
            ("qkv=fp8-channel,o=fp8-channel,lm_head=fp8-channel,kv=fp8-cut,experts=mxfp8-identity"),
            id="qkv=fp8-channel,o=fp8-channel,lm_head=fp8-channel,kv=fp8",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_any_rounding_is_the_same_in_memory_and_streamed(formats, canary_mxfp4):
    """Each rounding gives the same results in memory and streamed.

    This includes texts of a model that rounds less, and tokens that use the cache one by one."""
    exact = Rounding.parse(formats)
    ways = [exact, exact.computed_in("bf16"), BF16]
    weights = small_oracle.load(canary_mxfp4, torch.float64)
    texts = [dataclasses.replace(TEXTS[0], rounding=way, more=3) for way in ways]
    for text, says in zip(texts, scores.score(canary_mxfp4, texts), strict=True):
        model = rounded(weights, text.rounding)
        ids = torch.tensor([*text.ids, *says.generated])
        every = small_oracle.log_probabilities(model, ids.tolist())
        following = every[:-1].gather(1, ids[1:, None])[: len(text.ids) - 1, 0]
        going = every[len(text.ids) - 1 : -1].gather(1, says.generated_top_ids)
        # In BF16, another order of a sum sometimes gives the neighbouring value.
        most = 1e-8 if text.rounding.dtype == "exact" else 0.02
        assert (says.following - following).abs().max() < most
        assert (going - says.generated_top).abs().max() < most


def test_a_checkpoint_with_rounded_values_is_the_same_model(canary_bf16):
    weights = small_oracle.load(canary_bf16, torch.float64)
    served = rounded(weights, Rounding.parse("qkv=mxfp4-ceil,o=mxfp4-ceil"))
    for layer, before in zip(served.layers, weights.layers, strict=True):
        for name in "qkvo":
            values = getattr(layer, name)[0]
            other = getattr(before, name)[0]
            assert not torch.equal(values, other)
            assert torch.equal(rounding.to_mxfp4(values, mxfp4.ScaleRule.CEIL), values)
        assert layer.router is before.router
    with pytest.raises(ValueError, match="cannot become bf16: lm_head=mxfp4-ceil"):
        rounded(served, Rounding("bf16", lm_head="mxfp4-ceil"))


def test_the_streamed_oracle_continues_like_the_one_in_memory(canary_mxfp4):
    """The streamed oracle continues texts like the oracle in memory.

    The texts are longer than the sliding window, and a batch has texts of different lengths."""
    weights = small_oracle.load(canary_mxfp4, torch.float64)
    going = [dataclasses.replace(text, more=5, whole=False) for text in TEXTS[:2]]
    for text, says in zip(going, scores.score(canary_mxfp4, going), strict=True):
        at = range(len(text.ids) - 1, len(text.ids) + 4)
        every = small_oracle.log_probabilities(weights, [*text.ids, *says.generated])[list(at)]
        assert every.argmax(-1).tolist() == list(says.generated)
        assert (says.generated_top - every.topk(20, -1).values).abs().max() < 1e-9


@pytest.mark.slow("a model of its own")
def test_a_text_may_be_another_models(canary_mxfp4):
    weights = small_oracle.load(canary_mxfp4, torch.float64)
    narrow = functools.partial(with_window, shift=-28)
    texts = [TEXTS[1], dataclasses.replace(TEXTS[1], change=narrow)]
    intact, changed = scores.score(canary_mxfp4, texts)
    every = small_oracle.log_probabilities(narrow(weights), TEXTS[1].ids)
    right = every[:-1].gather(1, torch.tensor(TEXTS[1].ids)[1:, None])[:, 0]
    assert (changed.following - right).abs().max() < 1e-9
    assert (changed.following - intact.following).abs().max() > 1e-5


def test_it_goes_on_where_it_was_stopped(canary_mxfp4, tmp_path):
    states = tmp_path / "states"
    steps = []
    text = dataclasses.replace(TEXTS[0], more=2)
    whole = scores.score(
        canary_mxfp4, [text], cache=states, say=lambda n, of: steps.append((n, of))
    )
    layers = steps[-1][1] // 3
    assert [n for n, _ in steps][:layers] == list(range(1, layers + 1)) and not states.exists()

    with pytest.raises(KeyboardInterrupt):
        stop = Mock(side_effect=[None, KeyboardInterrupt])
        scores.score(canary_mxfp4, [text], cache=states, say=stop)
    again: list[int] = []
    resumed = scores.score(canary_mxfp4, [text], cache=states, say=lambda n, _: again.append(n))
    assert again[0] == 3
    assert torch.equal(resumed[0].following, whole[0].following)
    assert torch.equal(resumed[0].generated_top, whole[0].generated_top)


@pytest.mark.parametrize("what", ["texts", "dtype", "half a file"])
def test_states_of_something_else_are_not_taken(canary_mxfp4, tmp_path, what):
    folder = tmp_path / "states"
    with pytest.raises(KeyboardInterrupt):
        scores.score(canary_mxfp4, TEXTS[:1], cache=folder, say=Mock(side_effect=KeyboardInterrupt))
    texts = TEXTS[1:2] if what == "texts" else TEXTS[:1]
    dtype = torch.float32 if what == "dtype" else torch.float64
    if what == "half a file":
        states = folder / "states"
        states.write_bytes(states.read_bytes()[:-100])
    again = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        scores.score(canary_mxfp4, texts, dtype=dtype, cache=folder, say=again)
    assert again.call_args.args[0] == 1


def test_a_missing_tensor_is_named(canary_mxfp4, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text((canary_mxfp4 / "config.json").read_text())
    file = next(canary_mxfp4.glob("*.safetensors"))
    with safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    del tensors["model.layers.1.mlp.router.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.1\.mlp\.router\.bias"):
        scores.score(tmp_path, TEXTS[:1])


_DIGEST = """
import sys
from pathlib import Path
import torch
from sm121.answers.oracle_texts import SMALL_MISTAKES
from sm121.oracles import scores
texts = [scores.Text((1, 2), change=mistake.change) for mistake in SMALL_MISTAKES.values()]
for text in texts:
    print(scores._digest(Path(sys.argv[1]), [text], torch.float64, "cpu"))
"""


def test_a_stopped_computation_is_known_again_in_another_process(tmp_path):
    """A computation that was stopped is continued in another process.

    Before, the address of a function was in the digest, so nothing was ever continued."""
    (tmp_path / "config.json").write_text("{}", "utf-8")
    texts = [scores.Text((1, 2), change=mistake.change) for mistake in SMALL_MISTAKES.values()]
    here = [scores._digest(tmp_path, [text], torch.float64, "cpu") for text in texts]
    command = [sys.executable, "-c", _DIGEST, str(tmp_path)]
    there = subprocess.run(command, capture_output=True, check=True, text=True)
    assert there.stdout.split() == here
    assert len(set(here)) == 3, "one for each mistake"
