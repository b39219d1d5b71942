"""The synthetic checkpoint of real shape has the published names, formats and sizes, and contains
the canary."""

import json
import math
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest

from sm121 import cli
from sm121.checkpoint.canary_tensors import Twin, from_bf16, tensors
from sm121.oracles import mxfp4
from tools import synthetic, synthetic_weights
from tools.synthetic_weights import Synthetic

LAYER = {
    "input_layernorm.weight": ("BF16", (2880,)),
    "mlp.experts.down_proj_bias": ("BF16", (128, 2880)),
    "mlp.experts.down_proj_blocks": ("U8", (128, 2880, 90, 16)),
    "mlp.experts.down_proj_scales": ("U8", (128, 2880, 90)),
    "mlp.experts.gate_up_proj_bias": ("BF16", (128, 5760)),
    "mlp.experts.gate_up_proj_blocks": ("U8", (128, 5760, 90, 16)),
    "mlp.experts.gate_up_proj_scales": ("U8", (128, 5760, 90)),
    "mlp.router.bias": ("BF16", (128,)),
    "mlp.router.weight": ("BF16", (128, 2880)),
    "post_attention_layernorm.weight": ("BF16", (2880,)),
    "self_attn.k_proj.bias": ("BF16", (512,)),
    "self_attn.k_proj.weight": ("BF16", (512, 2880)),
    "self_attn.o_proj.bias": ("BF16", (2880,)),
    "self_attn.o_proj.weight": ("BF16", (2880, 4096)),
    "self_attn.q_proj.bias": ("BF16", (4096,)),
    "self_attn.q_proj.weight": ("BF16", (4096, 2880)),
    "self_attn.sinks": ("BF16", (64,)),
    "self_attn.v_proj.bias": ("BF16", (512,)),
    "self_attn.v_proj.weight": ("BF16", (512, 2880)),
}


def whole(layers: int = 36, shape: str = "gpt-oss-120b", twin: Twin = "mxfp4") -> Synthetic:
    return Synthetic(shape, layers, 0, twin)


def test_names_formats_and_sizes_are_the_published_ones():
    tensors = synthetic_weights.layer(whole(), 35)
    shapes = {name.removeprefix("model.layers.35."): part[:2] for name, part in tensors.items()}
    assert shapes == LAYER
    ends = {name: part[:2] for name, part in synthetic_weights.ends(whole()).items()}
    matrices = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (201088, 2880))
    sizes = {**matrices, "model.norm.weight": (2880,)}
    assert ends == {name: ("BF16", size) for name, size in sizes.items()}
    config = synthetic._config(whole())
    file = resources.files("sm121.fixtures") / "models" / "gpt-oss-120b.json"
    facts = json.loads(file.read_text("utf-8"))
    for key in facts:
        if isinstance(facts[key], int):
            assert config[key] == facts[key]


@pytest.mark.parametrize("layers", [4, 5, 6, 24, 36])
def test_the_canarys_layers_keep_their_kind(layers):
    """Layers of the canary stay in layers of the same kind: in both models, even layers have a
    sliding window."""
    layer_numbers = whole(layers).own_layers
    assert list(layer_numbers.values()) == [0, 1, 2, 3]
    for layer, n in layer_numbers.items():
        assert layer % 2 == n % 2 and layer < layers


def experts(twin: Twin, side: str, layer: int):
    part = "blocks" if twin == "mxfp4" else ""
    shape = whole(4, "gpt-oss-20b", twin)
    name = f"model.layers.{layer}.mlp.experts.{side}_proj"
    tensors = synthetic_weights.experts(shape, layer)
    if twin == "bf16":
        return next(tensors[name][2]())
    return next(tensors[f"{name}_{part}"][2]()), next(tensors[f"{name}_scales"][2]())


@pytest.mark.parametrize("side", ["gate_up", pytest.param("down", marks=pytest.mark.slow)])
def test_both_twins_hold_the_same_values(side):
    blocks, scales = experts("mxfp4", side, 1)
    values = mxfp4.dequantise(blocks.reshape(*blocks.shape[:-2], -1), scales)
    assert np.array_equal(from_bf16(experts("bf16", side, 1)).T, values)
    canary_blocks = tensors("mxfp4")[f"model.layers.1.mlp.experts.{side}_proj_blocks"].array[0]
    assert np.array_equal(blocks[: canary_blocks.shape[0], : canary_blocks.shape[1]], canary_blocks)
    assert not blocks[: canary_blocks.shape[0], canary_blocks.shape[1] :].any()


def test_two_experts_and_two_seeds_differ():
    one = whole()
    other = Synthetic("gpt-oss-120b", 36, 1, "mxfp4")
    (name,) = [n for n in synthetic_weights.experts(one, 3) if n.endswith("down_proj_blocks")]
    made = synthetic_weights.experts(one, 3)[name][2]()
    first = next(made)
    second = next(made)
    of_other = next(synthetic_weights.experts(other, 3)[name][2]())
    assert not np.array_equal(first, second) and not np.array_equal(first, of_other)
    assert np.array_equal(first, next(synthetic_weights.experts(one, 3)[name][2]()))


@pytest.mark.parametrize("rms", [3 / math.sqrt(2880), 0.0041 / (5 * math.sqrt(2880)), 1.0])
def test_random_codes_have_the_rms_that_is_wanted(rms):
    stream = np.random.PCG64(0)
    codes = synthetic_weights.bytes_of(stream, (512, 90, 16))
    scales = synthetic_weights.scales_of(stream, (512, 90), rms)
    values = mxfp4.dequantise(codes.reshape(512, -1), scales)
    assert np.sqrt(np.square(values).mean()) == pytest.approx(rms, rel=0.05)
    assert len(np.unique(scales)) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            ("--shape", "gpt-oss-20b", "--layers", "25"),
            "gpt-oss-20b has 1 to 24",
            id="--shape gpt-oss-20b --layers 25, gpt-oss-20b has 1 to 24",
        ),
        pytest.param(
            ("--shape", "gpt-oss-20b", "--layers", "0"),
            "gpt-oss-20b has 1 to 24",
            id="--shape gpt-oss-20b --layers 0, gpt-oss-20b has 1 to 24",
        ),
        pytest.param(
            ("--shape", "gpt-oss-7b"), "invalid choice", id="--shape gpt-oss-7b, invalid choice"
        ),
        # Source: model.safetensors.index.json of openai/gpt-oss-120b, and the headers of its files.
        pytest.param(
            ("--shape", "gpt-oss-20b", "--layers", "two"),
            "invalid int value",
            id="--shape gpt-oss-20b --layers two, invalid int value",
        ),
    ],
)
def test_a_wrong_request_is_one_line(tmp_path, capsys, arguments, said):
    assert cli.main(["synthetic", str(tmp_path / "c"), *arguments]) == 4
    assert said in capsys.readouterr().err and not (tmp_path / "c").exists()


def test_nothing_else_is_overwritten(tmp_path, capsys):
    (tmp_path / "mine").write_text("kept")
    assert cli.main(["synthetic", str(tmp_path), "--shape", "gpt-oss-20b"]) == 4
    assert "holds something else" in capsys.readouterr().err


def test_a_too_small_disk_is_reported_before_writing(tmp_path, capsys, monkeypatch):
    full = SimpleNamespace(free=10 << 30)
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _: full)
    assert cli.main(["synthetic", str(tmp_path / "c"), "--shape", "gpt-oss-120b"]) == 4
    assert "needs 60.8 GiB, has 10.0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
