"""FlashInfer's quantisers, dense MXFP4 layers and experts: a part of the provider `flashinfer`."""

import copy
import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as functional
from torch import Tensor

from sm121.core.verdict import NotRun
from sm121.kernels.flashinfer_layer import ALIGNED, BLOCK, FlashInferLayer
from sm121.kernels.flashinfer_library import FlashInferLibrary
from sm121.kernels.planning import Call
from sm121.kernels.protocol import FusedMoe, Packed

#: The sizes of output tiles (rows, columns) with which the MXFP4 build decodes and prefills.
_TILES = {"64x128": (64, 128), "128x128": (128, 128)}
#: The function with which the MXFP4 build chooses the size of a tile.
_TILE_OF = "select_tile_mn_for_sm120"
#: The largest value of E4M3.
_E4M3_MAX = 448.0
#: The E8M0 code of the scale 1.
_SCALE_OF_ONE = 0x7F


@dataclass(frozen=True)
class _ExpertCall:
    """A variant of `cutlass_fused_moe`, with the weights of a layer.

    Attributes:
        fused_moe: The function.
        weights: The packed elements of both matrices.
        scales: The scales, in the order in which the function takes them.
        quantises: Whether the activations are MXFP8; if not, they are bfloat16.
    """

    fused_moe: Any
    weights: list[Tensor]
    scales: list[Tensor]
    quantises: bool


class FlashInferExperts:
    """The quantisers, dense layers and experts that the GPU architecture supports.

    Args:
        library: FlashInfer on this GPU.
    """

    def __init__(self, library: FlashInferLibrary) -> None:
        self._library = library
        self._tactic: list[int] | None = None
        self._tile: tuple[int, int] | None = None

    def mxfp4_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP4.

        Args:
            x: [M, K].

        Returns:
            The packed elements [M, K/2] u8 and the scales [M, K/32] u8 E8M0.

        Raises:
            NotRun: The GPU architecture or the FlashInfer release lacks the operation.
        """
        self._library.require_sm100("mxfp4_quantize")
        quantize = self._library.find("flashinfer", "mxfp4_quantize", "sfLayout")
        packed, scales = quantize(x, sfLayout=self._library.package.SfLayout.layout_linear)
        return packed, scales.view(torch.uint8).reshape(len(x), x.shape[1] // BLOCK)

    def mxfp8_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP8.

        Args:
            x: [M, K].

        Returns:
            The elements [M, K] float8_e4m3fn and the scales [M, K/32] u8 E8M0.

        Raises:
            NotRun: The GPU architecture or the FlashInfer release lacks the operation.
        """
        self._library.require_sm100("mxfp8_quantize")
        q, scales = self._mxfp8_quantizer()(x, is_sf_swizzled_layout=False)
        return q, scales.view(torch.uint8).reshape(len(x), x.shape[1] // BLOCK)

    def _mxfp8_quantizer(self) -> Any:
        quantize = self._library.find(
            "flashinfer", "mxfp8_quantize", "is_sf_swizzled_layout", "backend"
        )
        return functools.partial(quantize, alignment=BLOCK, backend="cute-dsl")

    def plan_linear(self, x: Tensor, weight: Packed) -> Call:
        """Return a call of `mm_fp4`, as vLLM's `FlashInferMxFp4LinearKernel` calls it.

        On SM12x, that kernel's backend supports only NVFP4; there, `auto` chooses a backend.

        Args:
            x: [M, K].
            weight: packed [N, K/2] and scales [N, K/32].

        Raises:
            NotRun: The GPU architecture or the FlashInfer release lacks the operation.
        """
        self._library.require_sm100("mm_fp4")
        quantize = self._library.find("flashinfer", "mxfp4_quantize", "backend")
        multiply = self._library.find("flashinfer", "mm_fp4", "block_size", "use_nvfp4", "backend")
        packed, weight_scales = weight
        tiles = self._library.find("flashinfer", "block_scale_interleave")(weight_scales)
        padded_rows = -(-len(packed) // ALIGNED) * ALIGNED
        tiles = tiles.reshape(padded_rows, -1).t()
        backend = "auto" if self._library.capability // 10 == 12 else "cute-dsl"

        def call() -> Tensor:
            codes, scales = quantize(x.contiguous(), backend="cute-dsl")
            scales = scales.view(torch.uint8).reshape(-1, len(tiles))
            return multiply(
                codes,
                packed.t(),
                scales,
                tiles,
                block_size=BLOCK,
                use_nvfp4=False,
                backend=backend,
            )

        return call

    def plan_experts(self, inputs: FusedMoe) -> Call | None:
        """Return a call of `cutlass_fused_moe` that computes y [T, H].

        Args:
            inputs: The operation's arguments.

        Raises:
            NotRun: The GPU architecture or the FlashInfer release lacks the operation.
        """
        capability = self._library.capability
        if capability != 90 and capability // 10 not in (10, 12):
            raise NotRun(
                "cutlass_fused_moe has MXFP4 weights with bfloat16 activations on sm90 and with "
                f"MXFP8 activations on SM10x and SM12x, this is sm{capability}; vLLM's "
                "Marlin has bfloat16 activations here (--kernel-provider vllm)"
            )
        if not len(inputs.x):
            return None
        layer = FlashInferLayer.of(inputs)
        form = self._w4a16(layer) if capability == 90 else self._w4a8(layer)
        quantize = self._mxfp8_quantizer() if form.quantises else None

        def call() -> Tensor:
            wide = functional.pad(inputs.x, (0, layer.to_hidden)).contiguous()
            x = wide
            options: dict[str, Any] = {}
            if quantize is not None:
                q, scales = quantize(wide, is_sf_swizzled_layout=True)
                x, options["input_sf"] = self.quantised(q, scales, wide)
                options["use_mxfp8_act_scaling"] = True
            out = torch.empty_like(wide)
            form.fused_moe(
                x,
                inputs.ids,
                inputs.weights,
                *form.weights,
                torch.bfloat16,
                form.scales,
                output=out,
                **options,
                **layer.biases,
                **layer.constants,
            )
            if not layer.to_hidden:
                return out
            return out[:, : layer.hidden].contiguous()

        return call

    def _w4a16(self, layer: FlashInferLayer) -> _ExpertCall:
        """Return the variant with bfloat16 activations."""
        module = "flashinfer.fused_moe"
        order_weights = self._library.find(module, "interleave_moe_weights_for_sm90_mixed_gemm")
        order_scales = self._library.find(module, "interleave_moe_scales_for_sm90_mixed_gemm")
        # The fused finalisation adds with atomics, whose order varies from call to call.
        fused_moe = functools.partial(
            self._fused_moe("use_fused_finalize"),
            use_w4_group_scaling=True,
            use_fused_finalize=False,
        )
        weights = []
        scales = []
        for matrix_codes, matrix_scales in (layer.w1, layer.w2):
            weights.append(order_weights(matrix_codes, "fp4"))
            scales.append(order_scales(matrix_scales, BLOCK))
        return _ExpertCall(fused_moe, weights, scales, quantises=False)

    def _w4a8(self, layer: FlashInferLayer) -> _ExpertCall:
        """Return the variant with MXFP8 activations, as vLLM's `FLASHINFER_CUTLASS_MXFP4_MXFP8`.

        The scales are in tiles of 128 rows by 4 blocks. Weights and scales are passed as wider
        integers.
        """
        interleave = self._library.find("flashinfer", "block_scale_interleave")
        fused_moe = self._fused_moe("use_mxfp8_act_scaling", "input_sf")
        weights = []
        blocks = []
        for matrix_codes, matrix_scales in (layer.w1, layer.w2):
            weights.append(matrix_codes.view(torch.long))
            tiles = interleave(matrix_scales).reshape(matrix_scales.shape)
            blocks.append(tiles.view(torch.int32))
        ones = torch.ones(len(weights[0]), dtype=torch.float32, device=weights[0].device)
        scales = [blocks[0], ones, blocks[1], ones]
        return _ExpertCall(fused_moe, weights, scales, quantises=True)

    def quantised(self, q: Tensor, scales: Tensor, _x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the activations for the experts. A subclass may replace them.

        Args:
            q: [T, H] E4M3.
            scales: The scales, in tiles.

        Returns:
            The elements and the scales.
        """
        return q, scales

    def _fused_moe(self, *arguments: str) -> Any:
        if self._tile is not None:  # never restored, because each tactic runs in its own process
            setattr(
                self._library.experts_module(),
                _TILE_OF,
                lambda *_arguments, **_keywords: self._tile,
            )
        if self._tactic is None:
            return self._library.find("flashinfer.fused_moe", "cutlass_fused_moe", *arguments)
        function = self._library.find(
            "flashinfer.fused_moe", "cutlass_fused_moe", *arguments, "profile_ids"
        )
        return functools.partial(function, profile_ids=self._tactic)

    def tactics(self, device: str) -> tuple[str, ...]:
        """Return the tactics of the experts that are worth a test of their own.

        They are the tile sizes between which a build chooses by the number of tokens, and pairs of
        autotuning tactics: each tactic of one matrix product with the first tactic of the other.

        Args:
            device: The device of the tensors, as PyTorch names it.
        """
        first, second = self._list_tactics(device)
        names: list[str] = []
        if hasattr(self._library.experts_module(), _TILE_OF):
            names.extend(_TILES)
        names.extend(f"{tactic},{second[0]}" for tactic in first)
        names.extend(f"{first[0]},{tactic}" for tactic in second[1:])
        return tuple(names)

    def _list_tactics(self, device: str) -> tuple[list[int], list[int]]:
        """Return the valid autotuning tactics of both matrix products, for a small layer."""
        tuner = importlib.import_module("flashinfer.autotuner").AutoTuner
        valid: dict[int, list[int]] = {}
        choose = tuner.choose_one

        def keep_valid(*arguments: Any, gemm_idx: int) -> tuple[Any, int]:
            _tuner, _name, (runner, *_), _config, inputs = arguments
            valid[gemm_idx] = sorted(runner.get_valid_tactics(inputs, None))
            return runner, -1

        tuner.choose_one = keep_valid
        try:
            self._run_small_layer(device)
        finally:
            tuner.choose_one = choose
        return valid[1], valid[2]

    def _run_small_layer(self, device: str) -> None:
        hidden = 2944
        intermediate = 2944
        experts = 4
        tokens = 16

        def zeros(rows: int, columns: int) -> Packed:
            shape = (experts, rows, columns // 2)
            codes = torch.zeros(shape, dtype=torch.uint8, device=device)
            return codes, codes.new_zeros(experts, rows, columns // BLOCK)

        w1 = zeros(2 * intermediate, hidden)
        w2 = zeros(hidden, intermediate)
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
        ids = torch.arange(experts, dtype=torch.int32, device=device).repeat(tokens, 1)
        shares = torch.full((tokens, experts), 1 / math.sqrt(tokens), device=device)
        call = self.plan_experts(FusedMoe(x, shares, ids, w1, None, w2, None, 1.702, 7.0))
        assert call is not None
        call()

    def with_tactic(self, tactic: str) -> Self:
        """Return a copy of the experts that always uses one tactic.

        Args:
            tactic: One of `tactics`.
        """
        fixed = copy.copy(self)
        if tactic in _TILES:
            fixed._tile = _TILES[tactic]
        else:
            fixed._tactic = [int(part) for part in tactic.split(",")]
        return fixed


class IdentityExperts(FlashInferExperts):
    """The experts of a build that takes E4M3 activations with scales of one.

    This class rounds x; the build's experts round the hidden activations.
    """

    def quantised(self, _q: Tensor, scales: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x in E4M3, and scales of one.

        Args:
            scales: The scales of MXFP8, in tiles.
            x: [T, H].

        Returns:
            The elements and the scales.
        """
        elements = x.float().clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
        return elements, torch.full_like(scales, _SCALE_OF_ONE)
