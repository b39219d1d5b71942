"""Quantised blocks: inputs at rounding boundaries, and checks of a quantiser's output bytes."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm121.core.unmet import Fact
from sm121.kernels import cases, comparison
from sm121.oracles import mxfp4, mxfp8

#: The largest magnitudes in the tested blocks. They are just below and above the boundaries between
#: two scales.
_MXFP4_EDGES = (3.0, 3.5, 4.0, 5.0, 5.75, 6.0, 6.03125, 6.5, 6.96875, 7.0, 7.5, 7.96875)
_MXFP8_EDGES = (224.0, 240.0, 256.0, 300.0, 446.0, 448.0, 450.0, 480.0, 510.0)
#: The relative distance between a midpoint and the values next to it: the last bit of bfloat16.
_NEXT_TO_MIDPOINT = 2.0**-7
#: Scales are only judged for blocks whose largest magnitude is within these bounds. Outside them,
#: near the ends of E8M0's range, implementations clamp, flush or treat values specially; there,
#: only the magnitude of the values is checked.
_SMALLEST_SETTLED = 2.0**-100
_LARGEST_SETTLED = 2.0**120
#: The largest accepted error in a block of zeros and denormal values.
_LEAST_SIZE = 2.0**-120


def midpoints(case: cases.QuantiseCase) -> NDArray[np.float64]:
    """Return blocks of values at rounding boundaries.

    Each block has one value at the boundary between two scales. Its other values are elements of
    the format, midpoints between elements, and values next to midpoints.

    Args:
        case: The format, the sizes and the seed.

    Returns:
        Values [rows, 32 * blocks].
    """
    if case.format == "mxfp4":
        elements = np.array(mxfp4.E2M1_VALUES)
        edges = np.array(_MXFP4_EDGES)
    else:
        elements = mxfp8.E4M3_VALUES[:127]
        edges = np.array(_MXFP8_EDGES)
    midpoints = (elements[1:] + elements[:-1]) / 2
    above = midpoints * (1 + _NEXT_TO_MIDPOINT)
    below = midpoints * (1 - _NEXT_TO_MIDPOINT)
    points = np.concatenate((elements, midpoints, above, below))
    generator = np.random.default_rng(case.seed)
    blocks = generator.choice(points, (case.rows, case.blocks, mxfp4.BLOCK))
    blocks *= generator.choice((-1.0, 1.0), blocks.shape)
    edge = edges[np.arange(case.rows * case.blocks).reshape(case.rows, -1) % len(edges)]
    blocks = np.clip(blocks, -edge[..., None], edge[..., None])
    blocks[..., 5] = edge
    scale = np.ldexp(1.0, generator.integers(-20, 20, (case.rows, case.blocks, 1)))
    values: NDArray[np.float64] = (blocks * scale).reshape(case.rows, -1)
    return values


def wrong_shapes(output: Any, shape: torch.Size, form: str) -> list[Fact]:
    """Compare the shapes and types of a quantiser's output with the protocol.

    Args:
        output: The result of the operation.
        shape: [M, K] of its input.
        form: "mxfp4" or "mxfp8".

    Returns:
        One fact for each part that differs.
    """
    if not (isinstance(output, tuple) and len(output) == 2):
        return [Fact("elements and scales", comparison.describe(output))]
    elements, scales = output
    rows, k = shape
    if form == "mxfp4":
        facts = _wrong_part(elements, (rows, k // 2), torch.uint8)
    else:
        facts = _wrong_part(elements, (rows, k), torch.float8_e4m3fn)
    return facts + _wrong_part(scales, (rows, k // mxfp4.BLOCK), torch.uint8)


def _wrong_part(part: Any, shape: tuple[int, int], dtype: torch.dtype) -> list[Fact]:
    if isinstance(part, Tensor) and tuple(part.shape) == shape and part.dtype == dtype:
        return []
    return [Fact(f"{dtype} {shape}", comparison.describe(part))]


def judge_blocks(
    values: NDArray[np.float64],
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    candidates: list[Any],
    form: str,
) -> list[Fact]:
    """Check the output bytes of a quantiser.

    Args:
        values: The input [M, K].
        codes: The elements [M, K], one code per byte.
        scales: The scales [M, K/32] E8M0.
        candidates: The accepted scale rules. All blocks must follow the same one.
        form: "mxfp4" or "mxfp8".

    Returns:
        One fact for each kind of fault.
    """
    oracle: Any = mxfp4 if form == "mxfp4" else mxfp8
    table = _element_values(form)
    blocks = values.reshape(*scales.shape, mxfp4.BLOCK)
    elements = table[codes].reshape(blocks.shape)
    if (scales == mxfp4.E8M0_NAN).any() or np.isnan(elements).any():
        return [Fact("no NaN for finite values", "a NaN scale or element")]
    scale = mxfp4.decode_scale(scales)[..., None]
    amax = np.abs(blocks).max(-1, initial=0.0)
    settled = (amax > _SMALLEST_SETTLED) & (amax < _LARGEST_SETTLED)
    wrong = []
    off = np.abs(elements * scale - blocks).max(-1, initial=0.0)
    if (off > np.maximum(amax, _LEAST_SIZE)).any():
        wrong.append(Fact("decoded values near the inputs", "an error above the block's maximum"))
    mismatches = {}
    for rule in candidates:
        differs = oracle.choose_scale(amax, rule) != scales
        mismatches[rule.value] = int((differs & settled).sum())
    rule_name = min(mismatches, key=lambda name: mismatches[name])
    least = mismatches[rule_name]
    if least:
        wrong.append(
            Fact(
                f"every scale according to the rule {rule_name}",
                f"another scale in {least} of {scales.size} blocks; declare the rule of the kernel",
            )
        )
    nearest = table[oracle.encode_elements((blocks / scale).reshape(values.shape))]
    distance = np.abs(elements - blocks / scale)
    least_distance = np.abs(nearest.reshape(blocks.shape) - blocks / scale)
    missed = (distance > least_distance) & settled[..., None]
    if missed.any():
        wrong.append(
            Fact(
                "the nearest element",
                f"another element in {int(missed.sum())} of {missed.size} places",
            )
        )
    if elements[amax == 0].any():
        wrong.append(Fact("zeros in an all-zero block", "other values"))
    return wrong


def _element_values(form: str) -> NDArray[np.float64]:
    """Return the values of all codes of a format."""
    if form == "mxfp4":
        positive = np.array(mxfp4.E2M1_VALUES)
        return np.concatenate((positive, -positive))
    return mxfp8.E4M3_VALUES
