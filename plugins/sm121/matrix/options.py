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
            "cover every combination of the values of N axes with at least one cell: 1, 2 "
            "(pairs), ..., full; none: no cells (default: the profile's, 2)"
        ),
    )
    add("--matrix-axes", metavar="NAME|PATH", help="the axes (default: the profile's)")
