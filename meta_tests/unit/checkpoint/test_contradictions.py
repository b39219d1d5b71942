"""A label that its tensors contradict is a typed fact; a label with exceptions is not."""

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
    """Store the experts as DeepSeek-V4-Flash does: I8 with two values, a scale in E8M0 for 32."""
    if ".experts." not in name:
        return {name: entry}
    if name.endswith("_scale_inv"):
        return {}
    rows, columns = entry[1]
    scale = name.replace(".weight", ".scale")
    return {name: ("I8", [rows, columns // 2]), scale: ("F8_E8M0", [rows, columns // 32])}


def nvfp4_as_bf16(layer: int) -> Change:
    """Store the shared experts of a layer unquantised."""

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
    """Return a public checkpoint with few layers and experts."""
    public = checkpoints.load(name).with_layers(5)
    if "n_routed_experts" in public.config:
        public = public.with_experts(16)
        public.config["n_routed_experts"] = 16
    return public


def facts_of(
    public: PublicCheckpoint, folder: Path, change: Change | None = None, **label: Any
) -> tuple[Fact, ...]:
    """Inspect a changed checkpoint. `label`: changed keys of its quantization_config."""
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
    """DeepSeek-V4 has its compressor in BF16, and its label does not list it as an exception."""

    def with_compressor(name: str, entry: Entry) -> dict[str, Entry]:
        if not name.endswith("self_attn.o_proj.weight"):
            return {name: entry}
        more = name.replace("o_proj", "compressor.wkv")
        return {name: entry, more: ("BF16", [1024, 7168])}

    public = small("deepseek-ai/DeepSeek-R1").with_tensors(with_compressor)
    found = inspection.of_folder(public.write(tmp_path))
    assert found.facts == ()
    assert found.notes[0] == (
        "attention: the label does not except model.layers.*.self_attn.compressor.wkv bfloat16"
    )


def test_a_method_that_no_row_describes_is_not_judged(tmp_path):
    public = small("Qwen/Qwen3-8B")
    public.config["quantization_config"] = {"quant_method": "spqr"}
    found = inspection.of_folder(public.write(tmp_path))
    assert found.facts == ()
    assert found.notes == ("the label spqr is not judged: no row of checkpoint.toml describes it",)
