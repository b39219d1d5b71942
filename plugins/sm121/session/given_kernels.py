"""Reads the options of the kernel level."""

from dataclasses import dataclass

from sm121.core.options import Option


@dataclass(frozen=True)
class GivenKernels:
    """How kernels are tested and profiled."""

    #: The provider of the tested kernels. If None, it is the provider of the engine's own kernels.
    provider: str | None = None
    full_shapes: bool = False
    #: The mode of the profiler: auto, keep, restart or off.
    trace: str = "auto"


def read_options(option: Option) -> GivenKernels:
    """Read the options.

    Args:
        option: A function that returns the value of an option.
    """
    return GivenKernels(
        provider=option("--kernel-provider"),
        full_shapes=option("--full-shapes"),
        trace=option("--kernel-trace"),
    )
