"""The upper bound of the decode rate: memory bandwidth divided by the bytes per token.

Decoding one token of one stream reads every active weight, and the KV cache within the window,
once. Only speculative decoding and several streams can be faster. ``fixtures/formats.toml`` lists
the bits per element of formats.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sm121.checkpoint import kv_cache
from sm121.core import data_file, engine_arguments
from sm121.core.data_file import DataTable
from sm121.core.engine_settings import Nodes, PathValues
from sm121.core.errors import Sm121Error
from sm121.core.profile import Profile
from sm121.core.profile_fields import Gate
from sm121.engines.requantised import DENSE, served_layers
from sm121.evidence.kernel_path import KernelPath

#: The options that change the bytes per token.
_OPTIONS = ("--mxfp4-layers", "--quantization-config", "--kv-cache-dtype")
#: The bits per element of a dtype that is not in formats.toml.
_DEFAULT_BITS = 16.0
#: The bytes per value in exchanges between nodes, in biases and in the router.
_VALUE_BYTES = 2
#: The name of a metric that is the decode rate of one stream, with its depth.
_DECODE_RATE = re.compile(r"tg\d+(@d(?P<depth>\d+))?")
#: The name of a metric that is the time per token of one stream, at depth 0.
_TOKEN_TIME = re.compile(r"tpot_p\d+")


class _File(DataTable):
    """The content of formats.toml."""

    #: The bits per element, by format.
    bits: dict[str, float]
    #: For each pattern for the name of the experts' backend, the multiples to which the backend
    #: pads the hidden and the intermediate size.
    padding: dict[str, tuple[int, int]]


_FORMATS = data_file.load("formats.toml", _File)


@dataclass(frozen=True)
class Formats:
    """The bits per element in each part of the model."""

    experts: float
    qkv: float
    o: float
    lm_head: float
    kv: float
    #: The multiples to which the experts' hidden and intermediate sizes are padded.
    padded_to: tuple[int, int] = (1, 1)


#: The bits per element in MXFP4: 4 bits, and a scale of 8 bits for each 32 elements.
MXFP4_BITS = _FORMATS.bits["mxfp4"]
#: The smallest formats in which any engine serves a model: all weights in MXFP4, the cache in FP8.
#: Even a checkpoint without quantisation may be quantised while it is loaded.
SMALLEST = Formats(
    experts=MXFP4_BITS,
    qkv=MXFP4_BITS,
    o=MXFP4_BITS,
    lm_head=MXFP4_BITS,
    kv=8.0,
)


@dataclass(frozen=True)
class Traffic:
    """The bytes that are read for one token, by part of the model."""

    experts: float
    attention: float
    router: float
    lm_head: float
    kv: float
    #: The time of exchanges between machines, in seconds per token.
    link_s: float = 0.0

    @property
    def total(self) -> float:
        """The bytes of all parts."""
        return self.experts + self.attention + self.router + self.lm_head + self.kv

    def __str__(self) -> str:
        parts = ("experts", "attention", "router", "lm_head", "kv")
        return ", ".join(f"{name} {_size(getattr(self, name))}" for name in parts)


@dataclass(frozen=True)
class Ceiling:
    """The upper bound of a decode rate, and the values from which it is computed."""

    #: The bytes per token.
    traffic: Traffic
    #: The measured bandwidth in GB/s.
    gb_s: float
    #: The factor by which a rate may exceed the bound.
    tolerance: float

    @property
    def tok_s(self) -> float:
        """The bound in tokens per second of one stream, without the tolerance."""
        return 1.0 / (self.traffic.total / (self.gb_s * 1e9) + self.traffic.link_s)

    def share(self, rate: float) -> float:
        """Return the share of the bound that a rate reaches.

        Args:
            rate: The rate in tok/s.
        """
        return rate / self.tok_s

    def broken_by(self, rate: float) -> str | None:
        """Return the reason why a rate is impossible.

        Args:
            rate: The rate in tok/s.

        Returns:
            The reason with the computation; None if the rate is possible.
        """
        if rate <= self.tok_s * self.tolerance:
            return None
        return (
            f"above_roofline: {rate:.4g} tok/s x {_size(self.traffic.total)} a token "
            f"({self.traffic}) = {rate * self.traffic.total / 1e9:.4g} GB/s, and the memory was "
            f"measured to give {self.gb_s:.4g} GB/s (x {self.tolerance:g} tolerated)"
        )


def bits_of(name: str) -> float | None:
    """Return the bits per element of a format; None if formats.toml does not list it.

    Args:
        name: The name of a format or dtype.
    """
    return _FORMATS.bits.get(name)


def formats(config: Mapping[str, Any], dtype: str | None = None) -> Formats:
    """Return the checkpoint's own formats.

    Args:
        config: The model's config.json.
        dtype: The dtype with which the engine was started; None: the checkpoint's.
    """
    bits = _FORMATS.bits
    own_dtype = str(config.get("dtype") or config.get("torch_dtype"))
    dense = bits.get(own_dtype, _DEFAULT_BITS)
    if dtype in bits:
        dense = bits[dtype]
    method = (config.get("quantization_config") or {}).get("quant_method")
    experts = MXFP4_BITS if method == "mxfp4" else dense
    return Formats(experts, qkv=dense, o=dense, lm_head=dense, kv=dense)


def served(
    config: Mapping[str, Any], arguments: Sequence[str], required: PathValues, path: KernelPath
) -> Formats | None:
    """Return the formats in which a server stores weights and KV cache.

    A format is taken from the kernel path in the log, else from the arguments, else from the
    required kernel path, else from the checkpoint.

    Args:
        config: The model's config.json.
        arguments: The server's arguments.
        required: The required kernel path.
        path: The kernel path in the log.

    Returns:
        The formats; None if one of them is unknown, or with speculative decoding, where reading the
        weights once yields several tokens.
    """
    bits = _FORMATS.bits
    options = engine_arguments.parse_options(arguments)
    if _speculates(options, path):
        return None
    checkpoint = formats(config, path.dtype or options.get("dtype"))
    cache = path.kv_cache_dtype or options.get("kv_cache_dtype")
    if not cache:
        cache = required.kv_cache_dtype[0] if required.kv_cache_dtype else "auto"
    kv = checkpoint.kv if cache == "auto" else bits.get(cache)
    layers = served_layers(config, options, required.requantised, path)
    if kv is None or layers is None or not set(layers.values()) <= bits.keys():
        return None
    dense = dict.fromkeys(DENSE, checkpoint.qkv)
    for name in DENSE:
        if name in layers:
            dense[name] = bits[layers[name]]
    moe = path.moe or options.get("moe_backend") or "|".join(required.moe or ())
    return Formats(checkpoint.experts, **dense, kv=kv, padded_to=_padding(moe))


def _speculates(options: Mapping[str, str], path: KernelPath) -> bool:
    """Return whether a server uses speculative decoding, as its path or else its options show."""
    if path.speculative is not None:
        return path.speculative != "none"
    return any(name.startswith("speculative_") for name in options)


def _padding(moe: str) -> tuple[int, int]:
    """Return the multiples to which an experts' backend pads the hidden and intermediate size."""
    for pattern, multiples in _FORMATS.padding.items():
        if re.fullmatch(pattern, moe, re.I):
            return multiples
    return 1, 1


def depth_of(metric: str) -> int | None:
    """Return the depth of a decode rate, or of a time per token.

    Args:
        metric: The name of a metric.

    Returns:
        The depth; None if the metric is neither of the two, or not of a single stream.
    """
    if _TOKEN_TIME.fullmatch(metric):
        return 0
    named = _DECODE_RATE.fullmatch(metric)
    if named is None:
        return None
    return int(named["depth"] or 0)


def converted(metric: str, value: float) -> float:
    """Convert a value of a metric into tokens per second, or tokens per second into its unit.

    Args:
        metric: The name of a decode rate (tok/s) or of a time per token (ms).
        value: A value in the metric's unit, or a rate in tok/s.
    """
    return 1e3 / value if _TOKEN_TIME.fullmatch(metric) else value


def required_rate(gate: Gate) -> float | None:
    """Return the rate that a gate requires of one stream.

    Args:
        gate: The gate.

    Returns:
        The rate in tok/s; None if the gate is not on a decode rate or a time per token.
    """
    limit = gate.at_most if gate.minimum is None else gate.minimum
    if limit is None or depth_of(gate.metric) is None:
        return None
    return converted(gate.metric, limit)


def cost(
    own: Profile,
    name: str,
    depth: int,
    config: Mapping[str, Any],
    more: Sequence[str] = (),
    path: KernelPath | None = None,
) -> Traffic | None:
    """Return the bytes per token in a configuration.

    Args:
        own: The profile.
        name: The name of the configuration.
        depth: The number of tokens in the context.
        config: The model's config.json.
        more: Further arguments of the server.
        path: The kernel path of the server; None before a start.

    Returns:
        The bytes; None if the formats are unknown, or with speculative decoding.

    Raises:
        Sm121Error: The model's configuration lacks a field, and the profile does not have the bytes
            of the model's weights.
    """
    arguments = (*own.engine.arguments, *_arguments_of(own, name), *more)
    shown = path or KernelPath()
    if own.model.reads is not None:
        if _speculates(engine_arguments.parse_options(arguments), shown):
            return None
        read = stored(own.model.reads.weights, config, depth)
    else:
        layout = served(config, arguments, own.path_of(name), shown)
        if layout is None:
            return None
        read = traffic(config, depth=depth, formats=layout)
    return spread(read, own.nodes, config)


def _arguments_of(own: Profile, name: str) -> tuple[str, ...]:
    """Return the arguments of a configuration, even if the engine does not support it."""
    if name in own.configurations:
        return own.configurations[name].arguments
    return own.lacking[name].arguments


def spread(read: Traffic, nodes: Nodes | None, config: Mapping[str, Any]) -> Traffic:
    """Return the bytes that each node reads for a token, with the time of exchanges between nodes.

    Each node reads the whole router; everything else is divided between the nodes.

    Args:
        read: The bytes that one machine would read.
        nodes: The nodes; None: one machine.
        config: The model's config.json.
    """
    if nodes is None:
        return read
    link = nodes.link
    link_s = 0.0
    if link is not None:
        exchanged = _VALUE_BYTES * int(config["hidden_size"])
        link_s = link.collectives * (link.exchange_us / 1e6 + exchanged / (link.gb_s * 1e9))
    return Traffic(
        experts=read.experts / nodes.count,
        attention=read.attention / nodes.count,
        router=read.router,
        lm_head=read.lm_head / nodes.count,
        kv=read.kv / nodes.count,
        link_s=link_s,
    )


def out_of_reach(
    own: Profile, gate: Gate, read: Traffic | None, config: Mapping[str, Any], gb_s: float | None
) -> str | None:
    """Return the reason why a server cannot reach a gate, and a configuration that could.

    Args:
        own: The profile.
        gate: The gate.
        read: The bytes per token at the gate's depth; None: unknown.
        config: The model's config.json.
        gb_s: The measured bandwidth of this machine; None: the highest of a healthy machine.

    Returns:
        The reason; None if the gate is possible, or if too little is known.
    """
    depth = depth_of(gate.metric)
    rate = gb_s
    where = "on this machine"
    if not rate:
        where = "on the fastest healthy machine"
        if own.box is not None and own.box.healthy_gb_s is not None:
            rate = own.box.healthy_gb_s.high
    required = required_rate(gate)
    if read is None or rate is None or depth is None or required is None:
        return None
    bound = Ceiling(read, rate, 1.0).tok_s
    if bound >= required:
        return None
    costs = {}
    for name in (*own.configurations, *own.lacking):
        bytes_of_token = cost(own, name, depth, config)
        if bytes_of_token is not None:
            costs[name] = bytes_of_token
    best = min(costs, key=lambda name: costs[name].total, default="")
    remedy = "it needs fewer bits, or speculation"
    if best and Ceiling(costs[best], rate, 1.0).tok_s >= required:
        options = byte_options(_arguments_of(own, best))
        remedy = f"configuration {best} ({options}) reads {costs[best].total / 1e9:.2f}"
    reads = f"{read.total / 1e9:.2f} GB a token: at most {bound:.3g} tok/s {where}"
    return f"{reads} ({rate:.0f} GB/s); {remedy}"


def byte_options(arguments: Sequence[str]) -> str:
    """Return the options that change the bytes per token, with their values.

    Args:
        arguments: The arguments of a server.
    """
    pairs = itertools.pairwise(arguments)
    return " ".join(f"{name} {value}" for name, value in pairs if name in _OPTIONS)


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a mixture-of-experts model, from its config.json."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    #: The number of experts that a token uses.
    used_experts: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "_Sizes":
        """Read the sizes. Raises Sm121Error if one is missing."""
        try:
            return cls(
                hidden=int(config["hidden_size"]),
                intermediate=int(config["intermediate_size"]),
                layers=int(config["num_hidden_layers"]),
                vocabulary=int(config["vocab_size"]),
                heads=int(config["num_attention_heads"]),
                kv_heads=int(config["num_key_value_heads"]),
                head_dim=int(config["head_dim"]),
                experts=int(config["num_local_experts"]),
                used_experts=int(config["num_experts_per_tok"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Sm121Error(f"the model's configuration lacks {error}") from error


def traffic(config: Mapping[str, Any], *, depth: int, formats: Formats) -> Traffic:
    """Return the bytes that are read for one token, including biases.

    Args:
        config: The model's config.json.
        depth: The number of tokens before it.
        formats: The bits per element.

    Raises:
        Sm121Error: The configuration lacks a field.
    """
    sizes = _Sizes.of(config)
    rows = _padded(sizes.hidden, formats.padded_to[0])
    columns = _padded(sizes.intermediate, formats.padded_to[1])
    expert = (3 * columns * rows) * formats.experts / 8 + (2 * columns + rows) * _VALUE_BYTES
    queries = sizes.heads * sizes.head_dim
    keys = sizes.kv_heads * sizes.head_dim
    projections = sizes.hidden * ((queries + 2 * keys) * formats.qkv + queries * formats.o)
    biases = (queries + 2 * keys + sizes.hidden) * _VALUE_BYTES
    return Traffic(
        experts=sizes.layers * sizes.used_experts * expert,
        attention=sizes.layers * (projections / 8 + biases),
        router=float(sizes.layers * sizes.experts * (sizes.hidden + 1) * _VALUE_BYTES),
        lm_head=sizes.vocabulary * sizes.hidden * formats.lm_head / 8,
        kv=kv_cache.kv_cache_of(config).size(depth, formats.kv),
    )


def stored(weights: float, config: Mapping[str, Any], depth: int) -> Traffic:
    """Return the bytes that are read for one token of a model of any architecture.

    Args:
        weights: The bytes of weights that a token reads, by the headers of the checkpoint.
        config: The model's config.json.
        depth: The number of tokens before it.

    Raises:
        Sm121Error: The KV cache of the model is not known.
    """
    kv = kv_cache.kv_cache_of(config).size(depth, formats(config).kv)
    return Traffic(experts=0.0, attention=weights, router=0.0, lm_head=0.0, kv=kv)


def _padded(size: int, multiple: int) -> int:
    """Return a size rounded up to a multiple."""
    return -(-size // multiple) * multiple


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
        return config if isinstance(config, dict) else None
    shipped = files("sm121.fixtures") / "models" / f"{model.rsplit('/', 1)[-1]}.json"
    if not shipped.is_file():
        return None
    return dict(json.loads(shipped.read_text("utf-8")))


def _size(size: float) -> str:
    """Format a number of bytes, in MB or GB."""
    if size >= 1e8:
        return f"{size / 1e9:.3f} GB"
    return f"{size / 1e6:.3f} MB"
