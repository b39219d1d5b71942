"""Where an interpreter would import packages from, and of which versions, without an import. Runs
in an engine's environment too (``python -c``): standard library only. Asked a list of names as JSON
on its standard input, it prints an object as JSON."""

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_VERSION = re.compile(r"(?m)^__version__ = .*?([0-9][0-9A-Za-z.+!-]*)")


def look(names: list[str]) -> dict[str, list[str | None]]:
    """By name the folder, None: there is none, and the version, None: not known."""
    answer: dict[str, list[str | None]] = {}
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # a module of that name was made by hand
            spec = None
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        if spec is not None and not folders and spec.origin is not None:
            folders = [str(Path(spec.origin).parent)]
        folder = os.path.realpath(folders[0]) if folders else None
        answer[name] = [folder, None if folder is None else _version(name, Path(folder))]
    return answer


def _version(name: str, folder: Path) -> str | None:
    """A checkout on PYTHONPATH has no metadata, and that of an installed one is another's."""
    file = folder / "_version.py"
    if file.is_file() and (match := _VERSION.search(file.read_text("utf-8"))):
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
    """Names of distributions that may have a package. The index of all of them takes a second."""
    yield from (name, f"{name}-python", f"{name}-cpu")
    yield from importlib.metadata.packages_distributions().get(name, ())


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(look(json.load(sys.stdin))) + "\n")
