"""Where an interpreter would import packages from, without importing any of them. Runs in the
engine's environment too (``python -c``), which has nothing of this suite: standard library only.
Asked a list of names as JSON on its standard input, it prints an object as JSON."""

import importlib.metadata
import importlib.util
import json
import os
import sys


def look(names: list[str]) -> dict[str, list[str | None]]:
    answer: dict[str, list[str | None]] = {}
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # a module of that name was made by hand
            spec = None
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        folder = os.path.realpath(folders[0]) if folders else None
        answer[name] = [folder, _version(name, folder)]
    return answer


def _version(name: str, folder: str | None) -> str | None:
    for distribution in (name, f"{name}-python", f"{name}-cpu"):
        try:
            metadata = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if folder == os.path.realpath(str(metadata.locate_file(name))):
            return metadata.version
    return None


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(look(json.load(sys.stdin))) + "\n")
