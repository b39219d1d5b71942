"""The option of the command line."""

from collections.abc import Callable


def add_options(add: Callable[..., object]) -> None:
    """Add ``--arch``.

    Args:
        add: Adds an option: ``addoption`` of a group of pytest, or ``add_argument`` of argparse.
    """
    add("--arch", metavar="NAME", help="architecture of the target (default: detected)")
