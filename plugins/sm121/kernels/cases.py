"""What the numerics tests are run on: one dataclass a kind of case, one group a test.

No torch here: cases are counted, named and selected where there is none. Sizes are gpt-oss's own
(hidden and intermediate 2880, 64 query and 8 KV heads of 64, window 128, top-4) where a CPU can pay
for them; a reduced MoE keeps what is awkward about 2880, which is no multiple of 128.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

TOKENS = (*range(1, 17), 31, 32, 33, 127, 128, 129, 319, 320, 321)
"""Token counts at which kernels change tiles, warps or launch plans; all but 0."""

FULL_TOKENS = (1, 4, 31, 33, 129, 321, 512, 2048)

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

    rows: int = 256
    blocks: int = 16
    kind: Literal["all", "random", "nan"] = "all"


@dataclass(frozen=True)
class QuantiseCase(_Case):
    """Values [rows, 32 * blocks]: normal ones, ones on every rounding midpoint, or every
    magnitude."""

    format: Literal["mxfp4", "mxfp8"] = "mxfp4"
    rows: int = 1
    blocks: int = 90
    kind: Literal["normal", "midpoints", "magnitudes", "zeros"] = "normal"
    strided: bool = False


@dataclass(frozen=True)
class BytesCase(_Case):
    """Blocks of 32 from raw bytes: to decode, 17 bytes a block (16 of elements, then the scales of
    all blocks); to encode, 64 bytes of bfloat16, where what is not finite counts as zero."""

    codec: Literal["mxfp4-decode", "mxfp4", "mxfp8"] = "mxfp4"
    rows: int = 0
    blocks: int = 1
    data: bytes = b""


@dataclass(frozen=True)
class RouteCase(_Case):
    """Logits [tokens, experts]: normal, far from zero, all equal, or one expert ahead of all."""

    tokens: int = 1
    experts: int = 128
    top_k: int = 4
    kind: Literal["normal", "far", "equal", "dominant"] = "normal"
    strided: bool = False


@dataclass(frozen=True)
class MoeCase(_Case):
    """A layer's experts on `tokens` tokens.

    routing: `random`; `one`: every token on expert 1 with its other places on neighbours; `blocks`:
    each token is zero outside one block of 32 and goes to one expert with the whole weight, each
    block to each expert several times; `skewed`: the upper half of the experts
    has no token.
    """

    tokens: int = 1
    hidden: int = 288
    intermediate: int = 352
    experts: int = 8
    top_k: int = 4
    routing: Literal["random", "one", "blocks", "skewed"] = "random"
    nan_experts: bool = False
    """Experts without tokens have NaN scales and biases."""
    biases: bool = True
    readout: bool = False
    """The second matrix passes each hidden activation on to one output, so that an error in one row
    of the first is an error of one output and not a thousandth of all."""
    gain: float = 1.0
    """Factor of the activations: with 4, a third of them is beyond the SwiGLU limit."""
    strided: bool = False


@dataclass(frozen=True)
class PrefillCase(_Case):
    """Sequences of these lengths, one after the other."""

    lengths: tuple[int, ...] = (1,)
    window: int | None = None
    sinks: Sinks = "usual"
    query_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    strided: bool = False


@dataclass(frozen=True)
class DecodeCase(_Case):
    """One new token for each sequence of these lengths, pages in random order."""

    lengths: tuple[int, ...] = (1,)
    window: int | None = None
    sinks: Sinks = "usual"
    block: int = 32
    query_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    strided: bool = False


Case: TypeAlias = (
    DequantiseCase | QuantiseCase | BytesCase | RouteCase | MoeCase | PrefillCase | DecodeCase
)

_WINDOW = 128


def _real(case: MoeCase) -> MoeCase:
    return replace(case, hidden=2880, intermediate=2880)


def _dequantise() -> Iterable[Case]:
    yield DequantiseCase("all-codes-all-scales")
    yield DequantiseCase("nan-scales", kind="nan", rows=5, blocks=90)
    for rows in (0, 1, 33):
        yield DequantiseCase(f"rows-{rows}", rows=rows, blocks=90, kind="random")


def _quantise(form: Literal["mxfp4", "mxfp8"]) -> Iterable[Case]:
    for kind in ("midpoints", "magnitudes", "zeros"):
        yield QuantiseCase(kind, format=form, rows=16, blocks=16, kind=kind)
    for rows in (0, 1, 2, 7, 16, 33, 129, 321):
        yield QuantiseCase(f"rows-{rows}", format=form, rows=rows, seed=rows)
    yield QuantiseCase("strided", format=form, rows=33, strided=True)


def _route() -> Iterable[Case]:
    for tokens in (0, *TOKENS):
        yield RouteCase(f"tokens-{tokens}", tokens=tokens, seed=tokens)
    for kind in ("far", "equal", "dominant"):
        yield RouteCase(kind, tokens=33, kind=kind)
    yield RouteCase("32-experts", tokens=33, experts=32)
    yield RouteCase("strided", tokens=33, strided=True)


def _moe_tokens() -> Iterable[Case]:
    for tokens in (0, *TOKENS):
        yield MoeCase(f"tokens-{tokens}", tokens=tokens, seed=tokens)
    for tokens in (1, 33):
        yield _real(MoeCase(f"real-tokens-{tokens}", tokens=tokens, experts=4))
    for tokens in FULL_TOKENS:
        yield _real(MoeCase(f"full-tokens-{tokens}", full=True, tokens=tokens, experts=128))


def _moe_routing() -> Iterable[Case]:
    for tokens in (1, 33, 129):
        yield MoeCase(f"one-expert-{tokens}", tokens=tokens, routing="one", top_k=1)
    yield MoeCase("every-token-first-on-one-expert", tokens=33, routing="one")
    yield MoeCase("nan-in-experts-without-tokens", tokens=33, routing="skewed", nan_experts=True)
    yield MoeCase("nan-in-experts-one-token", tokens=1, routing="skewed", nan_experts=True)
    yield MoeCase("top-1", tokens=33, top_k=1)
    full = MoeCase("full-one-expert", full=True, tokens=512, routing="one", experts=128)
    yield _real(full)
    yield _real(replace(full, name="full-nan", tokens=33, routing="skewed", nan_experts=True))


def _moe_blocks() -> Iterable[Case]:
    down = MoeCase("down", tokens=9 * 8 * 4, routing="blocks")
    # As many hidden activations as outputs: two in one could cancel, and leave their rounding.
    gate_up = replace(down, name="gate-up", readout=True, gain=0.5, tokens=9 * 8 * 16)
    gate_up = replace(gate_up, intermediate=gate_up.hidden)
    yield from (down, gate_up)
    for case, tokens in ((down, 90 * 4), (gate_up, 90 * 16)):
        real = _real(replace(case, tokens=tokens, experts=1, top_k=1))
        yield replace(real, name=f"real-{case.name}")
        yield replace(real, name=f"full-{case.name}", full=True, tokens=tokens * 128, experts=128)


def _moe_activation() -> Iterable[Case]:
    yield MoeCase("beyond-the-limit", tokens=65, gain=4.0)
    yield MoeCase("near-zero", tokens=65, gain=0.05)
    yield MoeCase("no-biases", tokens=33, biases=False)
    yield MoeCase("strided", tokens=33, strided=True)


def _prefill() -> Iterable[Case]:
    for window in (None, _WINDOW):
        tag = "full-attention" if window is None else "window"
        for lengths in ((), (1,), (16,), (5, 0, 7), (31, 32, 33), (127, 128, 129), (321,)):
            name = "-".join(map(str, lengths)) or "0"
            yield PrefillCase(f"{tag}-{name}", lengths=lengths, window=window)
        yield PrefillCase(f"{tag}-strided", lengths=(33, 130), window=window, strided=True)
        for length in (319, 320, 2048):
            yield PrefillCase(f"{tag}-{length}", True, lengths=(length,), window=window)


def _prefill_sinks() -> Iterable[Case]:
    for sinks in ("none", "high", "low", "mixed"):
        yield PrefillCase(f"sinks-{sinks}", lengths=(7, 140), window=_WINDOW, sinks=sinks)


def _decode() -> Iterable[Case]:
    for window in (None, _WINDOW):
        tag = "full-attention" if window is None else "window"
        yield DecodeCase(f"{tag}-0", lengths=(), window=window)
        for block in (16, 32, 64, 128):
            edges = tuple(sorted({1, block - 1, block, block + 1, 2 * block + 1}))
            yield DecodeCase(f"{tag}-page-{block}", lengths=edges, window=window, block=block)
        for lengths in ((2, 127, 128, 129, 130), (1, 319, 320, 321), (640, 1, 1000)):
            name = "-".join(map(str, lengths))
            yield DecodeCase(f"{tag}-{name}", lengths=lengths, window=window)
        yield DecodeCase(f"{tag}-batch", lengths=tuple(range(1, 34)), window=window)
        yield DecodeCase(f"{tag}-strided", lengths=(33, 200), window=window, strided=True)
        for length in (4096, 32_769, 131_071):
            yield DecodeCase(f"{tag}-{length}", True, lengths=(length, 17), window=window)


def _decode_sinks() -> Iterable[Case]:
    for sinks in ("none", "high", "low", "mixed"):
        yield DecodeCase(f"sinks-{sinks}", lengths=(7, 140, 300), sinks=sinks)


def _replayed() -> Iterable[Case]:
    for tokens in (1, 33):
        yield _real(MoeCase(f"moe-{tokens}", tokens=tokens, experts=4))
        yield QuantiseCase(f"mxfp4-{tokens}", rows=tokens)
        yield QuantiseCase(f"mxfp8-{tokens}", rows=tokens, format="mxfp8")
        yield RouteCase(f"route-{tokens}", tokens=tokens)
    yield PrefillCase("prefill", lengths=(5, 130), window=_WINDOW)
    yield DecodeCase("decode", lengths=(1, 130, 300))
    yield DecodeCase("decode-window", lengths=(1, 130, 300), window=_WINDOW)


def _with_each_tactic() -> Iterable[Case]:
    for tokens in (1, 33):
        yield _real(MoeCase(f"tokens-{tokens}", tokens=tokens, experts=4))


GROUPS: dict[str, tuple[Case, ...]] = {
    "mxfp4_dequantisation": tuple(_dequantise()),
    "mxfp4_quantisation": tuple(_quantise("mxfp4")),
    "mxfp8_quantisation": tuple(_quantise("mxfp8")),
    "routing": tuple(_route()),
    "moe_token_counts": tuple(_moe_tokens()),
    "moe_routing": tuple(_moe_routing()),
    "moe_block_scales": tuple(_moe_blocks()),
    "moe_activation": tuple(_moe_activation()),
    "prefill": tuple(_prefill()),
    "prefill_sinks": tuple(_prefill_sinks()),
    "decode": tuple(_decode()),
    "decode_sinks": tuple(_decode_sinks()),
    "graph_replay": tuple(_replayed()),
    "tactics": tuple(_with_each_tactic()),
}
"""The cases of each numerics test of the kernel level, by the test's subject."""


def select(group: str, *, full: bool) -> tuple[Case, ...]:
    """The cases of a group; those of full size only when asked for. Raises KeyError."""
    return tuple(case for case in GROUPS[group] if full or not case.full)


def reseeded(case: Case, seed: int) -> Case:
    """The same case with other random values."""
    return replace(case, seed=case.seed + 1000 * seed)
