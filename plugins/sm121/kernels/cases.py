"""What the numerics tests are run on: one dataclass a kind of case, one group a test, rows of
fixtures/kernels/cases.toml. And what kernels are timed on. There is no torch here."""

import functools
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, ClassVar, Literal, TypeAlias

from sm121.core import architecture, errors
from sm121.core import profile as profiles
from sm121.core.profile import Profile
from sm121.kernels.protocol import Operation

Sinks = Literal["usual", "none", "high", "low", "mixed"]
"""usual: about as much weight as the keys; high and low: +30 and -30; mixed: those in turn."""


@dataclass(frozen=True)
class _Case:
    name: str
    full: bool = False
    """Only with --full-shapes, or on a GPU."""
    seed: int = 0

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class DequantiseCase(_Case):
    """Every byte with every scale (256 rows of 16 blocks), or rows of random bytes."""

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
        return "mxfp4_quantize" if self.format == "mxfp4" else "mxfp8_quantize"


@dataclass(frozen=True)
class BytesCase(_Case):
    """Blocks of 32 from raw bytes: to decode, 17 bytes a block (16 of elements, then the scales of
    all blocks); to encode, 64 bytes of bfloat16, where what is not finite counts as zero."""

    codec: Literal["mxfp4-decode", "mxfp4", "mxfp8"] = "mxfp4"
    rows: int = 0
    blocks: int = 1
    data: bytes = b""

    @property
    def operation(self) -> Operation:
        if self.codec == "mxfp4-decode":
            return "mxfp4_dequantize"
        return "mxfp4_quantize" if self.codec == "mxfp4" else "mxfp8_quantize"


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
    """A layer's experts on `tokens` tokens. routing: `random`; `one`: every token on expert 1 with
    its other places on neighbours; `blocks`: each token is zero outside one block of 32 and goes to
    one expert with the whole weight, each block to each expert several times; `skewed`: the upper
    half of the experts has no token; `last`: as `one`, on the last expert."""

    operation: ClassVar[Operation] = "fused_moe"
    tokens: int = 1
    hidden: int = 288
    intermediate: int = 352
    experts: int = 8
    top_k: int = 4
    routing: Literal["random", "one", "blocks", "skewed", "last"] = "random"
    nan_experts: bool = False
    """Experts without tokens have NaN scales and biases."""
    biases: bool = True
    readout: bool = False
    """Each hidden activation goes to one output, so that an error in a row of w1 is one there."""
    gain: float = 1.0
    """Factor of the activations: with 4, a third of them is beyond the SwiGLU limit."""
    outliers: int = 0
    """So many channels of the activations are 30 times as large."""
    below_limit: bool = False
    """Every gate is below -limit, where SwiGLU does not clamp it, and the second bias is zero: the
    output is tiny, and a clamp there makes it several times as large."""
    strided: bool = False
    gates: float | None = None
    """The bias of every gate. At -1, where SwiGLU turns, alpha is a factor of the output, and what
    a gate is rounded by is none."""
    power: int = 0
    """The first block's activations are 2^power times as large, its scales as much lower."""
    cancelling: bool = False
    """The last block takes away what the first one adds to the sums, 32 times what others do."""


@dataclass(frozen=True)
class LinearCase(_Case):
    """A dense layer [outputs, inputs] with MXFP4 weights."""

    operation: ClassVar[Operation] = "mxfp4_linear"
    tokens: int = 1
    inputs: int = 2880
    outputs: int = 5120
    cancelling: bool = False
    """As of `MoeCase`, 128 times as much."""


@dataclass(frozen=True)
class _AttentionCase(_Case):
    lengths: tuple[int, ...] = (1,)
    window: int | None = None
    sinks: Sinks = "usual"
    query_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    strided: bool = False
    kv: Literal["bfloat16", "fp8"] = "bfloat16"
    """What the cache holds."""
    power: int = 0
    """Keys and values are 2^power times as large, and queries as much smaller."""
    packed: bool = False
    """Keys and values are the halves of one tensor [..., 2 D], as in vLLM 0.32's cache."""


@dataclass(frozen=True)
class PrefillCase(_AttentionCase):
    """Sequences of these lengths, one after the other."""

    @property
    def operation(self) -> Operation:
        return "prefill_attention_fp8" if self.kv == "fp8" else "prefill_attention"


@dataclass(frozen=True)
class DecodeCase(_AttentionCase):
    """One new token for each sequence of these lengths, pages in random order."""

    block: int = 32

    @property
    def operation(self) -> Operation:
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


_KINDS: dict[str, Callable[..., Case]] = {
    "dequantise": DequantiseCase, "quantise": QuantiseCase, "route": RouteCase, "moe": MoeCase,
    "prefill": PrefillCase, "decode": DecodeCase, "linear": LinearCase,
}  # fmt: skip


def _of_row(row: dict[str, Any]) -> Case:
    kind = _KINDS[row.pop("case")]
    return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()})


_TEXT = resources.files("sm121.fixtures").joinpath("kernels/cases.toml").read_text("utf-8")
GROUPS = {group: tuple(map(_of_row, rows)) for group, rows in tomllib.loads(_TEXT).items()}
"""The cases of each numerics test of the kernel level, by the test's subject."""


def select(group: str, *, full: bool) -> tuple[Case, ...]:
    """The cases of a group; those of full size only when asked for. Raises KeyError."""
    return tuple(case for case in GROUPS[group] if full or not case.full)


MOE_TOKENS = (1, 4, 16, 64, 2048)
DEPTHS = (0, 4096, 8192, 16384, 32768)
"""Tokens before the one that is decoded, where no profile has a table of its own."""

_WINDOW = 128


@dataclass(frozen=True)
class BenchmarkCase:
    """One operation at one size; of the sizes only those count that the operation has."""

    name: str
    operation: Operation
    tokens: int = 1
    depth: int = 0
    window: int | None = None
    hidden: int = 2880
    intermediate: int = 2880
    experts: int = 128
    top_k: int = 4
    query_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    page: int = 32
    vocabulary: int = 201_088

    def __str__(self) -> str:
        return self.name

    @property
    def metric(self) -> str:
        """Its name in verdict.json: microseconds, lower is better."""
        if self.operation == "decode_attention":
            window = "" if self.window is None else "_window"
            return f"attention_decode{window}_us@d{self.depth}"
        if self.operation == "lm_head":
            return "lm_head_us"
        if self.operation != "fused_moe":
            return f"{self.operation}_{self.tokens}_us"
        return {1: "moe_decode_us", 2048: "moe_prefill_us"}.get(
            self.tokens, f"moe_{self.tokens}_tokens_us"
        )

    @property
    def sizes(self) -> str:
        """What is timed, with its sizes: what two times must share to be compared."""
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
    """The cases, at gpt-oss-120b's sizes when `full`. Reduced: a twenty-fifth of an expert's
    weights, 8 experts, a sixteenth of the vocabulary; attention and quantisation as they are."""
    cases = [BenchmarkCase(f"moe-{n}", "fused_moe", tokens=n) for n in MOE_TOKENS]
    for depth in depths:
        decode = BenchmarkCase(f"decode-{depth}", "decode_attention", depth=depth)
        cases += [decode, replace(decode, name=f"decode-window-{depth}", window=_WINDOW)]
    codecs: tuple[Operation, ...] = ("mxfp4_quantize", "mxfp8_quantize")
    for codec in codecs:
        for tokens in (1, 2048 if full else 256):
            cases.append(BenchmarkCase(f"{codec}-{tokens}", codec, tokens=tokens))
    cases.append(BenchmarkCase("lm-head", "lm_head"))
    smaller: dict[str, dict[str, Any]] = {
        "fused_moe": {"hidden": 576, "intermediate": 576, "experts": 8},
        "lm_head": {"vocabulary": 201_088 // 16},
    }
    reduced = (replace(case, **smaller.get(case.operation, {})) for case in cases)
    return tuple(cases if full else reduced)


def of_target(
    arch: str | None, profile: Profile | None, *, full_shapes: bool
) -> tuple[BenchmarkCase, ...]:
    """The cases at the depths of a profile, or of the architecture's own, or the standard ones."""
    try:
        name = profiles.for_architecture(arch or _detected() or "")
        depths = (profile or profiles.load(name)).performance.depths
    except errors.UsageError:
        depths = DEPTHS
    return select_timed(depths, full=at_full_size(full_shapes))


def at_full_size(requested: bool) -> bool:
    """Whether cases of full size are run: when asked for, and on any GPU."""
    return requested or _detected() not in ("cpu", None)


@functools.cache
def _detected() -> str | None:
    return architecture.detect().name
