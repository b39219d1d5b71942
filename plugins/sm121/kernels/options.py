"""The options of the kernel level."""

from dataclasses import dataclass

from sm121.core.option_values import checked_by
from sm121.core.options import flag, option
from sm121.kernels import registry


def _provider(name: str) -> str:
    registry.check_name(name)
    return name


@dataclass(frozen=True)
class KernelOptions:
    """The options of the kernel level."""

    #: The provider of the tested kernels. If None, it is the provider of the engine's own kernels.
    provider: str | None = option(
        "--kernel-provider",
        checked_by(_provider, wrong=("no-such-provider", "no_such_module:provider")),
        metavar="NAME|MODULE:ATTR",
        help=(
            f"provider of the kernels that the kernel level tests: {', '.join(registry.NAMES)} or "
            "MODULE:ATTR, an object of your own (default: for each operation, the provider of "
            "the kernel that the server uses)"
        ),
    )
    full_shapes: bool = flag(
        "--full-shapes",
        help=(
            "on a CPU, test the numerics of the kernels at all sizes (default: without the large "
            "sizes)"
        ),
    )
