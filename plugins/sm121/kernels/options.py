"""The options of the kernel level."""

from sm121.core.options import AddOption
from sm121.kernels import registry


def add_options(add: AddOption) -> None:
    """Add the options of the kernel level.

    Args:
        add: Adds an option.
    """
    add(
        "--kernel-provider",
        metavar="NAME|MODULE:ATTR",
        help=(
            f"whose kernels the kernel level tests: {', '.join(registry.NAMES)} or an object of "
            "yours (default: of each operation the one that has the kernel of the kernel path)"
        ),
    )
    add(
        "--full-shapes",
        action="store_true",
        help="numerics at all sizes on a CPU too, where the large ones are left out by default",
    )
