"""The options of the matrix."""

from sm121.core.options import AddOption


def add_options(add: AddOption) -> None:
    """Add the options of the matrix.

    Args:
        add: A function that adds an option.
    """
    add(
        "--matrix",
        metavar="N|full|none",
        help=(
            "test every combination of the values of any N axes in at least one cell. 1: each "
            "value once; 2: each pair; ...; full: every combination of all axes; none: no cells "
            "(default: the profile's N, usually 2)"
        ),
    )
    add(
        "--matrix-axes",
        metavar="NAME|PATH",
        help=(
            "axes of the matrix: a file of fixtures/matrix, or a path (default: the profile's axes)"
        ),
    )
