"""FlashInfer's attention in plain PyTorch: the wrapper with sinks, and XQA.

Both follow FlashInfer's sources.

A module is compiled for one dtype of the KV cache. A process keeps the first module that it loaded
under a name, even if a later call requests another dtype (`tvm_ffi.load_module` of a mapped
library). A test breaks a kernel by replacing a small method of `Module`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
}


@dataclass
class Module:
    """One compiled attention module of FlashInfer."""

    cache: torch.dtype
    window: bool
    """Whether the module is compiled with a sliding window."""

    def read(self, part: Tensor) -> Tensor:
        if part.dtype == self.cache:
            return part.float()
        # The memory contains values of another type, so the result is garbage.
        size = part.element_size() * part.numel()
        storage = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
        wide = storage.repeat(3)[: size * 2].view(self.cache)
        return wide[: part.numel()].float().view(part.shape)

    def scaled(self, scale: float) -> float:
        return scale

    def sinks(self, sinks: Tensor | None) -> Tensor | None:
        return sinks

    def left(self, window_left: int) -> int:
        return window_left

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window_left: int
    ) -> Tensor:
        """Return the attention outputs o [n, Hq, D] of the last n tokens, for keys k and values v
        [T, Hkv, D]."""
        group = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q.float(), k) * self.scaled(scale)
        ago = (torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))[None]).int()
        left = self.left(window_left)
        hidden = (ago < 0) | ((ago > left) if self.window and left >= 0 else False)
        logits = logits.masked_fill(hidden, -torch.inf)
        sinks = self.sinks(sinks)
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(-1, len(q), 1)
            logits = torch.cat((logits, column), -1)
        shares = logits.softmax(-1)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", shares.bfloat16().float(), v).bfloat16()


class Attention:
    """The modules of FlashInfer's attention that one process has loaded."""

    module = Module
    whole_names = False
    """Whether the name of the sink wrapper's module contains the dtype of the KV cache, as in
    FlashInfer from 0.7.4 on."""

    def __init__(self) -> None:
        self.loaded: dict[str, Module] = {}
        self.queries: list[Tensor] = []
        """The arguments that XQA was called with."""
        self.caches: list[Any] = []
        """The arguments that the sink wrapper was called with."""

    def load(self, name: str, cache: torch.dtype, window: bool) -> Module:
        return self.loaded.setdefault(name, self.module(cache, window))

    def _paged_wrapper(self) -> type:
        attention = self

        class Paged:
            """FlashInfer's BatchPrefillWithPagedKVCacheWrapper with a module of its own."""

            def __init__(self, float_workspace_buffer, kv_layout, backend, jit_args, jit_kwargs):
                assert float_workspace_buffer.dtype == torch.uint8 and backend == "fa2"
                name, _q, cache, *_ = jit_args
                self.layout = kv_layout
                self.module = attention.load(name, cache, jit_kwargs["use_sliding_window"])

            def plan(
                self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                num_qo_heads, num_kv_heads, head_dim_qk, page_size, causal, window_left,
                q_data_type, kv_data_type,
            ):  # fmt: skip
                assert causal and q_data_type == torch.bfloat16
                for part in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
                    assert part.dtype == torch.int32
                self.q_edges, self.edges = qo_indptr.tolist(), paged_kv_indptr.tolist()
                self.pages, self.last = paged_kv_indices.long(), paged_kv_last_page_len.tolist()
                self.page = page_size
                self.left = window_left
                self.cache = kv_data_type

            def run(self, q, paged_kv_cache, sink, sm_scale):
                attention.caches.append(paged_kv_cache)
                both = paged_kv_cache
                keys, values = both if isinstance(both, tuple) else both.unbind(1)
                assert keys.dtype == values.dtype == self.cache
                out = torch.empty(q.shape, dtype=q.dtype)
                for n, last in enumerate(self.last):
                    rows = slice(self.q_edges[n], self.q_edges[n + 1])
                    chosen = self.pages[self.edges[n] : self.edges[n + 1]]
                    length = max(len(chosen) - 1, 0) * self.page + last
                    k, v = (
                        tokens(self.module.read(part), chosen, self.layout)[:length]
                        for part in (keys, values)
                    )
                    out[rows] = self.module.attend(q[rows], k, v, sink, sm_scale, self.left)
                return out

        return Paged

    def sink_wrapper(self) -> type:
        attention = self

        class BatchAttentionWithAttentionSinkWrapper(attention._paged_wrapper()):
            def __init__(
                self, float_workspace_buffer, kv_layout="NHD", backend="auto",
                q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, head_dim_qk=128,
                head_dim_vo=128, window_left=-1,
            ):  # fmt: skip
                kinds = DTYPES[q_data_type]
                if attention.whole_names:
                    kinds += f"_{DTYPES[kv_data_type]}_{head_dim_qk}_{head_dim_vo}"
                name = f"batch_prefill_attention_sink_{kinds}_swa_{window_left >= 0}_{backend}"
                dtypes = (q_data_type, kv_data_type, q_data_type, torch.int32)
                super().__init__(
                    float_workspace_buffer=float_workspace_buffer,
                    kv_layout=kv_layout,
                    backend=backend,
                    jit_args=[name, *dtypes, head_dim_qk, head_dim_vo, ["sink"], ["float"]],
                    jit_kwargs={"use_sliding_window": window_left >= 0},
                )

        return BatchAttentionWithAttentionSinkWrapper

    def xqa(
        self, query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len,
        bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None, sinks=None, kv_layout="NHD",
    ):  # fmt: skip
        """Call XQA as flashinfer/decode.py does: with the address of the queries, ignoring their
        strides."""
        assert out is None and bmm2_scale == 1.0 and block_tables.is_contiguous()
        self.queries.append(query)
        self.caches.append(kv_cache)
        keys, values = kv_cache if isinstance(kv_cache, tuple) else kv_cache.unbind(1)
        page = keys.shape[-2 if kv_layout == "HND" else -3]
        name = f"xqa_kv_{DTYPES[keys.dtype]}_page_{page}_window_{window_left >= 0}"
        module = self.load(name, keys.dtype, window_left >= 0)
        dense = torch.empty(query.shape, device="meta").stride()
        query = torch.as_strided(query, query.shape, dense, query.storage_offset())
        output = torch.empty(query.shape, dtype=query.dtype)
        for n, (table, length) in enumerate(zip(block_tables, seq_lens.tolist(), strict=True)):
            k, v = (tokens(module.read(part), table.long(), kv_layout) for part in (keys, values))
            rows = slice(n, n + 1)
            output[rows] = module.attend(
                query[rows], k[:length], v[:length], sinks, bmm1_scale, window_left
            )
        return output


def tokens(pages: Tensor, chosen: Tensor, layout: str) -> Tensor:
    """Return the tokens [T, Hkv, D] of the chosen cache pages."""
    part = pages[chosen]
    return (part.transpose(1, 2) if layout == "HND" else part).flatten(0, 1)


def write_fp8(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write to an FP8 cache like vLLM's reshape_and_cache_flash with scales of one, which uses only
    the stride of a token."""
    page = slots // keys.shape[1]
    offset = slots % keys.shape[1]
    for part, cache in ((k, keys), (v, values)):
        part = part.as_strided(part.shape, (part.stride(0), part.shape[2], 1))
        near = part.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        cache.view(torch.uint8)[page, offset] = near.view(torch.uint8)
