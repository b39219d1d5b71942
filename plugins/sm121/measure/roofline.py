"""The highest decode rate that the memory allows: bandwidth over the bytes of a token.

Decoding one token of one stream reads every active weight and the whole KV cache in the window
once. Only speculative decoding and several streams can be faster. ``fixtures/formats.toml`` has the
bits of formats.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sm121.core import data_file, engine_arguments
from sm121.core.data_file import DataTable
from sm121.core.engine_settings import Nodes, PathValues
from sm121.core.errors import Sm121Error
from sm121.core.profile import Profile
from sm121.core.profile_fields import Gate
from sm121.engines.requantised import DENSE, served_layers
from sm121.evidence.kernel_path import KernelPath

#: Options that change what a token reads.
_OPTIONS = ("--mxfp4-layers", "--quantization-config", "--kv-cache-dtype")
_DECODE_RATE = re.compile(r"tg\d+(@d(?P<depth>\d+))?")


class _File(DataTable):
    bits: dict[str, float]
    #: By a pattern on the name of the experts' backend: multiples of the hidden, the intermediate.
    padding: dict[str, tuple[int, int]]


_FORMATS = data_file.load("formats.toml", _File)


@dataclass(frozen=True)
class Formats:
    """Bits per element of each part.

    Attributes:
        padded_to: Multiples that the experts' hidden and intermediate sizes are padded to.
    """

    experts: float
    qkv: float
    o: float
    lm_head: float
    kv: float
    padded_to: tuple[int, int] = (1, 1)


#: An element of MXFP4: 4 bits, and a scale of 8 bits for each 32 of them.
MXFP4_BITS = _FORMATS.bits["mxfp4"]
#: The smallest formats that some engine serves a model in: all weights in MXFP4, the cache in FP8.
#: A checkpoint that is not quantised may be quantised while it is loaded.
SMALLEST = Formats(MXFP4_BITS, MXFP4_BITS, MXFP4_BITS, MXFP4_BITS, kv=8.0)


@dataclass(frozen=True)
class Traffic:
    """Bytes read for one token, by part."""

    experts: float
    attention: float
    router: float
    lm_head: float
    kv: float
    #: Seconds between machines.
    link_s: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return self.experts + self.attention + self.router + self.lm_head + self.kv

    def __str__(self) -> str:
        parts = ("experts", "attention", "router", "lm_head", "kv")
        return ", ".join(f"{name} {_size(getattr(self, name))}" for name in parts)


@dataclass(frozen=True)
class Ceiling:
    """The bound of a rate, and its arithmetic."""

    traffic: Traffic
    #: What the memory was measured to give, and how much more than it allows is tolerated.
    gb_s: float
    tolerance: float

    @property
    def tok_s(self) -> float:
        """Tokens a second of one stream, without the tolerance."""
        return 1.0 / (self.traffic.total / (self.gb_s * 1e9) + self.traffic.link_s)

    def share(self, rate: float) -> float:
        """Return the share of the bound that a rate reaches."""
        return rate / self.tok_s

    def broken_by(self, rate: float) -> str | None:
        """Return why a rate is impossible, with the arithmetic; None if it is possible."""
        if rate <= self.tok_s * self.tolerance:
            return None
        return (
            f"above_roofline: {rate:.4g} tok/s x {_size(self.traffic.total)} a token "
            f"({self.traffic}) = {rate * self.traffic.total / 1e9:.4g} GB/s, and the memory was "
            f"measured to give {self.gb_s:.4g} GB/s (x {self.tolerance:g} tolerated)"
        )


def formats(config: Mapping[str, Any], dtype: str | None = None) -> Formats:
    """Return the checkpoint's own formats.

    Args:
        config: The model's config.json.
        dtype: The dtype that the engine was started with; None: the checkpoint's.
    """
    bits = _FORMATS.bits
    named = dtype if dtype in bits else str(config.get("dtype") or config.get("torch_dtype"))
    dense = bits.get(named, 16.0)
    method = (config.get("quantization_config") or {}).get("quant_method")
    experts = MXFP4_BITS if method == "mxfp4" else dense
    return Formats(experts, qkv=dense, o=dense, lm_head=dense, kv=dense)


def served(
    config: Mapping[str, Any], arguments: Sequence[str], required: PathValues, path: KernelPath
) -> Formats | None:
    """Return the formats that a server reads.

    They are those that its path shows, then those of its arguments, then those that its path must
    show, then the checkpoint's.

    Args:
        config: The model's config.json.
        arguments: The server's arguments.
        required: The required kernel path.
        path: The kernel path in the log.

    Returns:
        The formats; None if one is not known, or the server speculates: one read then gives several
        tokens.
    """
    bits, options = _FORMATS.bits, engine_arguments.read(arguments)
    asks_drafts = any(name.startswith("speculative_") for name in options)
    speculates = asks_drafts if path.speculative is None else path.speculative != "none"
    checkpoint = formats(config, path.dtype or options.get("dtype"))
    layers = served_layers(config, options, required.requantised, path)
    cache = options.get("kv_cache_dtype") or (required.kv_cache_dtype or ("auto",))[0]
    kv = {"auto": checkpoint.kv, **bits}.get(path.kv_cache_dtype or cache)
    if speculates or kv is None or layers is None or not {*layers.values()} <= {*bits}:
        return None
    moe = path.moe or options.get("moe_backend") or "|".join(required.moe or ())
    padded = (to for row, to in _FORMATS.padding.items() if re.fullmatch(row, moe, re.I))
    dense = {name: bits[layers[name]] if name in layers else checkpoint.qkv for name in DENSE}
    return Formats(checkpoint.experts, **dense, kv=kv, padded_to=next(padded, (1, 1)))


def depth_of(metric: str) -> int | None:
    """Return the depth in a decode rate of one stream; None for any other metric."""
    named = _DECODE_RATE.fullmatch(metric)
    return None if named is None else int(named["depth"] or 0)


def cost(
    own: Profile, name: str, depth: int, config: Mapping[str, Any],
    more: Sequence[str] = (), path: KernelPath | None = None,
) -> Traffic | None:  # fmt: skip
    """Return the bytes of a token in a configuration.

    Args:
        own: The profile.
        name: The name of the configuration.
        depth: Tokens before the request.
        config: The model's config.json.
        more: Further arguments.
        path: The kernel path of the server; None before a start.

    Returns:
        The bytes; None if the formats are not known.

    Raises:
        Sm121Error: The model's configuration lacks a field.
    """
    each = {**own.lacking, **own.configurations}[name]
    arguments = (*own.engine.arguments, *each.arguments, *more)
    if (layout := served(config, arguments, own.path_of(name), path or KernelPath())) is None:
        return None
    return spread(traffic(config, depth=depth, formats=layout), own.nodes, config)


def spread(read: Traffic, nodes: Nodes | None, config: Mapping[str, Any]) -> Traffic:
    """Return the bytes that each node reads for a token, and the seconds of the exchange.

    The router is on each node.

    Args:
        read: The bytes of all nodes.
        nodes: The nodes; None for one machine.
        config: The model's config.json.
    """
    if nodes is None:
        return read
    link, parts = nodes.link, ("experts", "attention", "lm_head", "kv")
    each = {name: getattr(read, name) / nodes.count for name in parts}
    exchanged = 2 * int(config["hidden_size"])  # values of two bytes
    link_s = 0.0
    if link is not None:
        link_s = link.collectives * (link.exchange_us / 1e6 + exchanged / (link.gb_s * 1e9))
    return dataclasses.replace(read, **each, link_s=link_s)


def out_of_reach(
    own: Profile, gate: Gate, read: Traffic | None, config: Mapping[str, Any], gb_s: float | None
) -> str | None:
    """Return why a server cannot reach a gate, and which configuration could.

    Args:
        own: The profile.
        gate: The gate.
        read: Bytes of a token at the gate's depth; None: not known.
        config: The model's config.json.
        gb_s: Measured bandwidth of this machine; None: the most of a healthy one.

    Returns:
        The reason; None if the gate is possible, or nothing is known.
    """
    depth, healthy = depth_of(gate.metric), own.box.healthy_gb_s if own.box is not None else None
    rate = gb_s or (healthy.high if healthy is not None else None)
    if read is None or rate is None or depth is None or gate.minimum is None:
        return None
    if (bound := Ceiling(read, rate, 1.0).tok_s) >= gate.minimum:
        return None
    names = (*own.configurations, *own.lacking)
    costs = {name: each for name in names if (each := cost(own, name, depth, config))}
    best = min(costs, key=lambda name: costs[name].total, default="")
    how = "it needs fewer bits, or speculation"
    if best and Ceiling(costs[best], rate, 1.0).tok_s >= gate.minimum:
        arguments = {**own.lacking, **own.configurations}[best].arguments
        how = (
            f"configuration {best} ({byte_options(arguments)}) reads {costs[best].total / 1e9:.2f}"
        )
    where = "on this machine" if gb_s else "on the fastest healthy machine"
    reads = f"{read.total / 1e9:.2f} GB a token: at most {bound:.3g} tok/s {where}"
    return f"{reads} ({rate:.0f} GB/s); {how}"


def byte_options(arguments: Sequence[str]) -> str:
    """Return the options that change the bytes of a token, with their values."""
    pairs = itertools.pairwise(arguments)
    return " ".join(f"{name} {value}" for name, value in pairs if name in _OPTIONS)


def traffic(config: Mapping[str, Any], *, depth: int, formats: Formats) -> Traffic:
    """Return the bytes of one token, weights with their biases.

    Args:
        config: The model's config.json.
        depth: Tokens before it.
        formats: Bits per element.

    Raises:
        Sm121Error: The configuration lacks a field.
    """
    try:
        hidden, wide = int(config["hidden_size"]), int(config["intermediate_size"])
        layers, vocabulary = int(config["num_hidden_layers"]), int(config["vocab_size"])
        heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        head = int(config["head_dim"])
        experts, chosen = int(config["num_local_experts"]), int(config["num_experts_per_tok"])
    except (KeyError, TypeError, ValueError) as error:
        raise Sm121Error(f"the model's configuration lacks {error}") from error
    window = int(config.get("sliding_window") or 0)
    kinds = config.get("layer_types")
    sliding = kinds.count("sliding_attention") if isinstance(kinds, list) else (layers + 1) // 2
    in_window = min(depth, window) if window else depth
    kv_tokens = sliding * in_window + (layers - sliding) * depth
    sizes = zip((hidden, wide), formats.padded_to, strict=True)
    rows, columns = (-(-size // multiple) * multiple for size, multiple in sizes)
    expert = (3 * columns * rows) * formats.experts / 8 + (2 * columns + rows) * 2
    queries, keys = heads * head, kv_heads * head
    projections = hidden * ((queries + 2 * keys) * formats.qkv + queries * formats.o)
    biases = (queries + 2 * keys + hidden) * 2
    return Traffic(
        experts=layers * chosen * expert,
        attention=layers * (projections / 8 + biases),
        router=layers * experts * (hidden + 1) * 2.0,
        lm_head=vocabulary * hidden * formats.lm_head / 8,
        kv=kv_tokens * 2 * keys * formats.kv / 8,
    )


def read_config(model: str) -> dict[str, Any] | None:
    """Return a model's config.json.

    Args:
        model: A checkpoint folder, or a hub id whose config.json ships with the suite.

    Returns:
        The configuration; None if neither exists.
    """
    path = Path(model) / "config.json"
    if path.is_file():
        config = json.loads(path.read_text("utf-8"))
        return dict(config) if isinstance(config, dict) else None
    shipped = files("sm121.fixtures") / "models" / f"{model.rsplit('/', 1)[-1]}.json"
    return dict(json.loads(shipped.read_text("utf-8"))) if shipped.is_file() else None


def _size(size: float) -> str:
    return f"{size / 1e9:.3f} GB" if size >= 1e8 else f"{size / 1e6:.3f} MB"
