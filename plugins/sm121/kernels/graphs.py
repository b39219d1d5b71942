"""CUDA graphs: what the engine replays for each decoded token instead of calling kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_WARM_UPS = 3


def record(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Capture a call; gives its replay, and the output that each replay writes."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph.replay, output
