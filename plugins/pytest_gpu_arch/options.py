"""The command-line option ``--arch``."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path

_NAME = "--arch"


def add_options(add: Callable[..., object]) -> None:
    """Add ``--arch``.

    Args:
        add: A function that adds an option: ``addoption`` of a pytest option group, or
            ``add_argument`` of argparse.
    """
    add(_NAME, metavar="NAME", help="architecture of the target (default: detected)")


def of_a_conftest(error: BaseException) -> str | None:
    """Return an error message about an option of the same name in a conftest.py.

    Args:
        error: The error that ended the import of a conftest.py or the collection of a folder.

    Returns:
        The message with the file; None if the error has another cause.
    """
    if not isinstance(error, ValueError) or f"'{_NAME}'" not in str(error):  # argparse raises it
        return None
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    others = [file for file in files if file.name == "conftest.py"]
    if not others:
        return None
    return (
        f"{os.path.relpath(others[-1])}: expected an option of another name than {_NAME}, which "
        "the plugin pytest_gpu_arch has. Rename it, or leave out the plugin: "
        "-p no:pytest_gpu_arch"
    )
