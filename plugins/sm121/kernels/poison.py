"""Memory that a kernel is given to write to holds what it must not be found holding. Outputs are
the provider's to allocate: every uninitialised tensor that is made while an operation runs, in
Python or by an ATen operator, is filled first. An extension's own C++ memory is out of reach."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAN = "NaN"
FINITE = "a finite value"
KINDS = (NAN, FINITE)
"""NaN is blind where NaN is a legal output; a finite value that no output has is not."""

_FINITE_FLOAT = -24_576.0
_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    }
)


class Poisoned(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed by mypy
    """A context in which new uninitialised tensors hold `kind` of KINDS."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # FlashAttention leaves a tensor undefined, which is None.
        if isinstance(result, list | tuple):
            result = tuple(torch.empty(0) if part is None else part for part in result)
        if func.overloadpacket in _ALLOCATIONS:
            fill(result, self._kind)
        return result


def fill(tensor: torch.Tensor, kind: str) -> None:
    """Overwrite a tensor with `kind` of KINDS."""
    if tensor.dtype == torch.bool or not tensor.numel():
        return
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        tensor.fill_(torch.nan if kind == NAN else _FINITE_FLOAT)
    elif tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(0xFF if kind == NAN else 0x5A)
    else:
        tensor.fill_(-1 if kind == NAN else 0x5A5A)
