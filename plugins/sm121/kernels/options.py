"""The options of the kernel level."""

from sm121.core.options import AddOption
from sm121.kernels import registry


def add_options(add: AddOption) -> None:
    """Add the options of the kernel level.

    Args:
        add: A function that adds an option.
    """
    add(
        "--kernel-provider",
        metavar="NAME|MODULE:ATTR",
        help=(
            f"provider of the kernels that the kernel level tests: {', '.join(registry.NAMES)} or "
            "MODULE:ATTR, an object of your own (default: for each operation, the provider of "
            "the kernel that the server uses)"
        ),
    )
    add(
        "--full-shapes",
        action="store_true",
        help=(
            "on a CPU, test the numerics of the kernels at all sizes (default: without the large "
            "sizes)"
        ),
    )
