"""The options of the matrix."""

from dataclasses import dataclass

from sm121.core.option_values import checked_by
from sm121.core.options import option
from sm121.matrix import covering


def _strength(text: str) -> str:
    covering.parse_strength(text)
    return text


@dataclass(frozen=True)
class MatrixOptions:
    """The options of the matrix."""

    strength: str | None = option(
        "--matrix",
        checked_by(_strength, wrong=("0", "x", "-1", "9" * 5000)),
        metavar="N|full|none",
        help=(
            "test every combination of the values of any N axes in at least one cell. 1: each "
            "value once; 2: each pair; ...; full: every combination of all axes; none: no cells "
            "(default: the profile's N, usually 2)"
        ),
    )
    #: The axes of the matrix, by name or path.
    axes: str | None = option(
        "--matrix-axes",
        metavar="NAME|PATH",
        help=(
            "axes of the matrix: a file of fixtures/matrix, or a path (default: the profile's axes)"
        ),
    )
