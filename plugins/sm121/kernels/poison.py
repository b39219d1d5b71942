"""Fill new memory with values that no output has, before a kernel writes to it.

The provider allocates its outputs. Therefore every uninitialised tensor that is made while an
operation runs, in Python or by an ATen operator, is filled first. Memory that the C++ code of an
extension allocates by itself is not reached.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAN = "NaN"
FINITE = "a finite value"
#: Both kinds of poison. NaN does not show where NaN is a legal output; a finite value that no
#: output has shows there.
KINDS = (NAN, FINITE)

#: The finite poison of float types of two bytes and more.
_FINITE_FLOAT = -24_576.0
#: The poison of one byte: NaN in E4M3 and E8M0, or a value.
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
        # FlashAttention leaves a tensor undefined, which is None.
        if isinstance(result, list | tuple):
            result = tuple(torch.empty(0) if part is None else part for part in result)
        if func.overloadpacket in _ALLOCATIONS:
            fill(result, self._kind)
        return result


def fill(tensor: torch.Tensor, kind: str) -> None:
    """Overwrite a tensor with poison.

    Args:
        tensor: A tensor of any type; one of booleans stays as it is.
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
