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


def conflict(error: BaseException) -> str | None:
    """Return an error message if a conftest.py or another plugin has an option ``--arch``, too.

    Args:
        error: The error that ended the import of a conftest.py, the collection of a folder, or
            `add_options`.

    Returns:
        The message, with the file of a conftest.py; None if the error has another cause.
    """
    if not isinstance(error, ValueError):
        return None
    # Pytest's message contains these words.
    if f"'{_NAME}'" not in str(error) or "already" not in str(error):
        return None
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    others = [os.path.relpath(file) for file in files if file.name == "conftest.py"]
    other = others[-1] if others else "another plugin"
    return (
        f"{other}: expected an option of another name than {_NAME}, which the plugin "
        "pytest_gpu_arch has. Rename it, or leave out the plugin: -p no:pytest_gpu_arch"
    )
