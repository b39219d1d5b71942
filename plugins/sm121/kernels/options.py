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
            f"provider of the kernels that the kernel level tests: {', '.join(registry.NAMES)} "
            "or an object of yours (default: for each operation, the provider of the kernel in "
            "the kernel path)"
        ),
    )
    add(
        "--full-shapes",
        action="store_true",
        help=(
            "test numerics at all sizes on a CPU, too; by default the large sizes are left out "
            "there"
        ),
    )
