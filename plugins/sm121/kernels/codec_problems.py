"""Problems for the quantisers and the dequantiser."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm121.core.unmet import Fact
from sm121.kernels import cases, quantised
from sm121.kernels.comparison import describe
from sm121.kernels.problem import Problem, normal, widened
from sm121.kernels.protocol import Declaration, Operation
from sm121.oracles import mxfp4, mxfp8

#: The smallest normal value of float32.
_LEAST_NORMAL = 2.0**-126
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
#: The number of bytes that hold the elements of one MXFP4 block.
_ELEMENT_BYTES = mxfp4.BLOCK // 2


def dequantise(case: cases.DequantiseCase) -> Problem:
    """Build the problem of decoding the bytes of the case's kind.

    Args:
        case: The case.
    """
    generator = np.random.default_rng(case.seed)
    shape = (case.rows, case.blocks * mxfp4.BLOCK // 2)
    every_byte = np.arange(256, dtype=np.uint8)
    if case.kind == "all":
        packed = np.broadcast_to(every_byte, shape).copy()
        scales = np.repeat(every_byte[:, None], case.blocks, 1)
    else:
        packed = generator.integers(0, 256, shape, dtype=np.uint8)
        scales = generator.integers(100, 150, (case.rows, case.blocks), dtype=np.uint8)
        if case.kind == "nan":
            scales[:, ::7] = mxfp4.E8M0_NAN
    return mxfp4_dequantisation(packed, scales)


def mxfp4_dequantisation(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Problem:
    """Build a problem of decoding MXFP4, whose result must be exact.

    Three deviations are accepted: a value below 2^-126 may be flushed to zero, a value from 2^128
    on may be infinite or the largest number, and zero may have either sign.

    Args:
        packed: [M, K/2].
        scales: [M, K/32] E8M0.
    """
    expected = mxfp4.dequantise(packed, scales)

    def judge(output: Any, _declared: Declaration) -> list[Fact]:
        if not isinstance(output, Tensor) or tuple(output.shape) != expected.shape:
            return [Fact(f"a tensor of shape {expected.shape}", describe(output))]
        if output.dtype is not torch.float32:
            return [Fact("float32", describe(output))]
        observed = output.cpu().double().numpy()
        wrong = ~_is_decoded(observed, expected)
        if not wrong.any():
            return []
        row, column = (int(axis[0]) for axis in np.nonzero(wrong))
        return [
            Fact(
                "exact values",
                f"{int(wrong.sum())} of {wrong.size} wrong",
                evidence=f"first at row {row}, column {column}: {observed[row, column]} "
                f"instead of {expected[row, column]}, scale byte "
                f"{scales[row, column // mxfp4.BLOCK]}",
            )
        ]

    arguments = (torch.from_numpy(packed.copy()), torch.from_numpy(scales.copy()))
    return Problem("mxfp4_dequantize", arguments, judge)


def _is_decoded(observed: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return for each value whether it was decoded correctly; see `mxfp4_dequantisation`."""
    same = (observed == expected) | (np.isnan(observed) & np.isnan(expected))
    flushed = (np.abs(expected) < _LEAST_NORMAL) & (observed == 0)
    overflow = (np.abs(expected) > _LARGEST_FLOAT) & (np.abs(observed) >= _LARGEST_FLOAT)
    same_sign = np.signbit(observed) == np.signbit(expected)
    decoded: NDArray[np.bool_] = same | flushed | (overflow & same_sign)
    return decoded


def quantise(case: cases.QuantiseCase) -> Problem:
    """Build a problem of encoding values of the case's kind.

    Args:
        case: The case.
    """
    generator = torch.Generator().manual_seed(case.seed)
    x = normal(generator, case.rows, case.blocks * mxfp4.BLOCK)
    if case.kind == "zeros":
        x = x * (torch.rand(case.rows, 1, generator=generator) < 0.5)
        x[:, : mxfp4.BLOCK] = 0
    elif case.kind == "magnitudes":
        x = torch.ldexp(x, torch.randint(-124, 120, (case.rows, 1), generator=generator))
    elif case.kind == "midpoints":
        x = torch.from_numpy(quantised.midpoints(case)).float()
    return quantisation(x.bfloat16(), case.format, strided=case.strided)


def from_bytes(case: cases.BytesCase) -> Problem:
    """Build the problem of decoding or encoding raw bytes.

    Args:
        case: The case, whose class documents the layout of the bytes.
    """
    data = np.frombuffer(case.data, dtype=np.uint8)
    if case.codec == "mxfp4-decode":
        edge = case.rows * case.blocks * _ELEMENT_BYTES
        packed = data[:edge].reshape(case.rows, case.blocks * _ELEMENT_BYTES)
        scales = data[edge:].reshape(case.rows, case.blocks)
        return mxfp4_dequantisation(packed, scales)
    bits = data.view(np.uint16)
    # bfloat16 is the upper half of float32.
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    values = np.where(np.isfinite(values), values, np.float32(0))
    x = torch.from_numpy(values.reshape(case.rows, case.blocks * mxfp4.BLOCK)).bfloat16()
    return quantisation(x, case.codec)


def quantisation(x: Tensor, form: str, *, strided: bool = False) -> Problem:
    """Build a problem of encoding values.

    The scales must follow the declared rule or, if none is declared, the same rule in all blocks.
    The elements must be the nearest ones for the provider's own scales. Three things are not
    judged: the direction in which ties are rounded, blocks whose scale is the smallest or largest
    of E8M0, and the sign of zero.

    Args:
        x: [M, K] bfloat16.
        form: "mxfp4" or "mxfp8".
        strided: Whether the operation gets a non-contiguous x.
    """
    values = x.double().numpy()
    is_mxfp4 = form == "mxfp4"
    rules = mxfp4.ScaleRule if is_mxfp4 else mxfp8.ScaleRule
    operation: Operation = "mxfp4_quantize" if is_mxfp4 else "mxfp8_quantize"

    def judge(output: Any, declared: Declaration) -> list[Fact]:
        wrong = quantised.wrong_shapes(output, x.shape, form)
        if wrong:
            return wrong
        codes = output[0].cpu().contiguous().view(torch.uint8).numpy()
        scales = output[1].cpu().numpy()
        if is_mxfp4:
            codes = mxfp4.unpack(codes)
            name = declared.mxfp4_scale_rule
        else:
            name = declared.mxfp8_scale_rule
        candidates = [rule for rule in rules if name in (None, rule.value)]
        return quantised.judge_blocks(values, codes, scales, candidates, form)

    return Problem(operation, (widened(x, strided),), judge, strided=strided)
