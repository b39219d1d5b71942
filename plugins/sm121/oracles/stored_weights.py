"""The weights of a checkpoint in the Hugging Face format, which are read on access."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from sm121.oracles import mxfp4
from sm121.oracles.gpt_oss import GptOssConfig, Latest, Layer, Linear, Matrices, Weights

#: The number of bits of an E2M1 code.
_CODE_BITS = 4


def stream(checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Weights:
    """Return the weights of a checkpoint with MXFP4 or BF16 experts.

    Only one layer is in memory at a time, with one of its experts, and only those rows of the
    vocabulary matrices that are used.

    Args:
        checkpoint: The folder of the checkpoint.
        dtype: The dtype of the computation.
        device: A device of PyTorch.

    Raises:
        FileNotFoundError: There is no config.json or no *.safetensors.
        ValueError: config.json is of another model. If a tensor is missing, the error is raised
            when its layer is read.
    """
    stored = Stored(checkpoint, device)

    def read_layer(n: int) -> Layer:
        return layer(stored, n, dtype, lambda name: experts(stored, name, dtype))

    return Weights(
        config=stored.config,
        embedding=_StoredRows(stored, "model.embed_tokens.weight"),
        layers=Latest(stored.config.layers, read_layer),
        norm=stored.tensor("model.norm.weight").to(dtype),
        head=_StoredRows(stored, "lm_head.weight"),
    )


class Stored:
    """The tensors of a checkpoint, in the formats of its files, read on access.

    Args:
        checkpoint: The folder of the checkpoint.
        device: A device of PyTorch.

    Raises:
        FileNotFoundError: There is no config.json or no *.safetensors.
        ValueError: config.json is of another model.
    """

    def __init__(self, checkpoint: Path, device: str = "cpu") -> None:
        from safetensors import safe_open

        self._device = device
        text = (checkpoint / "config.json").read_text("utf-8")
        #: The model's configuration.
        self.config = GptOssConfig.from_json(json.loads(text))
        #: The folder of the checkpoint.
        self.checkpoint = checkpoint
        files = sorted(checkpoint.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{checkpoint} holds no *.safetensors")
        self._file_of: dict[str, Any] = {}
        for file in files:
            handle: Any = safe_open(file, framework="pt")
            for name in handle.keys():  # noqa: SIM118 - not a dict
                self._file_of[name] = handle

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """Read a tensor.

        Args:
            name: The name of the tensor.

        Raises:
            ValueError: The checkpoint does not have the tensor.
        """
        tensor: Tensor = self._find_file(name).get_tensor(name)
        return tensor.to(self._device)

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Read a slice of a tensor's first dimension.

        Args:
            name: The name of the tensor.
            start: The first index.
            end: The index after the last one.

        Raises:
            ValueError: The checkpoint does not have the tensor.
        """
        rows: Tensor = self._find_file(name).get_slice(name)[start:end]
        return rows.to(self._device)

    def _find_file(self, name: str) -> Any:
        if name not in self._file_of:
            raise ValueError(f"{self.checkpoint} has no tensor {name}")
        return self._file_of[name]


class _StoredRows:
    """Rows of a vocabulary matrix, which are read when they are accessed."""

    def __init__(self, stored: Stored, name: str) -> None:
        self._stored = stored
        self._name = name

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            return self._stored.rows(self._name, rows.start, rows.stop)
        indices, inverse = rows.unique(return_inverse=True)
        parts = [self._stored.rows(self._name, row, row + 1) for row in indices.tolist()]
        return torch.cat(parts)[inverse]


def experts(stored: Stored, name: str, dtype: torch.dtype) -> Latest:
    """Return the experts' matrices, dequantised or transposed on access.

    Args:
        stored: The checkpoint.
        name: The name of the matrices, without ``_blocks`` and ``_scales``.
        dtype: The dtype of the computation.
    """

    def read(expert: int) -> Tensor:
        def part(suffix: str) -> Tensor:
            return stored.rows(f"{name}{suffix}", expert, expert + 1)[0]

        if f"{name}_blocks" not in stored:
            return part("").to(dtype).T.contiguous()
        return dequantised(part("_blocks"), part("_scales"), dtype)

    return Latest(stored.config.experts, read)


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode MXFP4 in the layout of the checkpoint.

    `mxfp4.dequantise` computes the same result, but looks up one element at a time instead of four.

    Args:
        blocks: [rows, B, 16] u8.
        scales: [rows, B] u8.
        dtype: The dtype of the result.

    Returns:
        [rows, 32 B].
    """
    pairs = blocks.flatten(1).contiguous().view(torch.int16).int() & 0xFFFF
    values = functional.embedding(pairs, _four_values(dtype, blocks.device.type))
    sizes = torch.ldexp(torch.ones_like(scales, dtype=dtype), scales.int() - mxfp4.E8M0_BIAS)
    sizes.masked_fill_(scales == mxfp4.E8M0_NAN, math.nan)
    # In place: a second tensor of this size costs a quarter of the time.
    return values.view(*scales.shape, mxfp4.BLOCK).mul_(sizes[..., None]).flatten(1)


@functools.cache
def _four_values(dtype: torch.dtype, device: str) -> Tensor:
    """Return the four elements of each possible pair of bytes, [65536, 4]."""
    values = torch.tensor(mxfp4.CODE_VALUES.tolist(), dtype=dtype)
    pairs = torch.arange(1 << 16)
    shifts = range(0, 16, _CODE_BITS)
    return torch.stack([values[pairs >> shift & 15] for shift in shifts], 1).to(device)


def layer(stored: Stored, n: int, dtype: torch.dtype, matrices: Callable[[str], Matrices]) -> Layer:
    """Read a layer of a checkpoint.

    Args:
        stored: The checkpoint.
        n: The index of the layer.
        dtype: The dtype of the computation.
        matrices: Returns the experts' matrices with a given name.

    Raises:
        ValueError: The checkpoint lacks a tensor.
    """
    prefix = f"model.layers.{n}"

    def tensor(name: str) -> Tensor:
        return stored.tensor(f"{prefix}.{name}").to(dtype)

    def linear(name: str) -> Linear:
        return tensor(f"{name}.weight"), tensor(f"{name}.bias")

    def of_experts(name: str) -> tuple[Matrices, Tensor]:
        return matrices(f"{prefix}.{name}"), tensor(f"{name}_bias")

    return Layer(
        attention_norm=tensor("input_layernorm.weight"),
        q=linear("self_attn.q_proj"),
        k=linear("self_attn.k_proj"),
        v=linear("self_attn.v_proj"),
        o=linear("self_attn.o_proj"),
        sinks=tensor("self_attn.sinks"),
        mlp_norm=tensor("post_attention_layernorm.weight"),
        router=linear("mlp.router"),
        gate_up=of_experts("mlp.experts.gate_up_proj"),
        down=of_experts("mlp.experts.down_proj"),
    )
