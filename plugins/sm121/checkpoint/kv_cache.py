"""Derive the size of a model's KV cache from its config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sm121.core.errors import Sm121Error

#: The kinds of layers that cache all tokens, in ``layer_types`` and ``layers_block_type``.
_FULL = ("full_attention", "attention")
#: The kinds of layers that cache a window.
_SLIDING = ("sliding_attention", "chunked_attention")
#: The kinds of layers that have a state of a fixed size, or none.
_FIXED = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "mlp", "moe")
#: Keys of configurations whose cache this module does not support: it is compressed, has an
#: indexer, or its layers differ in another way than by their kind.
_OWN_FORM = (
    "compress_ratios", "compress_rates", "index_topk", "num_global_key_value_heads",
    "swa_num_key_value_heads", "num_kv_shared_layers", "hybrid_layer_pattern", "linear_attn_config",
    "attn_layer_period", "attn_type_list", "block_configs",
)  # fmt: skip
#: Models in which every second layer has a window, although their configurations do not say it.
_EVERY_SECOND = ("gpt_oss", "gemma2")


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one sequence."""

    #: The number of layers that cache all tokens.
    full_layers: int
    #: The number of layers that cache only a window of the last tokens.
    sliding_layers: int
    #: The number of tokens in the window of the sliding layers; 0 without such layers.
    window: int
    #: The number of cached values per token and layer, keys and values together.
    values: int

    def layer_tokens(self, depth: int) -> int:
        """Return how many cached tokens are read to generate a token, summed over all layers.

        Args:
            depth: The number of tokens before the new one.
        """
        in_window = min(depth, self.window) if self.window else depth
        return self.sliding_layers * in_window + self.full_layers * depth

    def size(self, depth: int, bits: float) -> float:
        """Return how many bytes of the cache are read to generate a token.

        Args:
            depth: The number of tokens before the new one.
            bits: The number of bits per value.
        """
        return self.layer_tokens(depth) * self.values * bits / 8

    def request_size(self, length: int, bits: float, *, batched: int, block: int) -> float:
        """Return the number of bytes that vLLM reserves for a request of a given length.

        Args:
            length: The length of the request, in tokens.
            bits: The number of bits per value.
            batched: The maximum number of tokens in a step (``--max-num-batched-tokens``). A layer
                with a window keeps this many tokens in addition to the window.
            block: The block size in tokens.
        """
        blocks = self.full_layers * math.ceil(length / block)
        if self.sliding_layers:
            kept = min(self.window - 1 + batched, length) if self.window else length
            blocks += self.sliding_layers * (math.ceil(kept / block) + 1)
        return blocks * block * self.values * bits / 8

    def growth(self, bits: float) -> float:
        """Return by how many bytes one more token enlarges the cache of a long context.

        Args:
            bits: The number of bits per value.
        """
        return self.full_layers * self.values * bits / 8


def kv_cache_of(config: Mapping[str, Any]) -> KvCache:
    """Return the KV cache of a model.

    Args:
        config: The model's config.json. Values in a ``text_config`` take precedence.

    Raises:
        Sm121Error: The configuration lacks a field, or has an unsupported kind of cache.
    """
    text = {**config, **(config.get("text_config") or {})}
    for key in _OWN_FORM:
        if text.get(key):
            raise Sm121Error(f"the size of its KV cache is unknown: config.json has {key}")
    try:
        layers = int(text["num_hidden_layers"])
        window = int(text.get("sliding_window") or text.get("attention_chunk_size") or 0)
        full, sliding = _layers(text, layers, window)
        values = _values(text)
    except KeyError as error:
        raise Sm121Error(f"the model's configuration lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise Sm121Error(
            f"the model's configuration has a value of an unknown form ({error})"
        ) from error
    return KvCache(full, sliding, window if sliding else 0, values)


def _values(text: Mapping[str, Any]) -> int:
    """Return the number of cached values per token and layer."""
    if text.get("kv_lora_rank"):  # MLA caches one compressed vector and the rotary part of the keys
        return int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    heads = int(text["num_attention_heads"])
    head_dim = text.get("head_dim") or int(text["hidden_size"]) // heads
    # Step-3.5 calls the heads of keys and values groups.
    kv_heads = text.get("num_key_value_heads") or text.get("num_attention_groups") or heads
    return 2 * int(kv_heads) * int(head_dim)


def _layers(text: Mapping[str, Any], layers: int, window: int) -> tuple[int, int]:
    """Return the number of layers that cache all tokens, and of those that cache a window."""
    for key in ("layer_types", "layers_block_type"):
        kinds = text.get(key)
        if isinstance(kinds, list):
            unknown = [kind for kind in kinds if kind not in (*_FULL, *_SLIDING, *_FIXED)]
            if unknown:
                raise Sm121Error(
                    f"the size of its KV cache is unknown: config.json has a layer {unknown[0]!r}"
                )
            return sum(map(kinds.count, _FULL)), sum(map(kinds.count, _SLIDING))
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):  # Nemotron-H: * is attention
        return pattern.count("*"), 0
    if text.get("full_attention_interval"):  # Qwen3-Next: other layers have a fixed-size state
        return layers // int(text["full_attention_interval"]), 0
    if text.get("attention_chunk_size"):  # Llama 4 also has layers without chunks
        raise Sm121Error("the size of its KV cache is unknown: config.json has no layer_types")
    if not window or text.get("use_sliding_window") is False:
        return layers, 0
    first = text.get("max_window_layers")
    if isinstance(first, int):  # Qwen2: the layers before it cache all tokens
        return min(layers, first), max(0, layers - first)
    every = 2 if text.get("model_type") in _EVERY_SECOND else text.get("sliding_window_pattern")
    full = layers // int(every) if every else 0
    return full, layers - full
