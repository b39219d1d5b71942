"""Find the folders and versions of packages without importing them.

The module also runs in an engine's environment (``python -c``), so it imports only the standard
library. In this case, it reads a list of names as JSON from standard input, and prints the result
of `find_packages` as JSON.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: The version in a file that setuptools_scm writes.
_VERSION = re.compile(r"(?m)^__version__ = .*?([0-9][0-9A-Za-z.+!-]*)")


def find_packages(names: list[str]) -> dict[str, list[str | None]]:
    """Find the folders and versions of packages.

    Args:
        names: Names of top-level packages.

    Returns:
        For each name, a list of the folder (None if the package is missing) and the version (None
        if unknown).
    """
    answer: dict[str, list[str | None]] = {}
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # sys.modules contains a module of that name without a __spec__
            spec = None
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        if spec is not None and not folders and spec.origin is not None:
            folders = [str(Path(spec.origin).parent)]
        folder = os.path.realpath(folders[0]) if folders else None
        version = _version(name, Path(folder)) if folder is not None else None
        answer[name] = [folder, version]
    return answer


def _version(name: str, folder: Path) -> str | None:
    """Return the version of the package in a folder, or None.

    The metadata of an installed package are not used for a checkout on PYTHONPATH, which they do
    not describe.
    """
    file = folder / "_version.py"
    match = _VERSION.search(file.read_text("utf-8")) if file.is_file() else None
    if match is not None:
        return match[1]
    for distribution in _distributions(name):
        try:
            metadata = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if os.path.realpath(str(metadata.locate_file(name))) == str(folder):
            return metadata.version
    return None


def _distributions(name: str) -> Iterator[str]:
    """Yield the names of distributions that may contain a package, the most likely ones first."""
    yield from (name, f"{name}-python", f"{name}-cpu")
    # Building the index of all distributions takes a second, so it is the last resort.
    yield from importlib.metadata.packages_distributions().get(name, ())


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(find_packages(json.load(sys.stdin))) + "\n")
