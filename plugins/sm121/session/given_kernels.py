"""Options of the kernel level."""

from dataclasses import dataclass

from sm121.core.options import Option


@dataclass(frozen=True)
class GivenKernels:
    """How kernels are judged and recorded."""

    #: Whose kernels are judged; None: those that the engine is known to call.
    provider: str | None = None
    full_shapes: bool = False
    #: Which trace proves the engine's kernels.
    trace: str = "auto"


def read(option: Option) -> GivenKernels:
    """Read the options.

    Args:
        option: Gives the value of an option.
    """
    return GivenKernels(
        provider=option("--kernel-provider"),
        full_shapes=option("--full-shapes"),
        trace=option("--kernel-trace"),
    )
