"""FlashInfer's attention-sink wrapper on fa2, with a JIT module for each kind of cache.

Before 0.7.4 the wrapper names its module after the queries' type alone. A process that loaded the
module of a BF16 cache then gets it for an FP8 cache as well, and computes garbage. Such a module
gets a name of its own here. The engine's module, which has FlashInfer's name, stays as it is in the
shared cache. From 0.7.4 on FlashInfer's name is kept, so that the engine's own module is judged."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CACHES = (torch.bfloat16, torch.float8_e4m3fn)
"""Types of a cache that a name has to tell apart."""


@dataclass(frozen=True)
class Sizes:
    """Of an attention layer."""

    query_heads: int
    kv_heads: int
    head: int


@dataclass(frozen=True)
class Batch:
    """Where queries and pages of the sequences are: int32 tensors, as FlashInfer takes them."""

    q_edges: Tensor
    """[sequences + 1]"""
    page_edges: Tensor
    """[sequences + 1], into `pages`."""
    pages: Tensor
    last: Tensor
    """[sequences]: tokens in each last page."""
    page: int
    """Tokens a page."""


@dataclass(frozen=True)
class Kernel:
    """What the wrapper compiles a module for."""

    layout: str
    """Of a page: NHD or HND."""
    queries: torch.dtype
    cache: torch.dtype
    window: int | None
    """Tokens that each sees, itself included."""
    sizes: Sizes

    def planned(self, wrapper: Any, workspace: Tensor, batch: Batch) -> Any:
        """Make and plan a wrapper.

        Args:
            wrapper: FlashInfer's class BatchAttentionWithAttentionSinkWrapper.
            workspace: Bytes on the device.
            batch: The sequences.

        Returns:
            The object, whose `run(q, cache, sinks, scale)` gives o [T, Hq, D].
        """
        made = _with_own_name(wrapper) if self._shares_its_name(wrapper) else wrapper
        planned = made(workspace, kv_layout=self.layout, **self._made_with(self.cache))
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

    def _made_with(self, cache: torch.dtype) -> dict[str, Any]:
        return {
            "backend": "fa2",
            "q_data_type": self.queries,
            "kv_data_type": cache,
            "head_dim_qk": self.sizes.head,
            "head_dim_vo": self.sizes.head,
            "window_left": self._window_left,
        }

    def _shares_its_name(self, wrapper: Any) -> bool:
        asked = _asked_for_its_name(wrapper)
        nothing = torch.empty(0, dtype=torch.uint8)
        names = {asked(nothing, **self._made_with(cache)).module_name for cache in _CACHES}
        return len(names) == 1


def _parent(wrapper: Any) -> Any:
    return wrapper.__mro__[1]


@functools.cache
def _asked_for_its_name(wrapper: Any) -> Any:
    """The wrapper, which keeps the name of its module and compiles nothing."""

    class Asked(_parent(wrapper)):  # type: ignore[misc]
        def __init__(self, *_arguments: Any, jit_args: list[Any], **_keywords: Any) -> None:
            self.module_name = jit_args[0]

    return type("AskedSinks", (wrapper, Asked), {})


@functools.cache
def _with_own_name(wrapper: Any) -> Any:
    """The wrapper, whose module is named after its cache and its head sizes as well."""

    class Named(_parent(wrapper)):  # type: ignore[misc]
        def __init__(self, *arguments: Any, jit_args: list[Any], **keywords: Any) -> None:
            name, _queries, cache, *_rest = jit_args
            sizes = jit_args[5:7]
            kinds = "_".join(str(kind).removeprefix("torch.") for kind in (cache, *sizes))
            own = [f"{name}_kv_{kinds}", *jit_args[1:]]
            super().__init__(*arguments, jit_args=own, **keywords)

    return type("NamedSinks", (wrapper, Named), {})
