"""FlashInfer's attention: a part of the provider `flashinfer`."""

import importlib
from typing import Any

import torch
import torch.nn.functional as functional
from packaging.version import Version
from torch import Tensor

from sm121.core.verdict import NotRun
from sm121.kernels import flashinfer_releases, flashinfer_sinks
from sm121.kernels.flashinfer_library import FlashInferLibrary
from sm121.kernels.planning import Call, Paging, in_fp8, side_by_side, with_dense_heads
from sm121.kernels.protocol import DecodeAttention, PrefillAttention

#: The page size of the cache that a prefill writes, in tokens.
_PAGE = 32
_E4M3 = torch.float8_e4m3fn
#: The size of a kernel's workspace, in bytes.
_WORKSPACE = 128 << 20


class FlashInferAttention:
    """Prefill attention by the sink wrapper, and decode attention by XQA or by the sink wrapper.

    Args:
        library: FlashInfer on this GPU.
        by_xqa: Whether decode uses XQA if the release has XQA with sinks.
    """

    def __init__(self, library: FlashInferLibrary, *, by_xqa: bool) -> None:
        self._library = library
        self._by_xqa = by_xqa
        self._spaces: dict[str, Tensor] = {}

    def plan_prefill(self, inputs: PrefillAttention, *, fp8: bool = False) -> Call | None:
        """Return a call that writes a paged cache and computes o [T, Hq, D].

        Args:
            inputs: The operation's arguments.
            fp8: Whether the cache is in E4M3.

        Raises:
            NotRun: The case has no sinks, or the FlashInfer release lacks the wrapper.
        """
        q = inputs.q
        k = inputs.k
        v = inputs.v
        _require_sinks(inputs.sinks)
        if not len(q):
            return None
        paging = Paging(inputs.cu_seqlens.tolist(), _PAGE)
        cache_type = _E4M3 if fp8 else k.dtype
        page_edges = torch.tensor([0, *paging.counts], dtype=torch.int32).cumsum(0).int()
        batch = flashinfer_sinks.Batch(
            q_edges=inputs.cu_seqlens,
            page_edges=page_edges.to(q.device),
            pages=torch.arange(paging.pages, dtype=torch.int32, device=q.device),
            last=torch.tensor(paging.last, dtype=torch.int32, device=q.device),
            page=_PAGE,
        )
        sizes = flashinfer_sinks.LayerSizes(q.shape[1], k.shape[1], q.shape[2])
        kernel = flashinfer_sinks.SinkKernel("NHD", q.dtype, cache_type, inputs.window, sizes)
        wrapper = kernel.planned(self._sink_wrapper(), self._workspace("prefill", q), batch)
        heads = k.shape[1]
        size = k.shape[2]
        cache: Tensor | tuple[Tensor, ...]
        if side_by_side(k, v):
            packed_shape = (paging.pages, _PAGE, heads, 2 * size)
            packed = torch.zeros(packed_shape, dtype=cache_type, device=q.device)
            keys, values = packed.split(size, -1)
            cache = (keys, values)
        else:
            shape = (paging.pages, 2, _PAGE, heads, size)
            cache = torch.zeros(shape, dtype=cache_type, device=q.device)
            keys, values = cache.unbind(1)
        slots = paging.slots().to(q.device)
        page = slots // _PAGE
        offset = slots % _PAGE

        def call() -> Tensor:
            if fp8:
                self.write_fp8(with_dense_heads(k), with_dense_heads(v), keys, values, slots)
            else:
                keys[page, offset] = k
                values[page, offset] = v
            output: Tensor = wrapper.run(q, cache, inputs.sinks, inputs.scale)
            return output

        return call

    def plan_decode(self, inputs: DecodeAttention, *, fp8: bool = False) -> Call | None:
        """Return a call that computes o [B, Hq, D], by XQA or by the sink wrapper.

        Args:
            inputs: The operation's arguments.
            fp8: Whether the cache is in E4M3.

        Raises:
            NotRun: The GPU architecture or the FlashInfer release lacks the operation.
        """
        if not len(inputs.q):
            return None
        if self._by_xqa and self._has_xqa_with_sinks():
            return self._plan_xqa(inputs, fp8)
        return self._plan_fa2(inputs, fp8)

    def _plan_xqa(self, inputs: DecodeAttention, fp8: bool) -> Call:
        if fp8:
            self._require_mha_cu()
        decode = self._library.find("flashinfer.decode", "xqa_batch_decode_with_kv_cache", "sinks")
        cache = in_fp8(inputs.kv_cache, self.write_fp8) if fp8 else inputs.kv_cache
        given = _as_given(cache)
        workspace = self._workspace("decode", inputs.q)
        table = inputs.block_table.contiguous()
        longest = table.shape[1] * inputs.kv_cache.shape[3]
        window_left = -1 if inputs.window is None else inputs.window - 1

        def call() -> Tensor:
            output: Tensor = decode(
                # XQA takes the address of the queries but no strides; vLLM also makes the queries
                # contiguous.
                inputs.q.contiguous(),
                given,
                workspace,
                table,
                inputs.seq_lens,
                longest,
                window_left=window_left,
                sinks=inputs.sinks,
                bmm1_scale=inputs.scale,
                bmm2_scale=1.0,
                kv_layout="HND",
            )
            return output

        return call

    def _has_xqa_with_sinks(self) -> bool:
        if self._library.capability // 10 != 12 or not self._library.version:
            return True
        first = flashinfer_releases.since()["attention sinks in XQA on SM12x", None]
        return Version(self._library.version).release >= Version(first).release

    def _require_mha_cu(self) -> None:
        if self._library.capability == 90:
            raise NotRun(
                "FlashInfer's XQA with an FP8 cache is another kernel on sm90: mha_sm90.cu "
                "rounds queries and attention weights to E4M3; mha.cu on SM12x rounds neither. "
                "Test it on SM12x, or test FA2's decode here (--kernel-provider flashinfer-fa2)"
            )

    def _plan_fa2(self, inputs: DecodeAttention, fp8: bool) -> Call:
        """Return a call of the sink wrapper: a prefill with one query per sequence."""
        q = inputs.q
        kv_cache = inputs.kv_cache
        _require_sinks(inputs.sinks)
        cache = in_fp8(kv_cache, self.write_fp8) if fp8 else kv_cache
        page = kv_cache.shape[3]
        lengths = inputs.seq_lens.cpu()
        counts = (lengths + page - 1) // page
        pages = []
        for row, count in zip(inputs.block_table, counts.tolist(), strict=True):
            pages.append(row[:count])
        batch = flashinfer_sinks.Batch(
            q_edges=torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
            page_edges=functional.pad(counts.cumsum(0), (1, 0)).int().to(q.device),
            pages=torch.cat(pages).int(),
            last=(lengths - (counts - 1) * page).int().to(q.device),
            page=page,
        )
        sizes = flashinfer_sinks.LayerSizes(q.shape[1], kv_cache.shape[2], q.shape[2])
        kernel = flashinfer_sinks.SinkKernel("HND", q.dtype, cache.dtype, inputs.window, sizes)
        wrapper = kernel.planned(self._sink_wrapper(), self._workspace("decode-fa2", q), batch)
        given = _as_given(cache)
        return lambda: wrapper.run(q, given, inputs.sinks, inputs.scale)

    def _sink_wrapper(self) -> Any:
        return self._library.find(
            "flashinfer", "BatchAttentionWithAttentionSinkWrapper", "head_dim_qk"
        )

    def _workspace(self, kernel: str, like: Tensor) -> Tensor:
        """Return the buffer of a kernel, on the device of a tensor."""
        # XQA counts its finished blocks in its workspace, which must therefore begin as zeros and
        # must not contain what another kernel wrote.
        if kernel not in self._spaces:
            self._spaces[kernel] = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=like.device)
        return self._spaces[kernel]

    def write_fp8(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write tokens to the pages of an FP8 cache, with scales of one.

        Args:
            k: Keys [T, Hkv, D].
            v: Values [T, Hkv, D].
            keys: Pages of keys [pages, page, Hkv, D].
            values: Pages of values, as `keys`.
            slots: [T], the slot of each token, counted over all pages.

        Raises:
            NotRun: vLLM, whose kernel writes the cache, cannot be imported.
        """
        try:
            write = importlib.import_module("vllm._custom_ops").reshape_and_cache_flash
        except ImportError as error:
            raise NotRun(
                "the FP8 cache that FlashInfer reads is written by vLLM, which cannot be "
                f"imported here: {error}"
            ) from error
        one = torch.ones((), dtype=torch.float32, device=k.device)
        write(k, v, keys.view(torch.uint8), values.view(torch.uint8), slots, "fp8", one, one)


def _require_sinks(sinks: Tensor | None) -> None:
    if sinks is None:
        raise NotRun(
            "FlashInfer's sink wrapper requires sinks; FlashInfer has another kernel without them"
        )


def _as_given(cache: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Return the cache [pages, 2, Hkv, page, D] as vLLM passes it: two views if `side_by_side`."""
    keys, values = cache.unbind(1)
    if side_by_side(keys, values):
        return keys, values
    return cache
