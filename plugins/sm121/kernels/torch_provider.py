"""The provider `torch`: plain PyTorch with the roundings of a real kernel: bfloat16 where one would
store, sums in float32. Written independently of the oracle: another formula for each codec, one
softmax over tiles of keys. Its small methods are where a kernel can go wrong."""

import itertools
import math
from typing import Any, get_args

import torch
from torch import Tensor

from sm121.core.verdict import NotRun
from sm121.kernels.protocol import DecodeAttention, FusedMoe, Operation, Packed, PrefillAttention

_BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class TorchProvider:
    """Every operation, on any device. Deterministic on the CPU; FlashInfer's scale rules."""

    name = "torch"
    mxfp4_scale_rule = "ceil"
    mxfp8_scale_rule = "ceil"
    activations = "bfloat16"
    block_sizes = (16, 32, 64, 128)
    tile = 128
    """Keys that one step of the running softmax takes."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.deterministic: frozenset[str] = frozenset(get_args(Operation))
        # The others ask the device for numbers on the way: what is captured could not follow them.
        self.graphs = frozenset({"mxfp4_dequantize", "route", "lm_head"})

    def mxfp4_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.float().unflatten(-1, (-1, _BLOCK))
        scales = self.block_scales(blocks.abs().amax(-1), 6.0)
        codes = self.e2m1_codes(_times_power_of_two(blocks, 127 - scales.int())).flatten(-2)
        return self.pack(codes), scales

    def block_scales(self, amax: Tensor, largest: float) -> Tensor:
        mantissa, exponent = torch.frexp(amax / largest)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        exponent = torch.where(amax == 0, -127, exponent)
        return (exponent + 127).clamp(0, 254).to(torch.uint8)

    def e2m1_codes(self, values: Tensor) -> Tensor:
        """Nearest E2M1 codes, ties to even: the grid is 0.5 up to 2, 1 up to 4, then 2."""
        size = values.abs().clamp(max=6.0)
        low, middle, high = (size * 2).round(), size.round() + 2, (size / 2).round() + 4
        code = torch.where(size < 2, low, torch.where(size < 4, middle, high))
        return (code.to(torch.uint8) + values.signbit().to(torch.uint8) * 8).to(torch.uint8)

    def pack(self, codes: Tensor) -> Tensor:
        return codes[..., 0::2] | (codes[..., 1::2] << 4)

    def mxfp4_dequantize(self, packed: Tensor, scales: Tensor) -> Tensor:
        values = torch.tensor(_E2M1, device=packed.device)
        pairs = torch.cartesian_prod(torch.cat((values, -values)), torch.cat((values, -values)))
        elements = self.order_nibbles(pairs)[packed.int()].flatten(-2)
        blocks = elements.unflatten(-1, (-1, _BLOCK))
        return (blocks * self.scale_values(scales)[..., None]).flatten(-2)

    def order_nibbles(self, pairs: Tensor) -> Tensor:
        """[256, 2] of (high, low) nibble to (even, odd) element."""
        return pairs.flip(-1)

    def scale_values(self, scales: Tensor) -> Tensor:
        powers = _times_power_of_two(
            torch.ones_like(scales, dtype=torch.float32), scales.int() - 127
        )
        return torch.where(scales == 0xFF, torch.nan, powers)

    def mxfp8_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.float().unflatten(-1, (-1, _BLOCK))
        scales = self.block_scales(blocks.abs().amax(-1), 448.0)
        return self.e4m3(_times_power_of_two(blocks, 127 - scales.int()).flatten(-2)), scales

    def e4m3(self, values: Tensor) -> Tensor:
        return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    def route(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        top, experts = torch.topk(logits.float(), k, -1)
        shares = (top - top[:, :1]).exp()
        return shares / shares.sum(-1, keepdim=True), experts.int()

    def fused_moe(self, *arguments: Any, **keywords: Any) -> Tensor:
        x, weights, ids, w1, w1_bias, w2, w2_bias, alpha, limit = FusedMoe(*arguments, **keywords)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in range(len(w1[0])):
            share = torch.where(ids == e, weights, 0.0).sum(-1)
            tokens = (ids == e).any(-1).nonzero()[:, 0]
            if not len(tokens):
                continue
            t = self.linear(x[tokens], self.expert(w1, e), w1_bias, e)
            h = self.activation(t, alpha, limit).to(x.dtype)
            y = self.linear(h, self.expert(w2, e), w2_bias, e)
            total[tokens] += y * self.share(share[tokens])[:, None]
        out.copy_(total)
        return out

    def expert(self, weights: Packed, e: int) -> Tensor:
        return self.mxfp4_dequantize(weights[0][e], weights[1][e]).to(torch.bfloat16)

    def linear(self, x: Tensor, matrix: Tensor, bias: Tensor | None, e: int) -> Tensor:
        y = x.float() @ matrix.float().T
        return y if bias is None else y + bias[e].float()

    def share(self, share: Tensor) -> Tensor:
        return share

    def activation(self, t: Tensor, alpha: float, limit: float) -> Tensor:
        """The clamped SwiGLU, t [n, 2I] interleaved -> [n, I]."""
        gate, up = t[:, 0::2].clamp(max=limit), t[:, 1::2].clamp(-limit, limit)
        return gate / (1 + torch.exp(-alpha * gate)) * (up + 1)

    def prefill_attention(self, *arguments: Any, **keywords: Any) -> Tensor:
        q, k, v, edges, sinks, window, scale = PrefillAttention(*arguments, **keywords)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for start, end in itertools.pairwise(edges.tolist()):
            positions = torch.arange(end - start, device=q.device)
            out[start:end] = self.attend(
                q[start:end], k[start:end], v[start:end], positions, sinks, window, scale
            )
        return out

    def decode_attention(self, *arguments: Any, **keywords: Any) -> Tensor:
        q, kv_cache, table, lengths, sinks, window, scale = DecodeAttention(*arguments, **keywords)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for b, length in enumerate(lengths.tolist()):
            k, v = self.read_pages(kv_cache, table[b], length)
            last = torch.tensor([length - 1], device=q.device)
            out[b] = self.attend(q[b : b + 1], k, v, last, sinks, window, scale)[0]
        return out

    def prefill_attention_fp8(self, *arguments: Any, **keywords: Any) -> Tensor:
        q, k, v, *rest = arguments
        return self.prefill_attention(q, self.cached(k), self.cached(v), *rest, **keywords)

    def decode_attention_fp8(self, *arguments: Any, **keywords: Any) -> Tensor:
        q, kv_cache, *rest = arguments
        return self.decode_attention(q, self.cached(kv_cache), *rest, **keywords)

    def cached(self, values: Tensor) -> Tensor:
        """What an FP8 cache gives back of keys or values."""
        return self.e4m3(values.float()).to(values.dtype)

    def read_pages(self, kv_cache: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, Hkv, D] of one sequence."""
        at = torch.arange(length, device=kv_cache.device)
        block = kv_cache.shape[3]
        page, offset = pages.long()[at // block], at % block
        return kv_cache[page, 0, :, offset], kv_cache[page, 1, :, offset]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        sinks: Tensor | None,
        window: int | None,
        scale: float,
    ) -> Tensor:
        heads = self.kv_heads(q.shape[1], k.shape[1], q.device)
        query = q.float().transpose(0, 1)
        highest, total = self.start(query, sinks)
        o = torch.zeros_like(query)
        for start in range(0, len(k), self.tile):
            span = slice(start, min(start + self.tile, len(k)))
            key, value = (part[span][:, heads].float().transpose(0, 1) for part in (k, v))
            at = torch.arange(span.start, span.stop, device=q.device)
            scores = (query @ key.transpose(1, 2)) * self.score_scale(scale)
            scores = scores.masked_fill(~self.visible(positions, at, window), -math.inf)
            maximum = torch.maximum(highest, scores.amax(-1, keepdim=True))
            # No key of a tile may be visible: exp(-inf - -inf) would be NaN.
            safe = torch.where(maximum.isinf(), 0.0, maximum)
            shares = (scores - safe).exp()
            decay = (highest - safe).exp()
            total = total * decay + shares.sum(-1, keepdim=True) + self.tile_sink(sinks, safe)
            o = o * decay + shares.to(q.dtype).float() @ value
            highest = maximum
        return (o / total).transpose(0, 1).to(q.dtype)

    def start(self, query: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = (*query.shape[:2], 1)
        if sinks is None:
            return query.new_full(shape, -math.inf), query.new_zeros(shape)
        return sinks.float()[:, None, None].expand(shape).clone(), query.new_ones(shape)

    def tile_sink(self, sinks: Tensor | None, highest: Tensor) -> Tensor | float:  # noqa: ARG002
        return 0.0

    def score_scale(self, scale: float) -> float:
        return scale

    def visible(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """[queries, keys] bool."""
        distance = queries[:, None] - keys[None, :]
        mask = distance >= 0
        return mask if window is None else mask & (distance < window)

    def kv_heads(self, query_heads: int, kv_heads: int, device: torch.device) -> Tensor:
        return torch.arange(query_heads, device=device) // (query_heads // kv_heads)

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    def mxfp4_linear(self, x: Tensor, weight: Packed) -> Tensor:
        return self.dense(self.linear_input(x), self.mxfp4_dequantize(*weight)).to(x.dtype)

    def linear_input(self, x: Tensor) -> Tensor:
        """x [M, K] float32, as it is multiplied."""
        return x.float()

    def dense(self, x: Tensor, matrix: Tensor) -> Tensor:
        return x @ matrix.T


def _times_power_of_two(values: Tensor, exponents: Tensor) -> Tensor:
    """values * 2^exponents, [..., n] with one exponent a row or [...] each, exact in float32. In
    two steps, because 2^exponent itself may be beyond float32."""
    if exponents.dim() < values.dim():
        exponents = exponents[..., None]
    half = exponents // 2
    return torch.ldexp(torch.ldexp(values, half), exponents - half)


def cuda_provider() -> TorchProvider:
    """The provider on a GPU: PyTorch's own kernels. Raises NotRun without one."""
    if not torch.cuda.is_available():
        raise NotRun("provider torch-cuda needs a GPU that PyTorch can use, there is none here")
    return TorchProvider("cuda")
