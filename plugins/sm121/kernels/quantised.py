"""Quantised blocks: values on the edges of rounding, and what is wrong with a quantiser's bytes."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm121.core.unmet import Fact
from sm121.kernels import cases, comparison
from sm121.oracles import mxfp4, mxfp8


def midpoints(case: cases.QuantiseCase) -> NDArray[np.float64]:
    """Blocks with one value that sets the scale, on the edges between scales, and values on and
    beside the midpoints between elements."""
    if case.format == "mxfp4":
        elements = np.array(mxfp4.E2M1_VALUES)
        edges = np.array([3.0, 3.5, 4.0, 5.0, 5.75, 6.0, 6.03125, 6.5, 6.96875, 7.0, 7.5, 7.96875])
    else:
        elements = mxfp8.E4M3_VALUES[:127]
        edges = np.array([224.0, 240.0, 256.0, 300.0, 446.0, 448.0, 450.0, 480.0, 510.0])
    midpoints = (elements[1:] + elements[:-1]) / 2
    points = np.concatenate(
        (elements, midpoints, midpoints * (1 + 2.0**-7), midpoints * (1 - 2**-7))
    )
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
    if not (isinstance(output, tuple) and len(output) == 2):
        return [Fact("elements and scales", comparison.describe(output))]
    rows, k = shape
    width, dtype = (k // 2, torch.uint8) if form == "mxfp4" else (k, torch.float8_e4m3fn)
    required = (((rows, width), dtype), ((rows, k // mxfp4.BLOCK), torch.uint8))
    return [
        Fact(f"{dtype} {shape}", comparison.describe(part))
        for part, (shape, dtype) in zip(output, required, strict=True)
        if not isinstance(part, Tensor) or (tuple(part.shape), part.dtype) != (shape, dtype)
    ]


def judge_blocks(
    values: NDArray[np.float64],
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    candidates: list[Any],
    form: str,
) -> list[Fact]:
    oracle: Any = mxfp4 if form == "mxfp4" else mxfp8
    table = np.array([*mxfp4.E2M1_VALUES, *(-v for v in mxfp4.E2M1_VALUES)])
    table = table if form == "mxfp4" else mxfp8.E4M3_VALUES
    blocks = values.reshape(*scales.shape, mxfp4.BLOCK)
    elements = table[codes].reshape(blocks.shape)
    if (scales == mxfp4.E8M0_NAN).any() or np.isnan(elements).any():
        return [Fact("no NaN for finite values", "a NaN scale or element")]
    scale = mxfp4.decode_scale(scales)[..., None]
    amax = np.abs(blocks).max(-1) if blocks.size else np.zeros(scales.shape)
    wrong = []
    # At the ends of E8M0 implementations clamp, flush or special-case: only the size is required.
    settled = (amax > 2.0**-100) & (amax < 2.0**120)
    off = np.abs(elements * scale - blocks).max(-1, initial=0.0)
    if (off > np.maximum(amax, 2.0**-120)).any():
        wrong.append(Fact("a block's values near its own", "off by more than the largest"))
    mismatches = {
        rule.value: int(((oracle.choose_scale(amax, rule) != scales) & settled).sum())
        for rule in candidates
    }
    rule, least = min(mismatches.items(), key=lambda item: item[1])
    if least:
        wrong.append(
            Fact(
                f"every scale by the rule {rule}",
                f"{least} of {scales.size} blocks have another; declare the rule or follow one",
            )
        )
    nearest = table[oracle.encode_elements((blocks / scale).reshape(values.shape))]
    distance = np.abs(elements - blocks / scale)
    least_distance = np.abs(nearest.reshape(blocks.shape) - blocks / scale)
    missed = (distance > least_distance) & settled[..., None]
    if missed.any():
        wrong.append(
            Fact("the nearest element", f"{int(missed.sum())} of {missed.size} are another")
        )
    if elements[amax == 0].any():
        wrong.append(Fact("zeros stay zeros", "other values in an all-zero block"))
    return wrong
