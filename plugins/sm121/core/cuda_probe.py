"""Find the CUDA versions of torch, of the driver and of cuDNN, without importing torch.

The module runs in an engine's environment (``python -c``), so it imports only the standard library,
and it loads the same driver library as the engine. It prints the result of `find_cuda_versions` as
JSON.
"""

import ctypes
import importlib.util
import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path

#: The CUDA version in torch's version.py, for example ``cuda: Optional[str] = '13.0'``. The value
#: is None in a build without CUDA.
_CUDA = re.compile(r"(?m)^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]")


def find_cuda_versions() -> dict[str, str | int | None]:
    """Return the CUDA versions.

    Returns:
        A dictionary with three keys. ``toolkit`` is the version with which torch was built, for
        example "13.0"; None if torch is missing or was built without CUDA. ``driver`` is the result
        of ``cuDriverGetVersion``, for example 13000; None if there is no driver. ``cudnn`` is the
        version of the installed package, for example "9.15.1.9", or else the value of the image's
        variable ``CUDNN_VERSION``; None if both are missing.
    """
    return {"toolkit": _toolkit(), "driver": _driver(), "cudnn": _cudnn()}


def _toolkit() -> str | None:
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # sys.modules contains a torch module without a __spec__
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
    except (OSError, AttributeError):  # the library is missing, or lacks this function
        return None
    return number.value if not failed and number.value > 0 else None


def _cudnn() -> str | None:
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # NGC's images have cuDNN as a system package, and its version in a variable.
    return os.environ.get("CUDNN_VERSION") or None


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(find_cuda_versions()) + "\n")
