"""What kernels are timed on. No torch here: cases are named and counted where there is none."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sm121.core import architecture, errors
from sm121.core import profile as profiles
from sm121.core.profile import Profile
from sm121.kernels.protocol import Operation

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


def select(depths: Iterable[int], *, full: bool) -> tuple[BenchmarkCase, ...]:
    """The cases, at gpt-oss-120b's sizes when `full`. Reduced: a twenty-fifth of an expert's
    weights, 8 experts, a sixteenth of the vocabulary. Attention and quantisation are as they are,
    at the depths given."""
    cases = [BenchmarkCase(f"moe-{n}", "fused_moe", tokens=n) for n in MOE_TOKENS]
    for depth in depths:
        decode = BenchmarkCase(f"decode-{depth}", "decode_attention", depth=depth)
        cases += [decode, replace(decode, name=f"decode-window-{depth}", window=_WINDOW)]
    codecs: tuple[Operation, ...] = ("mxfp4_quantize", "mxfp8_quantize")
    for codec in codecs:
        for tokens in (1, 2048 if full else 256):
            cases.append(BenchmarkCase(f"{codec}-{tokens}", codec, tokens=tokens))
    cases.append(BenchmarkCase("lm-head", "lm_head"))
    return tuple(cases if full else map(_reduced, cases))


def of_target(
    arch: str | None, profile: Profile | None, *, full_shapes: bool
) -> tuple[BenchmarkCase, ...]:
    """The cases at the depths of a profile, or of the architecture's own; the standard depths where
    there is none."""
    try:
        name = profiles.for_architecture(arch or _detected() or "")
        depths = (profile or profiles.load(name)).performance.depths
    except errors.UsageError:
        depths = DEPTHS
    return select(depths, full=at_full_size(full_shapes))


def at_full_size(requested: bool) -> bool:
    """Whether cases of full size are run: when asked for, and on any GPU."""
    return requested or _detected() not in ("cpu", None)


@functools.cache
def _detected() -> str | None:
    return architecture.detect().name


def _reduced(case: BenchmarkCase) -> BenchmarkCase:
    if case.operation == "fused_moe":
        return replace(case, hidden=576, intermediate=576, experts=8)
    if case.operation == "lm_head":
        return replace(case, vocabulary=201_088 // 16)
    return case
