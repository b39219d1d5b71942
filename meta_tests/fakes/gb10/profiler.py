"""The profiler of the simulated server, which writes a trace of decode steps."""

from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from meta_tests.fakes import decode_traces
from meta_tests.fakes.gb10.drafts import Drafts
from sm121.core.engine_arguments import parse_options

#: The kernels of a step run for this share of it; the host takes the rest.
_BUSY = 0.85
_LAYERS = 36


class Profiler:
    """The routes that vLLM has with ``--profiler-config``."""

    def __init__(self, folder: Path, experts: str, step_s: float, step_tokens: int) -> None:
        self.folder = folder
        self.experts = experts
        self.step_s = step_s
        self.step_tokens = step_tokens

    @classmethod
    def of(
        cls, arguments: Sequence[str], experts: str, token_s: float, drafter: Drafts | None
    ) -> "Profiler | None":
        """Return the profiler that the arguments request; None for none."""
        folder = parse_options(arguments).get("profiler_config.torch_profiler_dir")
        if folder is None:
            return None
        kernels = "MARLIN" if "MARLIN" in experts.upper() else "CUTLASS"
        if drafter is None:
            return cls(Path(folder), kernels, token_s, 1)
        return cls(Path(folder), kernels, token_s * drafter.step_tokens, 1 + drafter.length)

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/start_profile", self._start)
        app.router.add_post("/stop_profile", self._stop)

    async def _start(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _stop(self, _request: web.Request) -> web.Response:
        """Write a trace of decode steps.

        The times of the experts' products are scaled so that a step takes the simulated time."""
        others_us = sum(took for name, took in decode_traces.LAYER if name not in ("FC1", "FC2"))
        products_us = decode_traces.LAYER_US - others_us
        layer_us = _BUSY * self.step_s * 1e6 / _LAYERS
        self.folder.mkdir(exist_ok=True)
        decode_traces.write(
            self.folder / "rank0.pt.trace.json",
            experts=self.experts,
            steps=64,
            layers=_LAYERS,
            slower=(layer_us - others_us) / products_us,
            step_tokens=self.step_tokens,
        )
        return web.Response()
