"""The cases of the numerics tests, and the cases that kernels are timed on.

Each kind of case is a dataclass, each test has a group of cases, and the groups are rows of
fixtures/kernels/cases.toml. This module does not import torch.
"""

import functools
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, ClassVar, Literal, TypeAlias

from sm121.core import architecture
from sm121.kernels.protocol import Operation

#: usual: about as much weight as the keys; high and low: +30 and -30; mixed: extremes and usual
#: ones in turn.
Sinks = Literal["usual", "none", "high", "low", "mixed"]


@dataclass(frozen=True)
class _Case:
    name: str
    #: Only with --full-shapes, or on a GPU.
    full: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class DequantiseCase(_Case):
    """MXFP4 to decode: every byte with every scale (256 rows of 16 blocks), or random bytes."""

    operation: ClassVar[Operation] = "mxfp4_dequantize"
    rows: int = 256
    blocks: int = 16
    kind: Literal["all", "random", "nan"] = "all"


@dataclass(frozen=True)
class QuantiseCase(_Case):
    """Values [rows, 32 * blocks]: normal, on every rounding midpoint, or every magnitude."""

    format: Literal["mxfp4", "mxfp8"] = "mxfp4"
    rows: int = 1
    blocks: int = 90
    kind: Literal["normal", "midpoints", "magnitudes", "zeros"] = "normal"
    strided: bool = False

    @property
    def operation(self) -> Operation:
        """The operation of the kernel provider."""
        return "mxfp4_quantize" if self.format == "mxfp4" else "mxfp8_quantize"


@dataclass(frozen=True)
class BytesCase(_Case):
    """Blocks of 32 from raw bytes.

    To decode, a block has 17 bytes: all elements come first, 16 bytes a block, then the scales of
    all blocks. To encode, a block has 64 bytes of bfloat16; a value that is not finite is zero.
    """

    codec: Literal["mxfp4-decode", "mxfp4", "mxfp8"] = "mxfp4"
    rows: int = 0
    blocks: int = 1
    data: bytes = b""

    @property
    def operation(self) -> Operation:
        """The operation of the kernel provider."""
        if self.codec == "mxfp4-decode":
            return "mxfp4_dequantize"
        if self.codec == "mxfp4":
            return "mxfp4_quantize"
        return "mxfp8_quantize"


@dataclass(frozen=True)
class RouteCase(_Case):
    """Logits [tokens, experts]: normal, far from zero, all equal, or one expert ahead of all."""

    operation: ClassVar[Operation] = "route"
    tokens: int = 1
    experts: int = 128
    top_k: int = 4
    kind: Literal["normal", "far", "equal", "dominant"] = "normal"
    strided: bool = False


@dataclass(frozen=True)
class MoeCase(_Case):
    """A layer's experts on `tokens` tokens.

    The kinds of routing:

    - `random`: random experts.
    - `one`: every token on expert 1, with its other places on neighbours.
    - `last`: as `one`, on the last expert.
    - `blocks`: each token is zero outside one block of 32 and goes to one expert with the whole
      weight, each block to each expert several times.
    - `skewed`: the upper half of the experts has no token.
    """

    operation: ClassVar[Operation] = "fused_moe"
    tokens: int = 1
    hidden: int = 288
    intermediate: int = 352
    experts: int = 8
    top_k: int = 4
    routing: Literal["random", "one", "blocks", "skewed", "last"] = "random"
    #: Whether experts without tokens have NaN scales and biases.
    nan_experts: bool = False
    biases: bool = True
    #: Whether each hidden activation goes to one output, so that an error in a row of w1 is an
    #: error of one output.
    readout: bool = False
    #: Factor of the activations: with 4, a third of them is beyond the SwiGLU limit.
    gain: float = 1.0
    #: The number of channels of the activations that are 30 times as large.
    outliers: int = 0
    #: Whether every gate is below -limit, where SwiGLU does not clamp it, and the second bias is
    #: zero. The output is tiny, and a clamp makes it several times as large.
    below_limit: bool = False
    strided: bool = False
    #: The bias of every gate. At -1, where SwiGLU turns, alpha is a factor of the output, and the
    #: rounding of a gate has no effect.
    gates: float | None = None
    #: The first block's activations are 2^power times as large, its scales as much lower.
    power: int = 0
    #: Whether the last block cancels the first one in the sums, 32 times as large as the others.
    cancelling: bool = False


@dataclass(frozen=True)
class LinearCase(_Case):
    """A dense layer [outputs, inputs] with MXFP4 weights."""

    operation: ClassVar[Operation] = "mxfp4_linear"
    tokens: int = 1
    inputs: int = 2880
    outputs: int = 5120
    #: As in `MoeCase`, 128 times as large as the other blocks.
    cancelling: bool = False


@dataclass(frozen=True)
class _AttentionCase(_Case):
    lengths: tuple[int, ...] = (1,)
    window: int | None = None
    sinks: Sinks = "usual"
    query_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    strided: bool = False
    #: The type of the cache's values.
    kv: Literal["bfloat16", "fp8"] = "bfloat16"
    #: Keys and values are 2^power times as large, and queries as much smaller.
    power: int = 0
    #: Whether keys and values are the halves of one tensor [..., 2 D], as in vLLM 0.32's cache.
    packed: bool = False


@dataclass(frozen=True)
class PrefillCase(_AttentionCase):
    """Sequences of these lengths, one after the other."""

    @property
    def operation(self) -> Operation:
        """The operation of the kernel provider."""
        return "prefill_attention_fp8" if self.kv == "fp8" else "prefill_attention"


@dataclass(frozen=True)
class DecodeCase(_AttentionCase):
    """One new token for each sequence of these lengths, pages in random order."""

    #: Tokens a page.
    block: int = 32

    @property
    def operation(self) -> Operation:
        """The operation of the kernel provider."""
        return "decode_attention_fp8" if self.kv == "fp8" else "decode_attention"


Case: TypeAlias = (
    DequantiseCase
    | QuantiseCase
    | BytesCase
    | RouteCase
    | MoeCase
    | PrefillCase
    | DecodeCase
    | LinearCase
)


#: The kinds of cases by their names in the file.
_KINDS: dict[str, Callable[..., Case]] = {
    "dequantise": DequantiseCase,
    "quantise": QuantiseCase,
    "route": RouteCase,
    "moe": MoeCase,
    "prefill": PrefillCase,
    "decode": DecodeCase,
    "linear": LinearCase,
}


def _case_of_row(row: dict[str, Any]) -> Case:
    fields = {}
    for key, value in row.items():
        if key != "case":
            fields[key] = tuple(value) if isinstance(value, list) else value
    return _KINDS[row["case"]](**fields)


def _load_groups() -> dict[str, tuple[Case, ...]]:
    text = resources.files("sm121.fixtures").joinpath("kernels/cases.toml").read_text("utf-8")
    groups = {}
    for group, rows in tomllib.loads(text).items():
        groups[group] = tuple(_case_of_row(row) for row in rows)
    return groups


#: The cases of each numerics test of the kernel level, by the test's subject.
GROUPS = _load_groups()


def select(group: str, *, full: bool) -> tuple[Case, ...]:
    """Return the cases of a group.

    Args:
        group: A key of `GROUPS`.
        full: Whether the cases of full size are among them.

    Raises:
        KeyError: There is no such group.
    """
    return tuple(case for case in GROUPS[group] if full or not case.full)


#: Tokens of the timed mixtures of experts: decode of one to 64 streams, and a prefill.
MOE_TOKENS = (1, 4, 16, 64, 2048)

#: The sliding window of gpt-oss, in tokens.
_WINDOW = 128
#: Tokens of the timed quantisers' larger case.
_QUANTISED_TOKENS = 2048
_QUANTISED_TOKENS_REDUCED = 256
#: The vocabulary of gpt-oss.
_VOCABULARY = 201_088
#: The sizes that differ without a GPU, by operation: a twenty-fifth of an expert's weights, 8
#: experts, a sixteenth of the vocabulary. Attention and quantisation have their full sizes.
_REDUCED: dict[str, dict[str, Any]] = {
    "fused_moe": {"hidden": 576, "intermediate": 576, "experts": 8},
    "lm_head": {"vocabulary": _VOCABULARY // 16},
}


@dataclass(frozen=True)
class BenchmarkCase:
    """One operation at one size. An operation uses only the sizes that it has."""

    name: str
    operation: Operation
    tokens: int = 1
    #: Tokens in the cache before the one that is decoded.
    depth: int = 0
    #: Tokens that a query attends to, itself included; None for all.
    window: int | None = None
    hidden: int = 2880
    intermediate: int = 2880
    experts: int = 128
    top_k: int = 4
    query_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    #: Tokens a page of the cache.
    page: int = 32
    vocabulary: int = _VOCABULARY

    def __str__(self) -> str:
        return self.name

    @property
    def metric(self) -> str:
        """The name in verdict.json; the unit is microseconds, lower is better."""
        if self.operation == "decode_attention":
            window = "" if self.window is None else "_window"
            return f"attention_decode{window}_us@d{self.depth}"
        if self.operation == "lm_head":
            return "lm_head_us"
        if self.operation != "fused_moe":
            return f"{self.operation}_{self.tokens}_us"
        if self.tokens == 1:
            return "moe_decode_us"
        if self.tokens == 2048:
            return "moe_prefill_us"
        return f"moe_{self.tokens}_tokens_us"

    @property
    def sizes(self) -> str:
        """The operation with its sizes. Two times are comparable if this is the same."""
        tokens = f"{self.operation} of {self.tokens} x {self.hidden}"
        if self.operation == "decode_attention":
            heads = f"{self.query_heads} and {self.kv_heads} heads of {self.head_dim}"
            window = "" if self.window is None else f", window {self.window}"
            return f"{self.operation} of {heads} at depth {self.depth}{window}"
        if self.operation == "lm_head":
            return f"{tokens} to {self.vocabulary}"
        if self.operation != "fused_moe":
            return tokens
        return f"{tokens} by {self.top_k} of {self.experts} experts of {self.intermediate}"


def select_timed(depths: Iterable[int], *, full: bool) -> tuple[BenchmarkCase, ...]:
    """Return the cases that kernels are timed on.

    Args:
        depths: Depths of the decode attention, in tokens.
        full: Whether the cases have gpt-oss-120b's sizes; if not, those of `_REDUCED`.
    """
    cases = [BenchmarkCase(f"moe-{n}", "fused_moe", tokens=n) for n in MOE_TOKENS]
    for depth in depths:
        decode = BenchmarkCase(f"decode-{depth}", "decode_attention", depth=depth)
        cases.append(decode)
        cases.append(replace(decode, name=f"decode-window-{depth}", window=_WINDOW))
    codecs: tuple[Operation, ...] = ("mxfp4_quantize", "mxfp8_quantize")
    many = _QUANTISED_TOKENS if full else _QUANTISED_TOKENS_REDUCED
    for codec in codecs:
        for tokens in (1, many):
            cases.append(BenchmarkCase(f"{codec}-{tokens}", codec, tokens=tokens))
    cases.append(BenchmarkCase("lm-head", "lm_head"))
    if full:
        return tuple(cases)
    return tuple(replace(case, **_REDUCED.get(case.operation, {})) for case in cases)


def at_full_size(requested: bool) -> bool:
    """Return whether cases of full size are run: if they are requested, and on any GPU.

    Args:
        requested: Whether the full sizes are selected.
    """
    return requested or _detected() not in ("cpu", None)


@functools.cache
def _detected() -> str | None:
    return architecture.detect().name
