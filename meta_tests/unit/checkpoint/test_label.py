"""Each form of a quantisation label is read: compressed-tensors, ModelOpt, GPTQ, and exceptions."""

import json
import math

import pytest

from meta_tests.fakes import checkpoints
from sm121.checkpoint import inspection
from sm121.core.errors import Sm121Error

LINEAR = "model.layers.{}.self_attn.q_proj"
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def matrices(kind, columns):
    """Return the tensors of two layers in the given format."""
    rows = 256
    groups = math.ceil(columns / 128)
    packed = {
        "nvfp4": {
            "weight_packed": ("U8", [rows, columns // 2]),
            "weight_scale": ("F8_E4M3", [rows, columns // 16]),
            "weight_global_scale": ("F32", [1]),
        },
        "int4": {
            "weight_packed": ("I32", [rows, columns // 8]),
            "weight_scale": ("BF16", [rows, groups]),
            "weight_shape": ("I64", [2]),
        },
        "int8": {
            "weight_packed": ("I32", [rows, columns // 4]),
            "weight_scale": ("BF16", [rows, groups]),
        },
        "fp8": {"weight": ("F8_E4M3", [rows, columns]), "weight_scale": ("F32", [rows, 1])},
        "mxfp8": {"weight": ("F8_E4M3", [rows, columns]), "weight_scale": ("U8", [rows, 32])},
        "bfloat16": {"weight": ("BF16", [rows, columns])},
        "gptq": {
            "qweight": ("I32", [columns // 8, rows]),
            "scales": ("F16", [groups, rows]),
            "qzeros": ("I32", [groups, rows // 8]),
            "g_idx": ("I32", [columns]),
        },
    }[kind]
    tensors = {}
    for layer in range(2):
        for end, entry in packed.items():
            tensors[f"{LINEAR.format(layer)}.{end}"] = entry
    return tensors


def inspected(folder, kind, label, modelopt=None, columns=1024):
    folder.mkdir(exist_ok=True)
    config = {"num_hidden_layers": 2}
    if label is not None:
        config["quantization_config"] = label
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(modelopt), "utf-8")
    checkpoints.write_header(folder / "model.safetensors", matrices(kind, columns))
    return inspection.of_folder(folder)


def compressed(weights, targets=("Linear",), ignore=()):
    group = {"weights": weights, "targets": [*targets]}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": [*ignore],
    }


def two_groups(every, attention):
    """Return a label with two groups: one for all matrices, and one for the attention."""
    groups = {
        every: {"weights": FP8, "targets": ["Linear"]},
        attention: {"weights": NVFP4, "targets": ["re:.*self_attn.*"]},
    }
    return {"quant_method": "compressed-tensors", "config_groups": dict(sorted(groups.items()))}


@pytest.mark.parametrize(
    "label",
    [
        pytest.param({"ignore": 3}, id="ignore"),
        pytest.param({"config_groups": [{"weights": FP8}]}, id="config_groups"),
        pytest.param({"config_groups": {"group_0": None}}, id="group"),
        pytest.param({"quantized_layers": ["a"]}, id="quantized_layers"),
    ],
)
def test_a_label_of_another_form_is_one_line(label, tmp_path):
    with pytest.raises(Sm121Error, match=r"config\.json: expected the quantization_config of a "):
        inspected(tmp_path, "fp8", {"quant_method": "fp8", **label})


@pytest.mark.parametrize(
    ("kind", "label", "agrees"),
    [
        pytest.param("nvfp4", compressed(NVFP4), True, id="compressed-tensors NVFP4"),
        pytest.param("int4", compressed(INT4), True, id="compressed-tensors W4A16"),
        pytest.param("int8", compressed(INT8), True, id="compressed-tensors W8A16"),
        pytest.param("fp8", compressed(FP8), True, id="compressed-tensors FP8"),
        pytest.param("mxfp8", {"quant_method": "mxfp8"}, True, id="MXFP8"),
        pytest.param("fp8", compressed(NVFP4), False, id="FP8 that is called NVFP4"),
        pytest.param("int8", compressed(INT4), False, id="8 bits that are called 4"),
        pytest.param("gptq", {"quant_method": "gptq", "bits": 4}, True, id="GPTQ"),
        pytest.param("gptq", {"quant_method": "gptq", "bits": 8}, False, id="GPTQ, 8 bits"),
        pytest.param(
            "bfloat16",
            {"quant_method": "gptq", "bits": 4, "dynamic": {"lm_head": {}, "-:.*attn.*": {}}},
            True,
            id="excepted by GPTQModel's table",
        ),
        pytest.param("nvfp4", two_groups("group_0", "group_1"), True, id="all, then the attention"),
        pytest.param("nvfp4", two_groups("group_1", "group_0"), True, id="the attention, then all"),
        pytest.param("fp8", {"quant_method": "fp8", "ignore": "lm_head"}, True, id="no list"),
        pytest.param("bfloat16", None, True, id="no label"),
        pytest.param("nvfp4", None, False, id="no label, and quantised"),
        pytest.param(
            "bfloat16",
            compressed(NVFP4, ignore=["re:.*self_attn.*"]),
            True,
            id="excepted by a pattern",
        ),
        pytest.param(
            "bfloat16",
            compressed(NVFP4, ignore=[LINEAR.format(0)]),
            False,
            id="one of two layers is excepted",
        ),
        pytest.param(
            "bfloat16",
            compressed(NVFP4, targets=["re:.*mlp.*"]),
            True,
            id="other modules are targets",
        ),
    ],
)
def test_a_label_and_its_tensors(kind, label, agrees, tmp_path):
    found = inspected(tmp_path, kind, label)
    assert (found.facts == ()) is agrees, found.facts


@pytest.mark.parametrize(
    ("quantization", "agrees"),
    [
        ({"quant_algo": "FP8", "exclude_modules": ["lm_head"]}, True),
        ({"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, False),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {LINEAR.format(0): {"quant_algo": "FP8"}},
            },
            True,
        ),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {LINEAR.format(0): {"quant_algo": "NVFP4"}},
            },
            False,
        ),
    ],
)
def test_modelopt_has_a_file_of_its_own(quantization, agrees, tmp_path):
    found = inspected(tmp_path, "fp8", None, {"quantization": quantization})
    assert found.label.file == "hf_quant_config.json"
    assert (found.facts == ()) is agrees, found.facts


@pytest.mark.parametrize(
    ("kind", "values"),
    [("nvfp4", 4), ("int4", 4), ("int8", 8), ("fp8", 8), ("gptq", 4), ("bfloat16", 16)],
)
def test_values_are_counted_whatever_the_packing(kind, values, tmp_path):
    """Values are counted correctly in each packing. `values` is the number of bits of a value."""
    label = compressed({"int8": INT8, "int4": INT4}[kind]) if kind in ("int8", "int4") else None
    found = inspected(tmp_path, kind, label)
    for weight in found.weights:
        assert weight.values == 256 * 1024
        assert weight.main.size * 8 / weight.values == values


@pytest.mark.parametrize(
    ("kind", "label", "observed"),
    [
        pytest.param("nvfp4", compressed({**NVFP4, "group_size": 16}), [], id="nvfp4"),
        pytest.param("nvfp4", compressed({**NVFP4, "group_size": 32}), ["16"], id="nvfp4-32"),
        pytest.param("int4", compressed(INT4), [], id="int4"),
        pytest.param("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128}, [], id="gptq"),
        pytest.param(
            "gptq", {"quant_method": "gptq", "bits": 4, "group_size": 64}, ["128"], id="gptq-64"
        ),
        pytest.param("gptq", {"quant_method": "gptq", "bits": 4, "group_size": -1}, [], id="all"),
        pytest.param(
            "gptq",
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 64,
                "dynamic": {r"+:.*\.q_proj": {"group_size": 128}},
            },
            [],
            id="gptq-dynamic",
        ),
        pytest.param(
            "gptq",
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 64,
                "dynamic": {r"-:.*\.k_proj": {}},
            },
            ["128"],
            id="gptq-excluded",
        ),
        pytest.param(
            "gptq",
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 64,
                "extra_config": {LINEAR.format(0): {"group_size": 128}},
            },
            [],
            id="auto-round-extra_config",
        ),
    ],
)
def test_the_number_of_values_per_scale_agrees_with_the_tensors(kind, label, observed, tmp_path):
    facts = inspected(tmp_path, kind, label).facts
    found = [fact.observed for fact in facts if "values per scale" in str(fact.required)]
    assert found == [f"{number} values per scale" for number in observed]
    assert len(facts) == len(observed)


NVFP4_GROUPS = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {"weights": {**NVFP4, "group_size": 32}, "targets": ["re:.*mlp.*"]},
        "group_1": {"weights": NVFP4, "targets": ["re:.*attn.*"]},
    },
}


@pytest.mark.parametrize(
    ("kind", "label", "lines"),
    [
        pytest.param(
            "gptq",
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 64,
                "dynamic": {r"+:.*\.k_proj": {"group_size": 32}},
            },
            ["attention: 2 weights have 128 values per scale, such as "],
            id="gptq-dynamic",
        ),
        pytest.param(
            "gptq",
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 128,
                "extra_config": {"model.layers.0.mlp.up_proj": {"group_size": 32}},
            },
            [],
            id="the-size-of-the-label",
        ),
        pytest.param(
            "nvfp4",
            NVFP4_GROUPS,
            ["attention: 2 weights have 16 values per scale, such as "],
            id="several-groups",
        ),
        pytest.param("nvfp4", two_groups("group_0", "group_1"), [], id="one-group-without-a-size"),
    ],
)
def test_another_group_size_beside_exceptions_is_not_judged(kind, label, lines, tmp_path):
    found = inspected(tmp_path, kind, label)
    assert found.facts == ()
    assert len(found.unjudged) == len(lines), found.unjudged
    for line, beginning in zip(found.unjudged, lines, strict=True):
        assert line.startswith(beginning)


@pytest.mark.parametrize("columns", [64, 160])
@pytest.mark.parametrize(
    ("kind", "label"),
    [
        pytest.param("int4", compressed(INT4), id="compressed-tensors"),
        pytest.param("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128}, id="gptq"),
    ],
)
def test_the_last_scale_may_have_fewer_values(kind, label, columns, tmp_path):
    """64 and 160 values in a row have one and two scales, if a scale has at most 128 values."""
    found = inspected(tmp_path, kind, label, columns=columns)
    assert (found.facts, found.unjudged) == ((), ())
    assert {weight.format for weight in found.weights} == {"int4"}
