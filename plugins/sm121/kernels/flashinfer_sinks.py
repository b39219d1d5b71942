"""FlashInfer's attention-sink wrapper on fa2, with a JIT module for each kind of cache.

Before 0.7.4, the name of the wrapper's module depends only on the dtype of the queries. A process
that has loaded the module for a BF16 cache then also uses it for an FP8 cache, and computes
garbage. This module therefore gives it another name, so that the engine's module, which has
FlashInfer's name, stays unchanged in the shared JIT cache. From 0.7.4 on, FlashInfer's name is
kept, so that the engine's own module is tested.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: The dtypes of a cache for which the wrapper's modules must have different names.
_CACHES = (torch.bfloat16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of an attention layer."""

    query_heads: int
    kv_heads: int
    head: int


@dataclass(frozen=True)
class Batch:
    """The positions of the sequences' queries and pages: int32 tensors for FlashInfer.

    Attributes:
        q_edges: [sequences + 1], the first query of each sequence, and the end of the last one.
        page_edges: [sequences + 1], the first page of each sequence in `pages`, and the end.
        pages: The numbers of all pages, sequence by sequence.
        last: [sequences], the number of tokens in the last page of each sequence.
        page: The page size in tokens.
    """

    q_edges: Tensor
    page_edges: Tensor
    pages: Tensor
    last: Tensor
    page: int


@dataclass(frozen=True)
class SinkKernel:
    """The properties for which the wrapper compiles a module.

    Attributes:
        layout: The layout of a page, NHD or HND.
        queries: The type of the queries.
        cache: The type of the cache.
        window: The number of tokens that a query attends to, itself included; None for all.
        sizes: The sizes of the layer.
    """

    layout: str
    queries: torch.dtype
    cache: torch.dtype
    window: int | None
    sizes: LayerSizes

    def planned(self, wrapper: Any, workspace: Tensor, batch: Batch) -> Any:
        """Make and plan a wrapper.

        Args:
            wrapper: FlashInfer's class BatchAttentionWithAttentionSinkWrapper.
            workspace: A buffer on the device, of u8.
            batch: The sequences.

        Returns:
            The object, whose `run(q, cache, sinks, scale)` gives o [T, Hq, D].
        """
        if self._shares_its_name(wrapper):
            wrapper = _with_own_name(wrapper)
        planned = wrapper(workspace, kv_layout=self.layout, **self._options(self.cache))
        planned.plan(
            batch.q_edges,
            batch.page_edges,
            batch.pages,
            batch.last,
            self.sizes.query_heads,
            self.sizes.kv_heads,
            self.sizes.head,
            batch.page,
            causal=True,
            window_left=self._window_left,
            q_data_type=self.queries,
            kv_data_type=self.cache,
        )
        return planned

    @property
    def _window_left(self) -> int:
        return -1 if self.window is None else self.window - 1

    def _options(self, cache: torch.dtype) -> dict[str, Any]:
        return {
            "backend": "fa2",
            "q_data_type": self.queries,
            "kv_data_type": cache,
            "head_dim_qk": self.sizes.head,
            "head_dim_vo": self.sizes.head,
            "window_left": self._window_left,
        }

    def _shares_its_name(self, wrapper: Any) -> bool:
        """Return whether the wrapper's module has the same name for all dtypes of a cache."""
        recorder = _name_recorder(wrapper)
        nothing = torch.empty(0, dtype=torch.uint8)
        names = set()
        for cache in _CACHES:
            names.add(recorder(nothing, **self._options(cache)).module_name)
        return len(names) == 1


def _parent(wrapper: Any) -> Any:
    return wrapper.__mro__[1]


@functools.cache
def _name_recorder(wrapper: Any) -> Any:
    """Return a subclass of the wrapper that records its module's name and compiles nothing."""

    class Recorder(_parent(wrapper)):  # type: ignore[misc]
        def __init__(self, *_arguments: Any, jit_args: list[Any], **_keywords: Any) -> None:
            self.module_name = jit_args[0]

    return type("RecordedSinks", (wrapper, Recorder), {})


@functools.cache
def _with_own_name(wrapper: Any) -> Any:
    """Return a subclass of the wrapper whose module's name contains cache dtype and head sizes."""

    class Named(_parent(wrapper)):  # type: ignore[misc]
        def __init__(self, *arguments: Any, jit_args: list[Any], **keywords: Any) -> None:
            # FlashInfer's order: name, queries, cache, output, indices, two head sizes, ...
            name, _queries, cache, _output, _indices, *rest = jit_args
            head_sizes = rest[:2]
            kinds = "_".join(str(kind).removeprefix("torch.") for kind in (cache, *head_sizes))
            own = [f"{name}_kv_{kinds}", *jit_args[1:]]
            super().__init__(*arguments, jit_args=own, **keywords)

    return type("NamedSinks", (wrapper, Named), {})
