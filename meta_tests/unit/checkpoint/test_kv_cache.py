"""The KV cache of public models is derived from their config.json, or is unknown."""

import pytest

from sm121.checkpoint.kv_cache import KvCache, kv_cache_of
from sm121.core.errors import Sm121Error

HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(
            {"model_type": "gemma2", "num_hidden_layers": 42, "sliding_window": 4096},
            KvCache(21, 21, 4096, 2048),
            id="gemma-2",
        ),
        pytest.param(
            {"num_hidden_layers": 28, "sliding_window": 4096, "max_window_layers": 21,
             "use_sliding_window": True},
            KvCache(21, 7, 4096, 2048),
            id="qwen2-with-windows",
        ),
        pytest.param(
            {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
            KvCache(1, 0, 0, 2048),
            id="qwen3-next",
        ),
        pytest.param(
            {"num_hidden_layers": 4, "num_key_value_heads": None, "num_attention_groups": 8},
            KvCache(4, 0, 0, 2048),
            id="step-3.5",
        ),
    ],
)  # fmt: skip
def test_layers_and_values_are_those_of_the_model(config, expected):
    assert kv_cache_of({**HEADS, **config}) == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({"layer_types": ["sparse_attention"] * 4}, "sparse_attention", id="a-kind"),
        pytest.param({"layers_block_type": ["mamba", "hybrid"]}, "hybrid", id="zamba2"),
        pytest.param({"num_global_key_value_heads": 4}, "num_global_key_value_heads", id="gemma-4"),
        pytest.param({"hybrid_layer_pattern": [0, 1, 1, 0]}, "hybrid_layer_pattern", id="mimo-v2"),
        pytest.param({"attn_layer_period": 8}, "attn_layer_period", id="jamba"),
        pytest.param({"attention_chunk_size": 8192}, "no layer_types", id="llama-4"),
    ],
)
def test_a_cache_of_another_form_is_unknown(config, said):
    with pytest.raises(Sm121Error, match=f"the size of its KV cache is unknown: .*{said}"):
        kv_cache_of({**HEADS, "num_hidden_layers": 4, **config})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"sliding_window": 4096, "sliding_window_pattern": "LLLG"}, "'LLLG'"),
        ({"num_hidden_layers": "four"}, "'four'"),
    ],
)
def test_a_value_that_is_no_number_is_named(config, said):
    with pytest.raises(Sm121Error, match=f"has a value of an unknown form .*{said}"):
        kv_cache_of({**HEADS, "num_hidden_layers": 4, **config})


def test_a_missing_field_is_named():
    with pytest.raises(Sm121Error, match="lacks 'num_hidden_layers'"):
        kv_cache_of(HEADS)
