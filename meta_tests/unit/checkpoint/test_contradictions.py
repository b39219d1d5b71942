"""A quantisation label that the tensors contradict is reported as a fact.

A label with exceptions is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meta_tests.fakes import checkpoints
from meta_tests.fakes.checkpoints import Entry, PublicCheckpoint
from sm121.checkpoint import inspection
from sm121.checkpoint.contradictions import KIND
from sm121.core.unmet import Fact

Change = Callable[[str, Entry], dict[str, Entry]]


def fp8_as_packed_fp4(name: str, entry: Entry) -> dict[str, Entry]:
    """Store the experts as DeepSeek-V4-Flash does: I8 elements with two values, and an E8M0 scale
    for 32 values."""
    if ".experts." not in name:
        return {name: entry}
    if name.endswith("_scale_inv"):
        return {}
    rows, columns = entry[1]
    scale = name.replace(".weight", ".scale")
    return {name: ("I8", [rows, columns // 2]), scale: ("F8_E8M0", [rows, columns // 32])}


def nvfp4_as_bf16(layer: int) -> Change:
    """Store the shared experts of a layer without quantisation."""

    def change(name: str, entry: Entry) -> dict[str, Entry]:
        if f".layers.{layer}.mlp.shared_experts." not in name:
            return {name: entry}
        if not name.endswith("proj.weight"):
            return {}
        rows, packed = entry[1]
        return {name: ("BF16", [rows, 2 * packed])}

    return change


def attention_in_fp8(name: str, entry: Entry) -> dict[str, Entry]:
    if not name.endswith("self_attn.o_proj.weight"):
        return {name: entry}
    return {name: ("F8_E4M3", entry[1]), f"{name}_scale": ("F32", [1])}


def small(name: str) -> PublicCheckpoint:
    """Return a public checkpoint with only a few layers and experts."""
    public = checkpoints.load(name).with_layers(5)
    public.config["num_hidden_layers"] = 5
    if "n_routed_experts" in public.config:
        public = public.with_experts(16)
        public.config["n_routed_experts"] = 16
    return public


def facts_of(
    public: PublicCheckpoint, folder: Path, change: Change | None = None, **label: Any
) -> tuple[Fact, ...]:
    """Return the facts about a changed checkpoint.

    `label` contains changed keys of its quantization_config."""
    if change is not None:
        public = public.with_tensors(change)
    own = public.config.get("quantization_config", {})
    if label:
        public.config["quantization_config"] = {**own, **label}
    return inspection.of_folder(public.write(folder)).facts


def test_says_fp8_and_the_experts_have_4_bits(tmp_path):
    found = facts_of(small("deepseek-ai/DeepSeek-R1"), tmp_path, fp8_as_packed_fp4)
    assert [(fact.about, fact.required, fact.observed) for fact in found] == [
        ("experts, layers 3 to 4", "fp8 (fp8 in config.json)", "mxfp4"),
        ("draft, layer 61", "fp8 (fp8 in config.json)", "mxfp4"),
    ]
    assert {fact.kind for fact in found} == {KIND}
    assert "model.layers.3.mlp.experts.0.gate_proj.weight I8 [2048, 3584]" in found[0].evidence


def test_a_label_with_the_format_of_the_experts_is_accepted(tmp_path):
    public = small("deepseek-ai/DeepSeek-R1")
    assert facts_of(public, tmp_path / "in label", fp8_as_packed_fp4, expert_dtype="fp4") == ()
    public = small("deepseek-ai/DeepSeek-R1")
    public.config["expert_dtype"] = "fp4"
    assert facts_of(public, tmp_path / "in config", fp8_as_packed_fp4) == ()


@pytest.mark.parametrize(
    ("name", "change", "label", "about", "required", "observed"),
    [
        pytest.param(
            "GLM-5.1-NVFP4",
            nvfp4_as_bf16(4),
            {},
            "shared experts, layer 4",
            "nvfp4",
            "bfloat16",
            id="one layer is not quantised",
        ),
        pytest.param(
            "GLM-5.1-NVFP4",
            attention_in_fp8,
            {},
            "attention, layers 0 to 4",
            "not quantised",
            "fp8",
            id="an exception is quantised",
        ),
        pytest.param(
            "GLM-5.1-NVFP4",
            None,
            {"quant_algo": "FP8"},
            "shared experts, layers 3 to 4",
            "fp8",
            "nvfp4",
            id="another algorithm",
        ),
        pytest.param(
            "GLM-5.1-NVFP4",
            None,
            {"ignore": ["lm_head", "*.self_attn*", "*.mlp.gate", "model.layers.78*"]},
            "mlp, layers 0 to 2",
            "nvfp4",
            "bfloat16",
            id="the dense layers are not excepted",
        ),
        pytest.param(
            "Meta-Llama-3-70B-Instruct-AWQ",
            None,
            {"bits": 8, "quant_method": "gptq"},
            "mlp, layers 0 to 4",
            "int8",
            "int4",
            id="8 bits",
        ),
        pytest.param(
            "Qwen/Qwen3-8B",
            None,
            {"quant_method": "fp8"},
            "mlp, layers 0 to 4",
            "fp8",
            "bfloat16",
            id="nothing is quantised",
        ),
        pytest.param(
            "Qwen/Qwen3-8B",
            attention_in_fp8,
            {},
            "attention, layers 0 to 4",
            "not quantised",
            "fp8",
            id="quantised without a label",
        ),
    ],
)
def test_a_wrong_label_is_named_with_its_layers(
    name, change, label, about, required, observed, tmp_path
):
    found = {fact.about: fact for fact in facts_of(small(name), tmp_path, change, **label)}
    assert about in found, found
    assert found[about].required.startswith(f"{required} (")
    assert found[about].observed == observed


def test_pruned_experts_contradict_the_configuration(tmp_path):
    pruned = small("GLM-5.1-NVFP4").with_experts(12)
    (fact,) = facts_of(pruned, tmp_path)
    assert (fact.about, fact.limit, fact.value) == ("experts", 16, 12)


def test_unlisted_matrices_known_to_engines_give_only_a_note(tmp_path):
    """Unquantised matrices that are known to the engines give only a note.

    DeepSeek-V4 has its compressor in BF16, and its label does not list the compressor as an
    exception."""

    def with_compressor(name: str, entry: Entry) -> dict[str, Entry]:
        if not name.endswith("self_attn.o_proj.weight"):
            return {name: entry}
        more = name.replace("o_proj", "compressor.wkv")
        return {name: entry, more: ("BF16", [1024, 7168])}

    public = small("deepseek-ai/DeepSeek-R1").with_tensors(with_compressor)
    found = inspection.of_folder(public.write(tmp_path))
    assert found.facts == ()
    assert found.notes[0] == (
        "attention: not quantised, although the declared quantisation includes them: "
        "model.layers.*.self_attn.compressor.wkv bfloat16"
    )


def test_a_method_that_no_row_describes_is_not_judged(tmp_path):
    public = small("Qwen/Qwen3-8B")
    public.config["quantization_config"] = {"quant_method": "spqr"}
    found = inspection.of_folder(public.write(tmp_path))
    assert found.facts == ()
    assert found.unjudged == (
        "the declared quantisation spqr: no row of checkpoint.toml describes it",
    )


def without_scales(kept: str = "no layer") -> Change:
    """Leave out the scales of the attention's weights, except for those of one layer."""

    def change(name: str, entry: Entry) -> dict[str, Entry]:
        is_scale = name.endswith(("_scale_inv", "_weight_scale", ".weight_scale"))
        return {} if is_scale and ".self_attn." in name and kept not in name else {name: entry}

    return change


def test_a_weight_without_the_scale_that_other_layers_have_is_wrong(tmp_path):
    found = facts_of(small("deepseek-ai/DeepSeek-R1"), tmp_path, without_scales(".layers.2."))
    assert [(fact.about, fact.observed) for fact in found] == [
        ("attention, layers 0 to 1, 3 to 4", "no scale"),
        ("draft, layer 61", "no scale"),
    ]


def test_fp8_weights_of_which_none_has_a_scale_are_not_judged(tmp_path):
    public = small("deepseek-ai/DeepSeek-R1").with_tensors(without_scales())
    found = inspection.of_folder(public.write(tmp_path))
    assert found.facts == ()
    line = next(line for line in found.unjudged if line.startswith("attention: "))
    assert line.startswith("attention: the format of 25 weights is fp8 without a known scale, ")


def packed_attention(name: str, entry: Entry) -> dict[str, Entry]:
    """Pack two values of the attention's weights in a byte, in a form that no row of the data
    describes."""
    if not name.endswith("self_attn.o_proj.weight"):
        return {name: entry}
    rows, columns = entry[1]
    return {name: ("U8", [rows, columns // 2])}


def test_a_matrix_in_an_unknown_form_is_not_judged(tmp_path):
    label = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*.mlp*", "*.[qkv]_*"]}
    public = small("Qwen/Qwen3-8B").with_tensors(packed_attention)
    public.config["quantization_config"] = label
    (line,) = inspection.of_folder(public.write(tmp_path)).unjudged
    assert line.startswith("attention: the format of 5 weights is unknown (U8), such as ")


def test_a_matrix_in_an_unknown_form_is_wrong_without_a_label(tmp_path):
    (fact,) = facts_of(small("Qwen/Qwen3-8B"), tmp_path, packed_attention)
    assert (fact.about, fact.observed) == ("attention, layers 0 to 4", "unknown (U8)")


@pytest.mark.parametrize(
    ("tensor", "entry"),
    [
        pytest.param("model.layers.{}.self_attn.bias", ("U8", [1, 1, 1024, 1024]), id="gpt-2-mask"),
        pytest.param(
            "model.layers.{}.self_attn.bias", ("BOOL", [1, 1, 64, 64]), id="gpt-neox-mask"
        ),
        pytest.param(
            "model.layers.{}.mlp.gate.tid2eid", ("I64", [1024, 6]), id="table-of-a-router"
        ),
    ],
)
@pytest.mark.parametrize("label", [{}, {"quant_method": "fp8", "ignore": ["re:.*"]}], ids=str)
def test_a_buffer_that_is_no_weight_is_not_judged(tensor, entry, label, tmp_path):
    public = small("Qwen/Qwen3-8B")
    for layer in range(5):
        public.tensors[tensor.format(layer)] = entry
    if label:
        public.config["quantization_config"] = label
    found = inspection.of_folder(public.write(tmp_path))
    assert (found.facts, found.unjudged) == ((), ())


def quantised_head(name: str, entry: Entry) -> dict[str, Entry]:
    if name != "lm_head.weight":
        return {name: entry}
    return {name: ("F8_E4M3", entry[1]), f"{name}_scale": ("F32", [1])}


@pytest.mark.parametrize("label", [{}, {"quant_method": "fp8", "ignore": ["lm_head", "re:.*"]}])
def test_an_output_matrix_is_quantised_only_if_a_label_allows_it(label, tmp_path):
    (fact,) = facts_of(small("Qwen/Qwen3-8B"), tmp_path, quantised_head, **label)
    assert (fact.about, fact.observed) == ("lm_head", "fp8")
    assert fact.required.startswith("not quantised (")


def test_a_label_that_does_not_mention_the_output_matrix_allows_both_formats(tmp_path):
    public = small("deepseek-ai/DeepSeek-R1")
    assert facts_of(public, tmp_path / "bf16") == ()
    assert facts_of(public, tmp_path / "fp8", quantised_head) == ()


def test_a_layer_without_tensors_is_missing(tmp_path):
    def change(name: str, entry: Entry) -> dict[str, Entry]:
        return {} if ".layers.2." in name else {name: entry}

    (fact,) = facts_of(small("Qwen/Qwen3-8B"), tmp_path, change)
    assert (fact.about, fact.observed) == ("layers", "none of layer 2")


@pytest.mark.parametrize(
    ("name", "about"),
    [("mlp.up_proj", "mlp, layer 2"), ("self_attn.o_proj", "attention, layer 2")],
)
def test_a_matrix_that_one_layer_lacks_is_missing(name, about, tmp_path):
    def change(tensor: str, entry: Entry) -> dict[str, Entry]:
        return {} if f".layers.2.{name}." in tensor else {tensor: entry}

    (fact,) = facts_of(small("Qwen/Qwen3-8B"), tmp_path, change)
    assert (fact.about, fact.observed) == (about, f"no {name.partition('.')[2]}")


def test_layers_may_share_keys_and_values(tmp_path):
    """In some models, layers use the keys and values of another layer, or keys as values."""

    def change(tensor: str, entry: Entry) -> dict[str, Entry]:
        shared = (".layers.2.self_attn.k_proj", ".layers.2.self_attn.v_proj")
        return {} if any(name in tensor for name in shared) else {tensor: entry}

    assert facts_of(small("Qwen/Qwen3-8B"), tmp_path, change) == ()


def test_an_expert_that_one_layer_lacks_is_missing(tmp_path):
    def change(name: str, entry: Entry) -> dict[str, Entry]:
        return {} if ".layers.3.mlp.experts.5." in name else {name: entry}

    (fact,) = facts_of(small("deepseek-ai/DeepSeek-R1"), tmp_path, change)
    assert (fact.about, fact.limit, fact.value) == ("experts", 16, 15)


FUSED = {
    "nvfp4": {"": ("U8", [16, 1024, 128]), "_weight_scale": ("F8_E4M3", [16, 1024, 16]),
              "_weight_scale_2": ("F32", [16]), "_input_scale": ("F32", [16])},
    "fp8": {"": ("F8_E4M3", [16, 1024, 256]), "_scale_inv": ("F32", [16, 8, 2])},
}  # fmt: skip


@pytest.mark.parametrize("says", ["NVFP4", "FP8", None], ids=str)
@pytest.mark.parametrize("kind", [*FUSED])
def test_experts_in_one_tensor_a_layer_are_read(kind, says, tmp_path):
    """Experts in one tensor per layer are read. The names are those of Transformers 5."""
    tensors: dict[str, Entry] = {}
    for layer in range(2):
        for end, entry in FUSED[kind].items():
            tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj{end}"] = entry
    config: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 16}
    if says is not None:
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": says}
    facts = facts_of(PublicCheckpoint("fused", config, tensors), tmp_path)
    agrees = says is not None and says.lower() == kind
    assert [fact.observed for fact in facts] == ([] if agrees else [kind])
