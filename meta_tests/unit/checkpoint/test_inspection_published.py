"""The sizes computed from headers agree with the published sizes of six public checkpoints."""

from collections import Counter

import pytest

from meta_tests.fakes import checkpoints
from sm121.checkpoint import inspection
from sm121.machine import roofline

_PACKED = "_blocks"


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "openai/gpt-oss-120b",
            {
                ("experts", "mxfp4"): ("layers 0 to 35", 72),
                ("attention", "bfloat16"): ("layers 0 to 35", 144),
            },
        ),
        (
            "deepseek-ai/DeepSeek-R1",
            {
                ("experts", "fp8"): ("layers 3 to 60", 58 * 256 * 3),
                ("draft", "fp8"): ("layer 61", 776),
                ("draft", "bfloat16"): ("layer 61", 4),
            },
        ),
        (
            "GLM-5.1-NVFP4",
            {
                ("experts", "nvfp4"): ("layers 3 to 77", 75 * 256 * 3),
                ("mlp", "bfloat16"): ("layers 0 to 2", 9),
                ("draft", "bfloat16"): ("layer 78", 781),
            },
        ),
        ("Meta-Llama-3-70B-Instruct-AWQ", {("mlp", "int4"): ("layers 0 to 79", 240)}),
        ("Qwen/Qwen3-8B", {("mlp", "bfloat16"): ("layers 0 to 35", 108)}),
        (
            "mistralai/Mistral-7B-Instruct-v0.2",
            {("attention", "bfloat16"): ("layers 0 to 31", 128)},
        ),
    ],
)
def test_sizes_are_the_published_ones_and_the_label_is_true(name, rows, tmp_path):
    """Sizes are the published ones, and the label is true.

    `rows` are the layers and weights of each part and format."""
    public = checkpoints.load(name)
    found = inspection.of_folder(public.write(tmp_path))
    assert found.stored.size == public.published_bytes
    assert len(found.stored.tensors) == (public.published_tensors or len(public.tensors))
    values: Counter[str] = Counter()
    for tensor in found.stored.tensors:
        # The hub counts each byte of gpt-oss's blocks as two values.
        values[tensor.dtype] += tensor.elements * (2 if tensor.name.endswith(_PACKED) else 1)
    assert values == (public.published_values or values)
    shown = {(part.name, part.format): (part.layers, part.weights) for part in found.parts}
    assert {key: shown[key] for key in rows} == rows
    assert (found.facts, found.notes) == ((), ())


def test_bytes_of_a_token_are_those_of_the_roofline(tmp_path):
    """For gpt-oss, the bytes per token computed from the tensors equal those that the roofline
    computes from config.json."""
    public = checkpoints.load("openai/gpt-oss-120b")
    found = inspection.of_folder(public.write(tmp_path))
    by_config = roofline.traffic(public.config, depth=0, formats=roofline.formats(public.config))
    vectors = sum(part.read for part in found.parts if part.format == "vectors")
    row_of_the_embedding = 2880 * 2
    assert found.read - vectors - row_of_the_embedding == by_config.total
    assert (found.used_experts, found.experts) == (4, 128)


def test_a_token_of_deepseek_r1_reads_its_published_active_parameters(tmp_path):
    """A token of DeepSeek-R1 reads 37 billion active parameters: one byte for each, and two bytes
    for those of the head."""
    public = checkpoints.load("deepseek-ai/DeepSeek-R1").with_experts(8)
    public.config["n_routed_experts"] = 8
    found = inspection.of_folder(public.write(tmp_path))
    assert found.read / 1e9 == pytest.approx(37.0, rel=0.03)


def test_a_tied_embedding_is_read_whole(tmp_path):
    public = checkpoints.load("Qwen/Qwen3-8B")
    tied = public.with_tensors(
        lambda name, entry: {} if name == "lm_head.weight" else {name: entry}
    )
    whole = inspection.of_folder(public.write(tmp_path / "untied"))
    found = inspection.of_folder(tied.write(tmp_path / "tied"))
    assert found.read == whole.read - 4096 * 2
