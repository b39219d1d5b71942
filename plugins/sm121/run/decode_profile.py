"""Profiles some decode steps of a server, and lists the kernels that ran in the report."""

from pathlib import Path

from sm121.core.files import write_text
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.evidence import kernel_profile, kernel_trace
from sm121.evidence.kernel_profile import KernelProfile
from sm121.evidence.profiler import profile_decode
from sm121.run.events import EngineShown
from sm121.run.run import Run


def profile_decode_steps(run: Run, server: Server, *, mode: str) -> KernelProfile:
    """Profile some decode steps, and write the table and the kernels to the report directory.

    Args:
        run: The run.
        server: The server.
        mode: The mode with which the server was started: ``keep``, ``restart`` or ``off``. With
            ``restart``, the server is stopped afterwards, because a GPU profiler slows kernel
            launches until the process ends.

    Returns:
        The kernels.

    Raises:
        NotRun: The server has no profiler, or the profiler wrote nothing.
    """
    configuration = server.configuration
    if configuration is None:
        raise NotRun(
            "the attached server's traces are not known here; read one with sm121 path --trace FILE"
        )
    if configuration.traces is None:
        if mode == "off":
            raise NotRun("kernels are not profiled: the profile or --kernel-trace switches it off")
        raise NotRun(
            f"{server.engine} was started without the suite's profiler: it has no option "
            "--profiler-config (vLLM 0.13 or later has it), or --engine-arg sets that option"
        )
    trace = profile_decode(server.endpoint, Path(configuration.traces)).path
    kernels = kernel_trace.read_trace(trace).model_copy(update={"decoding": True})
    name = configuration.name
    report = run.record.directory / f"kernels-{name}"
    write_text(
        f"# Kernels of decode, configuration {name}\n\n{kernel_profile.table(kernels)}",
        report.with_suffix(".md"),
    )
    write_text(kernels.model_dump_json(indent=2) + "\n", report.with_suffix(".json"))
    run.record.emit(
        EngineShown.of(run.record.file.engine, kernels=kernel_profile.shortened(kernels))
    )
    if mode == "restart":
        run.servers.stop()
    return kernels
