"""Find the CUDA versions of torch, of the driver and of cuDNN, without importing torch.

The module runs in an engine's environment (``python -c``), so it imports the standard library only,
and the driver's library is the one that the engine loads. It prints the result of `look` as JSON.
"""

import ctypes
import importlib.util
import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path

#: As torch's version.py has it: ``cuda: Optional[str] = '13.0'``; None in a build without CUDA.
_CUDA = re.compile(r"(?m)^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]")


def look() -> dict[str, str | int | None]:
    """Return the CUDA versions.

    Returns:
        ``toolkit``: the version that torch was built with, such as "13.0"; None without torch, or
        with a build of it that has no CUDA. ``driver``: the number of ``cuDriverGetVersion``, such
        as 13000; None without a driver. ``cudnn``: the version of the package that the engine has,
        such as "9.15.1.9", else of the image's variable; None without either.
    """
    return {"toolkit": _toolkit(), "driver": _driver(), "cudnn": _cudnn()}


def _toolkit() -> str | None:
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # a module of that name was made by hand
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder) / "version.py"
        match = _CUDA.search(file.read_text("utf-8")) if file.is_file() else None
        if match is not None:
            return match[1]
    return None


def _driver() -> int | None:
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # no library, or one that is something else
        return None
    return number.value if not failed and number.value > 0 else None


def _cudnn() -> str | None:
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # Images of NGC have cuDNN in the system, with its version in a variable.
    return os.environ.get("CUDNN_VERSION") or None


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(look()) + "\n")
