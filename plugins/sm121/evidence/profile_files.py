"""Read a profile of any known format."""

from pathlib import Path

from sm121.evidence import kernel_trace, nsys
from sm121.evidence.kernel_profile import KernelProfile

_GZIP = b"\x1f\x8b"


def read_profile(path: Path) -> KernelProfile:
    """Read a profile.

    Args:
        path: A trace of the torch profiler, a report of Nsight Systems, or a log with the table
            that nsys prints.

    Raises:
        UsageError: The file is none of these.
        NotRun: nsys, which is needed for its reports, is not installed, or cannot read this one.
        OSError: The file cannot be read.
    """
    if path.name.endswith(".nsys-rep"):
        return nsys.read_report(path)
    with path.open("rb") as file:
        start = file.read(2)
    if ".json" in path.name or start.startswith(b"{") or start == _GZIP:
        return kernel_trace.read_trace(path)
    return nsys.read_nsys(path.read_text("utf-8", errors="replace"), path)
