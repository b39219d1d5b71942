"""Simulated server starts of both sides of an A/B comparison, whose rates have a known ratio."""

import numpy as np

from sm121.regression import ab, hypothesis, start_pairs
from sm121.regression.ab import MetricOfStart, Visit
from sm121.regression.hypothesis import Criterion, Review

#: A hypothesis in which only the criteria matter for the tests.
REVIEW = Review(
    assumptions=("the experts wait for the memory",),
    inefficiencies=("the scales of blocks are read twice",),
    alternatives=("another kernel of the same library",),
    upstream_todos=("none: the server needs no change",),
    experiments=("the kernels of a decode step",),
)


def visits(b_factor: float, *, pairs: int = 3, boot: float = 0.005, drift: float = 0.0, seed: int):
    generator = np.random.default_rng(seed)
    made = []
    for number, side in enumerate(ab.order(pairs)):
        level = 60 * (1 + boot * generator.standard_normal()) * (1 - drift) ** number
        factor = b_factor if side == "B" else 1.0
        metrics = {
            "tg32@d0": MetricOfStart(level * factor, "tok/s", True),
            "ttft_p50": MetricOfStart(27000 / (level * factor), "ms", False),
            "memory_gib": MetricOfStart(80 / factor, "GiB", False),
        }
        made.append(Visit(side, metrics, {"moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8"}))
    return made


def answer(starts, levels=None, tests=(), **criterion) -> hypothesis.CriterionResult:
    outcomes = start_pairs.compare_starts(starts, {}, default=0.05)
    (result,) = hypothesis.evaluate(
        [Criterion(**criterion)], outcomes, starts, levels or {}, 1, tests
    )
    return result
