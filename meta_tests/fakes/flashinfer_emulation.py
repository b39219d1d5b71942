"""FlashInfer's MXFP8 x MXFP4 experts in plain PyTorch, with the layouts of its kernels.

No SM12x is available, so the provider's own code runs on this emulation. It has the functions that
the provider calls, with FlashInfer's arguments and its checks of shapes and types. Inputs and
outputs have the bytes of the GPU: E8M0 scales in tiles of 128 rows by 4 blocks, packed E2M1 viewed
as int64, the up rows before the gate rows, sizes padded to 128. It was written from the sources of
FlashInfer 0.7.2, which the comments name, and not from the oracle. Sums are float32. Padding
contains garbage, so that a test fails if it is read. Each small method is a place where
`w4a8_mutants` breaks a kernel.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meta_tests.fakes.attention_emulation import Attention, write_fp8
from sm121.kernels import flashinfer_provider, torch_provider
from sm121.kernels.flashinfer_attention import FlashInferAttention
from sm121.kernels.flashinfer_library import FlashInferLibrary

BLOCK = 32
TILE = 128
BLOCKS = 4
"""The number of elements per scale; the number of rows, and of scales in a row, of a tile of
scales."""
GARBAGE = 0x5A
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Emulation:
    """The functions of `flashinfer` and `flashinfer.fused_moe`."""

    version = "0.7.2"
    capability = (12, 1)
    quantiser = torch_provider.TorchProvider()
    tile = (128, 128)
    of_attention = Attention

    @functools.cached_property
    def attention(self) -> Attention:
        return self.of_attention()

    @functools.cached_property
    def core(self) -> ModuleType:
        """The module of the MXFP4 build with one function: the size of a tile for a number of
        tokens."""
        core = ModuleType("flashinfer.fused_moe.core")
        core.select_tile_mn_for_sm120 = lambda tokens: (64 if tokens < 64 else 128, 128)
        return core

    # Scales in tiles: get_sf_out_offset_128x4 (quantization_utils.cuh).

    def offsets(self, rows: int, blocks: int) -> Tensor:
        row = torch.arange(rows)[:, None]
        block = torch.arange(blocks)[None, :]
        tile = row // TILE * (up_to(blocks, BLOCKS) // BLOCKS) + block // BLOCKS
        return tile * (TILE * BLOCKS) + row % 32 * 16 + row % TILE // 32 * 4 + block % 4

    def in_tiles(self, scales: Tensor) -> Tensor:
        rows, blocks = scales.shape
        flat = torch.full((up_to(rows, TILE) * up_to(blocks, BLOCKS),), GARBAGE, dtype=torch.uint8)
        # mxfp8_quantize and doActivationKernel set the padding columns to zero,
        # block_scale_interleave sets padding rows and columns; the padding rows of activations are
        # not written.
        flat[self.offsets(rows, up_to(blocks, BLOCKS))] = 0
        flat[self.offsets(rows, blocks)] = scales
        return flat

    def from_tiles(self, flat: Tensor, rows: int, blocks: int) -> Tensor:
        return flat[self.offsets(rows, blocks)]

    def block_scale_interleave(self, unswizzled_sf: Tensor, *, out: Tensor | None = None) -> Tensor:
        assert out is None
        require(unswizzled_sf.dtype == torch.uint8 and unswizzled_sf.is_contiguous(), "scales")
        of_experts = unswizzled_sf if unswizzled_sf.dim() == 3 else unswizzled_sf[None]
        return torch.cat([self.in_tiles(scales) for scales in of_experts])

    # cvt_warp_fp16_to_mxfp8 (quantization_utils.cuh) and the CuTe-DSL kernel of the same rule.

    def scale_bytes(self, amax: Tensor) -> Tensor:
        bits = (amax * torch.tensor(1 / 448, dtype=torch.float32)).view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        return torch.where(amax == 0, 0, exponent).clamp(0, 254).to(torch.uint8)

    def to_mxfp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        scales = self.scale_bytes(blocks.abs().amax(-1))
        scaled = (blocks * torch.exp2(127.0 - scales.float())[..., None]).flatten(-2)
        return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scales

    def quantise_x(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.to_mxfp8(x)

    def quantise_hidden(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.to_mxfp8(h.bfloat16())

    def mxfp8_quantize(
        self,
        input: Tensor,  # noqa: A002
        is_sf_swizzled_layout: bool = True,
        alignment: int = 32,
        enable_pdl: bool | None = None,
        backend: str = "cuda",
        sf_swizzle_layout: Any = None,
    ) -> tuple[Tensor, Tensor]:
        assert alignment == BLOCK and enable_pdl is None and sf_swizzle_layout is None
        require(input.shape[1] % BLOCK == 0 and input.dtype == torch.bfloat16, "input")
        require(backend in ("cuda", "cute-dsl"), "backend")
        q, scales = self.quantise_x(input)
        return q, self.in_tiles(scales) if is_sf_swizzled_layout else scales.flatten()

    # mm_fp4 with MXFP4 (gemm/gemm_base.py): both operands packed, scales in tiles.

    def mxfp4_quantize(self, a: Tensor, backend: str = "cuda") -> tuple[Tensor, Tensor]:
        require(a.dtype == torch.bfloat16 and a.is_contiguous() and backend == "cute-dsl", "a")
        codes, scales = self.quantiser.mxfp4_quantize(a)
        return codes, self.in_tiles(scales)

    def mm_fp4(
        self,
        a: Tensor,
        b: Tensor,
        a_descale: Tensor,
        b_descale: Tensor,
        block_size: int = 16,
        use_nvfp4: bool = True,
        backend: str = "auto",
    ) -> Tensor:
        require(block_size == BLOCK and not use_nvfp4, "mxfp4 only supports block_size = 32")
        require(backend == ("auto" if self.capability[0] == 12 else "cute-dsl"), "backend")
        require(b.shape[0] == a.shape[1] and b.t().is_contiguous(), "b is column major")
        codes = zip((a, b.t()), (a_descale, b_descale.t()), strict=True)
        x, matrix = (self.matrix(p, scales, len(p), 2 * p.shape[1]) for p, scales in codes)
        require(a_descale.shape[1] == up_to(x.shape[1] // BLOCK, BLOCKS), "a_descale")
        return self.sums(x, matrix).bfloat16()

    def sums(self, x: Tensor, matrix: Tensor) -> Tensor:
        return x @ matrix.T

    # cutlass_fused_moe: csrc/fused_moe/cutlass_backend/*.

    def cutlass_fused_moe(
        self,
        input: Tensor,  # noqa: A002
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        fc1_expert_weights: Tensor,
        fc2_expert_weights: Tensor,
        output_dtype: torch.dtype,
        quant_scales: list[Tensor],
        fc1_expert_biases: Tensor | None = None,
        fc2_expert_biases: Tensor | None = None,
        input_sf: Tensor | None = None,
        swiglu_alpha: Tensor | None = None,
        swiglu_beta: Tensor | None = None,
        swiglu_limit: Tensor | None = None,
        output: Tensor | None = None,
        use_mxfp8_act_scaling: bool = False,
        profile_ids: list[int] | None = None,
    ) -> Tensor:
        assert output is not None and input_sf is not None and use_mxfp8_act_scaling
        assert swiglu_alpha is not None and swiglu_beta is not None and swiglu_limit is not None
        _, rows, packed = fc1_expert_weights.shape
        hidden = packed * 16
        inter = fc2_expert_weights.shape[2] * 16
        self.check(
            input, token_selected_experts, token_final_scales, fc1_expert_weights,
            fc2_expert_weights, quant_scales, fc1_expert_biases, fc2_expert_biases, output,
        )  # fmt: skip
        scales1, global1, scales2, global2 = quant_scales
        x_scales = self.source_scales(input_sf, len(input), hidden // BLOCK)
        results = torch.empty(len(input), token_selected_experts.shape[1], hidden)
        for e in token_selected_experts.unique().tolist():
            tokens, rank = (token_selected_experts == e).nonzero(as_tuple=True)
            a, a_scales = self.expanded(input, x_scales, tokens)
            w1 = self.matrix(fc1_expert_weights[e], scales1[e], rows, hidden)
            t = self.written(self.product(a, a_scales, w1) * global1[e])
            t = self.with_bias(t, fc1_expert_biases, e)
            constants = self.constants(swiglu_alpha, swiglu_beta, swiglu_limit, e)
            h = self.activation(t[:, inter:], t[:, :inter], *constants)
            q, q_scales = self.quantise_hidden(h)
            b, b_scales = self.expanded(q, q_scales, torch.arange(len(q)))
            w2 = self.matrix(fc2_expert_weights[e], scales2[e], hidden, inter)
            results[tokens, rank] = self.product(b, b_scales, w2) * global2[e]
        fused = profile_ids is not None and profile_ids[1] % 2 == 1
        finalize = self.fused_finalize if fused else self.finalize
        self.tile = self.core.select_tile_mn_for_sm120(len(input))
        y = finalize(results, token_final_scales, token_selected_experts, fc2_expert_biases)
        return output.copy_(y)

    def check(
        self, x: Tensor, ids: Tensor, shares: Tensor, w1: Tensor, w2: Tensor, scales: list[Tensor],
        b1: Tensor | None, b2: Tensor | None, output: Tensor,
    ) -> None:  # fmt: skip
        """Check the arguments as the binding does (runMoe, getQuantParams of the fused MoE's
        binding)."""
        experts = len(w1)
        hidden = w2.shape[1]
        inter = w2.shape[2] * 16
        require(x.dtype == torch.float8_e4m3fn and x.shape[1] == hidden, "input")
        require(ids.dtype == torch.int32 and ids.is_contiguous(), "token_selected_experts")
        require(shares.dtype == torch.float32 and shares.shape == ids.shape, "token_final_scales")
        require(w1.dtype == torch.int64 and w1.shape[1] == 2 * inter, "fc1_expert_weights")
        require(w2.dtype == torch.int64 and w1.shape[2] * 16 == hidden, "fc2_expert_weights")
        require(hidden % 128 == 0, "hidden_size must be divisible by 128 for MXFP4 weights")
        require(inter % 128 == 0, "inter_size must be divisible by 128 for MXFP4 weights")
        require(len(scales) == 4, "Expecting 4 quant scales for W4A8_MXFP4_MXFP8 quantization")
        for block, shape in ((0, (2 * inter, hidden)), (2, (hidden, inter))):
            expected = (experts, shape[0], shape[1] // BLOCK // 4)
            require(scales[block].dtype == torch.int32, "block scales")
            require(tuple(scales[block].shape) == expected, "block scales")
            require(scales[block + 1].dtype == torch.float32, "global scales")
            require(tuple(scales[block + 1].shape) == (experts,), "global scales")
        for bias, rows in ((b1, 2 * inter), (b2, hidden)):
            if bias is not None:
                require(bias.dtype == torch.bfloat16, "biases")
                require(tuple(bias.shape) == (experts, rows), "biases")
        require(tuple(output.shape) == tuple(x.shape), "output")
        require(output.dtype == torch.bfloat16, "output")

    def source_scales(self, input_sf: Tensor, rows: int, blocks: int) -> Tensor:
        return self.from_tiles(input_sf, rows, blocks)

    def expanded(self, q: Tensor, scales: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return an expert's rows and their scales, padded with garbage to whole tiles.

        FlashInfer's expandInputRowsKernel does not write the padding of N."""
        rows = up_to(len(tokens), TILE)
        values = torch.full((rows, q.shape[1]), GARBAGE, dtype=torch.uint8).view(q.dtype)
        values[: len(tokens)] = q[tokens]
        of_expert = torch.full((rows, scales.shape[1]), GARBAGE, dtype=torch.uint8)
        of_expert[: len(tokens)] = scales[tokens]
        flat = self.in_tiles(of_expert)
        return values[: len(tokens)], self.from_tiles(flat, len(tokens), scales.shape[1])

    def matrix(self, packed: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
        pairs = packed.contiguous().view(torch.uint8)
        codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).int()
        values = torch.cat((E2M1, -E2M1))[codes]
        flat = scales.contiguous().view(torch.uint8).flatten()
        return times_scales(values, self.from_tiles(flat, rows, columns // BLOCK))

    def product(self, values: Tensor, scales: Tensor, matrix: Tensor) -> Tensor:
        return times_scales(values.float(), scales) @ matrix.T

    def written(self, t: Tensor) -> Tensor:
        return t.bfloat16().float()

    def with_bias(self, t: Tensor, biases: Tensor | None, e: int) -> Tensor:
        return t if biases is None else t + biases[e].float()

    def constants(self, alpha: Tensor, beta: Tensor, limit: Tensor, e: int) -> tuple[Tensor, ...]:
        return alpha[e], beta[e], limit[e]

    def activation(
        self, gate: Tensor, up: Tensor, alpha: Tensor, beta: Tensor, limit: Tensor
    ) -> Tensor:
        gate = gate.minimum(limit)
        up = up.minimum(limit).maximum(-limit)
        return gate * torch.sigmoid(gate * alpha) * (up + beta)

    def finalize(
        self, results: Tensor, shares: Tensor, ids: Tensor, biases: Tensor | None
    ) -> Tensor:
        """Multiply the experts' outputs by the router's weights and add them in float32, in a
        separate kernel (finalizeMoeRoutingKernel), as the default tactic does.

        The outputs of the experts already have the type of the sum."""
        each = results.bfloat16().float()
        if biases is not None:
            each = each + biases[ids.long()].float()
        return (each * shares[..., None]).sum(1).bfloat16()

    def fused_finalize(
        self, results: Tensor, shares: Tensor, ids: Tensor, biases: Tensor | None
    ) -> Tensor:
        """Add the bias and multiply by the router's weight in float32, in the epilogue of the
        second product, as some tactics do.

        The experts' outputs are added one after the other, by atomics of the output's type
        (sm90_visitor_scatter.hpp)."""
        each = results if biases is None else results + biases[ids.long()].float()
        out = torch.zeros(len(results), results.shape[2], dtype=torch.bfloat16)
        for rank in range(ids.shape[1]):
            out += (each[:, rank] * shares[:, rank, None]).bfloat16()
        return out

    # The modules

    @functools.cached_property
    def sink_wrapper(self) -> type:
        return self.attention.sink_wrapper()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        names = ("flashinfer", "flashinfer.fused_moe", "flashinfer.autotuner", "flashinfer.decode")
        main, experts, tuner, decode = map(ModuleType, names)
        main.__version__ = self.version
        names = ("mxfp8_quantize", "block_scale_interleave", "mxfp4_quantize", "mm_fp4")
        vars(main).update({name: getattr(self, name) for name in names})
        experts.cutlass_fused_moe = self.cutlass_fused_moe
        main.BatchAttentionWithAttentionSinkWrapper = self.sink_wrapper
        decode.xqa_batch_decode_with_kv_cache = self.attention.xqa
        made = (main, experts, tuner, decode, self.core)
        modules = {module.__name__: module for module in made}
        with (
            mock.patch.dict(sys.modules, modules),
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "get_device_capability", lambda: self.capability),
        ):
            yield


class EmulatedLibrary(FlashInferLibrary):
    """The emulation in place of FlashInfer, on the CPU."""

    def __init__(self, emulation: Emulation | None = None) -> None:
        self._emulation = emulation or Emulation()
        with self._emulation.installed():
            super().__init__()

    def find(self, module: str, name: str, *arguments: str) -> Any:
        with self._emulation.installed():
            return super().find(module, name, *arguments)

    def experts_module(self) -> Any:
        return self._emulation.core


class EmulatedAttention(FlashInferAttention):
    def write_fp8(self, *arguments: Any) -> None:
        write_fp8(*arguments)


class _Emulated:
    """The code of a real provider on the CPU, with the emulation in place of FlashInfer."""

    device = "cpu"
    attention_class = EmulatedAttention

    def __init__(self, emulation: Emulation | None = None) -> None:
        super().__init__(EmulatedLibrary(emulation))


class EmulatedProvider(_Emulated, flashinfer_provider.FlashInferProvider):
    pass


class Fa2Provider(_Emulated, flashinfer_provider.FlashInferFa2Provider):
    pass


class IdentityProvider(_Emulated, flashinfer_provider.FlashInferIdentityProvider):
    pass


class Identity(Emulation):
    """Hidden activations in E4M3 with scales of one."""

    def quantise_hidden(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.e4m3(h.bfloat16().float())
        return h, torch.full((len(h), h.shape[1] // BLOCK), 127, dtype=torch.uint8)

    def e4m3(self, values: Tensor) -> Tensor:
        return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def require(holds: bool, condition: str) -> None:
    if not holds:
        raise RuntimeError(f"Check failed: {condition}")


def times_scales(values: Tensor, scales: Tensor) -> Tensor:
    powers = torch.exp2(scales.float() - 127.0).masked_fill(scales == 0xFF, torch.nan)
    return (values.unflatten(-1, (-1, BLOCK)) * powers[..., None]).flatten(-2)
