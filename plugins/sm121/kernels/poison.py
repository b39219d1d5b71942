"""Fill new memory with values that no correct output has, before a kernel writes to it.

The provider allocates its outputs itself. Therefore, every uninitialised tensor that Python or an
ATen operator allocates while an operation runs is filled. Memory that an extension's own C++ code
allocates is not covered.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAN = "NaN"
FINITE = "a finite value"
#: Both kinds of poison. Where NaN is a legal output, only a finite value reveals unwritten memory.
KINDS = (NAN, FINITE)

#: The finite poison of float types of two bytes and more.
_FINITE_FLOAT = -24_576.0
#: The poison of one-byte types: NaN in E4M3 and E8M0, or a finite value.
_NAN_BYTE = 0xFF
_FINITE_BYTE = 0x5A
#: The poison of wider integers.
_NAN_INTEGER = -1
_FINITE_INTEGER = 0x5A5A
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
    """A context in which new uninitialised tensors are filled.

    Args:
        kind: The poison, one of `KINDS`.
    """

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
        # FlashAttention returns an undefined tensor, which arrives as None.
        if isinstance(result, list | tuple):
            result = tuple(torch.empty(0) if part is None else part for part in result)
        if func.overloadpacket in _ALLOCATIONS:
            fill(result, self._kind)
        return result


def fill(tensor: torch.Tensor, kind: str) -> None:
    """Overwrite a tensor with poison.

    Args:
        tensor: A tensor of any dtype; a tensor of booleans is not changed.
        kind: The poison, one of `KINDS`.
    """
    if tensor.dtype == torch.bool or not tensor.numel():
        return
    is_nan = kind == NAN
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        tensor.fill_(torch.nan if is_nan else _FINITE_FLOAT)
    elif tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(_NAN_BYTE if is_nan else _FINITE_BYTE)
    else:
        tensor.fill_(_NAN_INTEGER if is_nan else _FINITE_INTEGER)
