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
from sm121.evidence.failure import classify_lines
from sm121.kernels import flashinfer_releases
from sm121.kernels.flashinfer_layer import ALIGNED, BLOCK, FlashInferLayer
from sm121.kernels.planning import Call, PlanningProvider
from sm121.kernels.protocol import FusedMoe, Operation, Packed

#: The sizes of output tiles (rows, columns) with which the MXFP4 build decodes and prefills.
_TILES = {"64x128": (64, 128), "128x128": (128, 128)}
#: The function with which the MXFP4 build chooses the size of a tile.
_TILE_OF = "select_tile_mn_for_sm120"


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


class FlashInferExperts(PlanningProvider):
    """The quantisers, dense layers and experts that the GPU architecture supports.

    Raises:
        NotRun: FlashInfer cannot be imported, or there is no GPU.
    """

    mxfp4_scale_rule = "ceil"
    mxfp8_scale_rule = "ceil"
    linear_activations = "mxfp4"
    deterministic = frozenset(
        {
            "mxfp4_quantize",
            "mxfp8_quantize",
            "fused_moe",
            "prefill_attention",
            "decode_attention",
            "prefill_attention_fp8",
            "decode_attention_fp8",
        }
    )
    graphs = frozenset({"fused_moe", "prefill_attention", "decode_attention"})

    def __init__(self) -> None:
        try:
            self._flashinfer: Any = importlib.import_module("flashinfer")
        except ImportError as error:
            raise NotRun(
                f"provider flashinfer needs FlashInfer, which cannot be imported here ({error}); "
                "pip install flashinfer-python"
            ) from error
        except Exception as error:  # FlashInfer checks versions when it is imported
            words = f"{type(error).__name__}: {error}"
            remedy = classify_lines([words]).remedy or "repair the environment of FlashInfer"
            raise NotRun(
                f"provider flashinfer: expected that FlashInfer can be imported, got {words}. "
                f"What to do: {remedy}"
            ) from error
        if not torch.cuda.is_available():
            raise NotRun("provider flashinfer needs a GPU that PyTorch can use, there is none here")
        major, minor = torch.cuda.get_device_capability()
        self._capability = 10 * major + minor
        self.activations = "bfloat16" if major == 9 else "mxfp8"
        self._spaces: dict[str, Tensor] = {}
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
        self._require_sm100("mxfp4_quantize")
        quantize = self._api("flashinfer", "mxfp4_quantize", "sfLayout")
        packed, scales = quantize(x, sfLayout=self._flashinfer.SfLayout.layout_linear)
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
        self._require_sm100("mxfp8_quantize")
        q, scales = self._mxfp8_quantizer()(x, is_sf_swizzled_layout=False)
        return q, scales.view(torch.uint8).reshape(len(x), x.shape[1] // BLOCK)

    def _mxfp8_quantizer(self) -> Any:
        quantize = self._api("flashinfer", "mxfp8_quantize", "is_sf_swizzled_layout", "backend")
        return functools.partial(quantize, alignment=BLOCK, backend="cute-dsl")

    def _api(self, module: str, name: str, *arguments: str) -> Any:
        """Return a function of FlashInfer that takes these arguments by name, or raise NotRun."""
        return flashinfer_releases.find_function(module, name, arguments, self._version)

    @property
    def _version(self) -> str | None:
        text = str(getattr(self._flashinfer, "__version__", ""))
        if not text or text.startswith("0.0.0"):
            return None
        return text

    def _require_sm100(self, operation: str) -> None:
        if self._capability < 100:
            raise NotRun(
                f"FlashInfer's {operation} has no code before sm100: on this sm{self._capability} "
                "it launches an empty kernel and returns what was in memory, without an error"
            )

    def plan_linear(self, x: Tensor, weight: Packed) -> Call:
        """Return a call of `mm_fp4`, as vLLM's `FlashInferMxFp4LinearKernel` calls it.

        On SM12x, that kernel's backend supports only NVFP4; there, `auto` chooses a backend.

        Args:
            x: [M, K].
            weight: packed [N, K/2] and scales [N, K/32].

        Raises:
            NotRun: The GPU architecture or the FlashInfer release lacks the operation.
        """
        self._require_sm100("mm_fp4")
        quantize = self._api("flashinfer", "mxfp4_quantize", "backend")
        multiply = self._api("flashinfer", "mm_fp4", "block_size", "use_nvfp4", "backend")
        packed, weight_scales = weight
        tiles = self._api("flashinfer", "block_scale_interleave")(weight_scales)
        padded_rows = -(-len(packed) // ALIGNED) * ALIGNED
        tiles = tiles.reshape(padded_rows, -1).t()
        backend = "auto" if self._capability // 10 == 12 else "cute-dsl"

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
        if self._capability != 90 and self._capability // 10 not in (10, 12):
            raise NotRun(
                "cutlass_fused_moe has MXFP4 weights with bfloat16 activations on sm90 and with "
                f"MXFP8 activations on SM10x and SM12x, this is sm{self._capability}; vLLM's "
                "Marlin has bfloat16 activations here (--kernel-provider vllm)"
            )
        if not len(inputs.x):
            return None
        layer = FlashInferLayer.of(inputs)
        form = self._w4a16(layer) if self._capability == 90 else self._w4a8(layer)
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
        order_weights = self._api(module, "interleave_moe_weights_for_sm90_mixed_gemm")
        order_scales = self._api(module, "interleave_moe_scales_for_sm90_mixed_gemm")
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
        interleave = self._api("flashinfer", "block_scale_interleave")
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
            setattr(self._core(), _TILE_OF, lambda *_arguments, **_keywords: self._tile)
        if self._tactic is None:
            return self._api("flashinfer.fused_moe", "cutlass_fused_moe", *arguments)
        function = self._api("flashinfer.fused_moe", "cutlass_fused_moe", *arguments, "profile_ids")
        return functools.partial(function, profile_ids=self._tactic)

    def tactics(self, operation: Operation) -> tuple[str, ...]:
        """Return the tactics that are worth a test of their own.

        They are the tile sizes between which a build chooses by the number of tokens, and pairs of
        autotuning tactics: each tactic of one matrix product with the first tactic of the other.

        Args:
            operation: The operation; only `fused_moe` has tactics.
        """
        if operation != "fused_moe":
            return ()
        first, second = self._list_tactics()
        names: list[str] = []
        if hasattr(self._core(), _TILE_OF):
            names.extend(_TILES)
        names.extend(f"{tactic},{second[0]}" for tactic in first)
        names.extend(f"{first[0]},{tactic}" for tactic in second[1:])
        return tuple(names)

    def _list_tactics(self) -> tuple[list[int], list[int]]:
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
            self._run_small_layer()
        finally:
            tuner.choose_one = choose
        return valid[1], valid[2]

    def _run_small_layer(self) -> None:
        hidden = 2944
        intermediate = 2944
        experts = 4
        tokens = 16

        def zeros(rows: int, columns: int) -> Packed:
            shape = (experts, rows, columns // 2)
            codes = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            return codes, codes.new_zeros(experts, rows, columns // BLOCK)

        w1 = zeros(2 * intermediate, hidden)
        w2 = zeros(hidden, intermediate)
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=self.device)
        ids = torch.arange(experts, dtype=torch.int32, device=self.device).repeat(tokens, 1)
        shares = torch.full((tokens, experts), 1 / math.sqrt(tokens), device=self.device)
        self.fused_moe(x, shares, ids, w1, None, w2, None, alpha=1.702, limit=7.0)

    def _core(self) -> Any:
        return importlib.import_module("flashinfer.fused_moe.core")

    def with_tactic(self, tactic: str) -> Self:
        """Return a copy of the provider that always uses one tactic.

        Args:
            tactic: One of `tactics`.
        """
        fixed = copy.copy(self)
        if tactic in _TILES:
            fixed._tile = _TILES[tactic]
        else:
            fixed._tactic = [int(part) for part in tactic.split(",")]
        if self.activations != "bfloat16":
            # With vLLM's arguments, some tactics add with atomics, whose order varies.
            fixed.deterministic = self.deterministic - {"fused_moe"}
        return fixed
