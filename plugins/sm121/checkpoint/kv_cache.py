"""The KV cache of a model by its config.json: layers, values of a token, tokens that are kept."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sm121.core.errors import Sm121Error

#: The kinds of layers in ``layer_types`` and ``layers_block_type``: those that keep all tokens, and
#: those that keep a window. A layer of another kind has a state of a fixed size.
_FULL = ("full_attention", "attention")
_SLIDING = ("sliding_attention", "chunked_attention")
#: Keys of configurations whose cache has a form of its own: compressed or with an indexer.
_OWN_FORM = ("compress_ratios", "compress_rates", "index_topk")


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one sequence."""

    #: The layers that keep every token.
    full_layers: int
    #: The layers that keep the last tokens.
    sliding_layers: int
    #: The tokens that those keep; 0 without them.
    window: int
    #: The values of a token in a layer, keys and values together.
    values: int

    def layer_tokens(self, depth: int) -> int:
        """Return the tokens of all layers together that a token at a depth reads.

        Args:
            depth: Tokens before it.
        """
        in_window = min(depth, self.window) if self.window else depth
        return self.sliding_layers * in_window + self.full_layers * depth

    def size(self, depth: int, bits: float) -> float:
        """Return the bytes that a token at a depth reads.

        Args:
            depth: Tokens before it.
            bits: Bits of a value.
        """
        return self.layer_tokens(depth) * self.values * bits / 8

    def request_size(self, length: int, bits: float, *, batched: int, block: int) -> float:
        """Return the bytes that vLLM reserves for a request of the longest length.

        Args:
            length: The tokens of the request.
            bits: Bits of a value.
            batched: The tokens of a step (``--max-num-batched-tokens``), which a layer with a
                window keeps beside the window.
            block: The tokens of a block.
        """
        blocks = self.full_layers * math.ceil(length / block)
        if self.sliding_layers:
            kept = min(self.window - 1 + batched, length) if self.window else length
            blocks += self.sliding_layers * (math.ceil(kept / block) + 1)
        return blocks * block * self.values * bits / 8

    def growth(self, bits: float) -> float:
        """Return the bytes of one token more in a long context.

        Args:
            bits: Bits of a value.
        """
        return self.full_layers * self.values * bits / 8


def of(config: Mapping[str, Any]) -> KvCache:
    """Return the KV cache of a model.

    Args:
        config: The model's config.json, also of one with a ``text_config``.

    Raises:
        Sm121Error: The configuration lacks a field, or the cache has a form that is not known.
    """
    text = {**config, **(config.get("text_config") or {})}
    for key in _OWN_FORM:
        if text.get(key):
            raise Sm121Error(f"its KV cache is not known: config.json has {key}")
    try:
        layers = int(text["num_hidden_layers"])
        window = int(text.get("sliding_window") or 0)
        full, sliding = _layers(text, layers, window)
        values = _values(text)
    except (KeyError, TypeError, ValueError) as error:
        raise Sm121Error(f"the model's configuration lacks {error}") from error
    return KvCache(full, sliding, window if sliding else 0, values)


def _values(text: Mapping[str, Any]) -> int:
    """Return the values of a token in a layer."""
    if text.get("kv_lora_rank"):  # MLA keeps one compressed vector and the keys' rotary part
        return int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    heads = int(text["num_attention_heads"])
    head_dim = text.get("head_dim") or int(text["hidden_size"]) // heads
    return 2 * int(text.get("num_key_value_heads") or heads) * int(head_dim)


def _layers(text: Mapping[str, Any], layers: int, window: int) -> tuple[int, int]:
    """Return how many layers keep every token, and how many keep the last ones."""
    for key in ("layer_types", "layers_block_type"):
        kinds = text.get(key)
        if isinstance(kinds, list):
            return sum(map(kinds.count, _FULL)), sum(map(kinds.count, _SLIDING))
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):  # Nemotron-H: * is attention
        return pattern.count("*"), 0
    if text.get("full_attention_interval"):  # Qwen3-Next: the others have a state
        return layers // int(text["full_attention_interval"]), 0
    if not window or text.get("use_sliding_window") is False:
        return layers, 0
    every = 2 if text.get("model_type") == "gpt_oss" else text.get("sliding_window_pattern")
    full = layers // int(every) if every else 0
    return full, layers - full
