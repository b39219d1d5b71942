"""What the kernel level is given of the engine's profiler: the kernels of some decode steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sm121.core.files import write_text
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.evidence import kernel_profile
from sm121.evidence.kernel_profile import KernelProfile
from sm121.evidence.profiler import profile_decode, profile_with_nsys
from sm121.plugin import target
from sm121.plugin.run import Run


@pytest.fixture
def decode_profile(conformance: Run, server: Server) -> KernelProfile:
    """Kernels of some decode steps of the server under test; see `profiled`."""
    return profiled(conformance, server)


def profiled(conformance: Run, server: Server) -> KernelProfile:
    """Kernels of some decode steps of a server; table and trace are in the report.

    Where the profile says ``restart`` the server is stopped afterwards, and the next test that
    wants one gets a fresh one: a GPU profiler slows launches for as long as the process lives.

    Raises:
        NotRun: the server has no profiler, or it wrote nothing.
    """
    seen = _take(conformance, server)
    name = server.configuration.name if server.configuration else "attached"
    report = conformance.directory / f"kernels-{name}"
    write_text(
        f"# Kernels of decode, configuration {name}\n\n{kernel_profile.table(seen)}",
        report.with_suffix(".md"),
    )
    write_text(seen.model_dump_json(indent=2) + "\n", report.with_suffix(".json"))
    conformance.file.engine.kernels = kernel_profile.shortened(seen)
    if (
        conformance.pool is not None
        and target.profiler_mode(conformance.settings, conformance.profile) == "restart"
    ):
        conformance.pool.stop()
    return seen


def _take(conformance: Run, server: Server) -> KernelProfile:
    if server.configuration is None:
        raise NotRun(
            "the attached server's traces are not known here; read one with sm121 path --trace FILE"
        )
    if conformance.settings.nsys:
        if shutil.which("nsys") is None:
            raise NotRun(
                "--nsys: nsys is not on PATH; it comes with CUDA, or as the package nsight-systems"
            )
        if server.configuration.nsys is None:
            raise NotRun(f"--nsys: {server.engine} cannot be started under nsys by the suite")
        return profile_with_nsys(server.endpoint, Path(server.configuration.nsys))
    if server.configuration.traces is None:
        mode = target.profiler_mode(conformance.settings, conformance.profile)
        raise NotRun(
            "kernels are not profiled: the profile or --profile-kernels says off"
            if mode == "off"
            else f"{server.engine} was started without a profiler of the suite's: it takes no "
            "--profiler-config (vLLM 0.13 or later does), or --engine-arg gave one"
        )
    trace = profile_decode(server.endpoint, Path(server.configuration.traces))
    return kernel_profile.read_trace(trace)
