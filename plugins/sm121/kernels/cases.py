"""The cases of the numerics tests, and the cases for timing kernels.

Each kind of case is a dataclass. Each test has a group of cases, which are rows of
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

#: The kinds of attention sinks. usual: a sink gets about as much softmax weight as the keys; high
#: and low: sinks of +30 and -30; mixed: extreme and usual sinks alternate.
Sinks = Literal["usual", "none", "high", "low", "mixed"]


@dataclass(frozen=True)
class _Case:
    name: str
    #: Whether the case runs only with --full-shapes or on a GPU.
    full: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class DequantiseCase(_Case):
    """MXFP4 data to decode.

    The kinds of data:

    - `all`: each byte with each scale (256 rows of 16 blocks).
    - `random`: random bytes with moderate scales.
    - `nan`: as `random`, but every seventh scale is NaN.
    """

    operation: ClassVar[Operation] = "mxfp4_dequantize"
    rows: int = 256
    blocks: int = 16
    kind: Literal["all", "random", "nan"] = "all"


@dataclass(frozen=True)
class QuantiseCase(_Case):
    """Values [rows, 32 * blocks] to quantise.

    The kinds of values:

    - `normal`: normally distributed.
    - `midpoints`: at rounding boundaries (`quantised.midpoints`).
    - `magnitudes`: each row multiplied by another power of two, from 2^-124 to 2^119.
    - `zeros`: the first block and about half of the rows are zero.
    """

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

    For decoding, a block has 17 bytes: the data has the elements of all blocks, 16 bytes each, then
    the scales of all blocks. For encoding, a block has 64 bytes of bfloat16; values that are not
    finite are replaced by zero.
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
    """Router logits [tokens, experts]: normal, far from zero, all equal, or one far larger."""

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
    - `one`: every token has expert 1 first, and the following experts after it.
    - `last`: as `one`, with the last expert first.
    - `blocks`: each token is zero outside one block of 32, and one expert has its whole routing
      weight. Each pair of block and expert occurs several times.
    - `skewed`: the upper half of the experts has no tokens.
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
    #: Whether w2 copies each hidden activation to one output, so that an error in a row of w1
    #: changes only one output.
    readout: bool = False
    #: The factor by which activations are multiplied. With 4, a third of them exceeds the SwiGLU
    #: limit.
    gain: float = 1.0
    #: The number of activation channels that are enlarged 30 times.
    outliers: int = 0
    #: Whether every gate is below -limit, where SwiGLU does not clamp it, and the second bias is
    #: zero. The correct output is tiny; a wrong clamp makes it several times as large.
    below_limit: bool = False
    strided: bool = False
    #: The bias of every gate. At -1, close to the minimum of SwiGLU over the gate, the output
    #: depends on alpha, but hardly on the rounding of the gate.
    gates: float | None = None
    #: The activations of the first block are multiplied by 2^power, and its scales are divided by
    #: 2^power.
    power: int = 0
    #: Whether the first block is enlarged 32 times, and the last block cancels it in the sums.
    cancelling: bool = False


@dataclass(frozen=True)
class LinearCase(_Case):
    """A dense layer [outputs, inputs] with MXFP4 weights."""

    operation: ClassVar[Operation] = "mxfp4_linear"
    tokens: int = 1
    inputs: int = 2880
    outputs: int = 5120
    #: As in `MoeCase`, but the first block is enlarged 128 times.
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
    #: Keys and values are multiplied by 2^power, and queries are divided by 2^power.
    power: int = 0
    #: Whether keys and values are the halves of one tensor [..., 2 D], as in vLLM 0.32's cache.
    packed: bool = False


@dataclass(frozen=True)
class PrefillCase(_AttentionCase):
    """A case of prefill attention: sequences of the given lengths, concatenated."""

    @property
    def operation(self) -> Operation:
        """The operation of the kernel provider."""
        return "prefill_attention_fp8" if self.kv == "fp8" else "prefill_attention"


@dataclass(frozen=True)
class DecodeCase(_AttentionCase):
    """A case of decode attention: one new token per sequence, with pages in random order."""

    #: The page size in tokens.
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


#: The class of each kind of case. The keys are the names of the kinds in the file.
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


#: The cases of each numerics test of the kernel level. The keys are the subjects of the tests.
GROUPS = _load_groups()


def select(group: str, *, full: bool) -> tuple[Case, ...]:
    """Return the cases of a group.

    Args:
        group: A key of `GROUPS`.
        full: Whether to include the cases that are marked as `full`.

    Raises:
        KeyError: There is no such group.
    """
    return tuple(case for case in GROUPS[group] if full or not case.full)


#: The numbers of tokens at which experts are timed: decode of 1 to 64 streams, and a prefill.
MOE_TOKENS = (1, 4, 16, 64, 2048)

#: The sliding window of gpt-oss, in tokens.
_WINDOW = 128
#: The number of tokens in the larger case of the timed quantisers.
_QUANTISED_TOKENS = 2048
#: The number of tokens in that case on a machine without a GPU.
_QUANTISED_TOKENS_REDUCED = 256
#: The vocabulary of gpt-oss.
_VOCABULARY = 201_088
#: The smaller sizes of each operation on machines without a GPU: 8 experts, each with 1/25 of the
#: weights, and 1/16 of the vocabulary. Attention keeps its full sizes.
_REDUCED: dict[str, dict[str, Any]] = {
    "fused_moe": {"hidden": 576, "intermediate": 576, "experts": 8},
    "lm_head": {"vocabulary": _VOCABULARY // 16},
}


@dataclass(frozen=True)
class BenchmarkCase:
    """One operation at one size. Each operation uses only some of the sizes."""

    name: str
    operation: Operation
    tokens: int = 1
    #: The number of tokens in the cache before the decoded one.
    depth: int = 0
    #: The number of tokens that a query attends to, itself included; None for all.
    window: int | None = None
    hidden: int = 2880
    intermediate: int = 2880
    experts: int = 128
    top_k: int = 4
    query_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    #: The page size of the cache, in tokens.
    page: int = 32
    vocabulary: int = _VOCABULARY

    def __str__(self) -> str:
        return self.name

    @property
    def metric(self) -> str:
        """The name of the time in verdict.json. The time is in microseconds; lower is better."""
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
        """The operation with its sizes. Two times with the same text are comparable."""
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
    """Return the cases for timing kernels.

    Args:
        depths: The depths for decode attention, in tokens.
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
    """Return whether cases of full size are run: on any GPU, and on a CPU if requested.

    Args:
        requested: Whether the user requested the full sizes.
    """
    return requested or _detected() not in ("cpu", None)


@functools.cache
def _detected() -> str | None:
    return architecture.detect().name
