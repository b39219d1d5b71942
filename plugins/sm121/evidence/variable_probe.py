"""Asks an engine's own environment which of some variables it knows.

Runs inside the engine's environment (``python -c``), which has nothing of this suite: standard
library only. Reads one JSON list of registries from its standard input and prints, for each,
whether the package is there and which names it knows:

* a registry with ``module`` is a file of the package that holds a dictionary ``name`` of all
  variables (``vllm/envs.py``). It is loaded by itself where that works, since importing the whole
  package takes seconds and may fail for reasons of its own.
* one with ``suffixes`` is read from the package's sources: a variable that no source names is not
  read by it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from typing import Any


def _folder(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return next(iter(spec.submodule_search_locations), None)
    return os.path.dirname(spec.origin) if spec.origin else None  # noqa: PTH120


def _registered(folder: str, registry: dict[str, Any]) -> list[str]:
    """The keys of the package's own dictionary of variables."""
    path = os.path.join(folder, registry["module"])  # noqa: PTH118
    try:
        spec = importlib.util.spec_from_file_location("sm121_registry", path)
        if spec is None or spec.loader is None:
            raise ImportError(path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, AttributeError):
        stem = registry["module"].removesuffix(".py").replace("/", ".")
        module = importlib.import_module(f"{registry['package']}.{stem}")
    return [str(name) for name in getattr(module, registry["name"])]


def _named_in_sources(folder: str, registry: dict[str, Any]) -> list[str]:
    """The variables of the prefix that stand as a string in the package's sources."""
    quoted = re.compile(rf"""["']({re.escape(registry["prefix"])}[A-Z0-9_]+)["']""")
    found: set[str] = set()
    for directory, _, names in os.walk(folder):
        for name in names:
            if name.endswith(tuple(registry["suffixes"])):
                path = os.path.join(directory, name)  # noqa: PTH118
                try:
                    with open(path, encoding="utf-8", errors="replace") as source:  # noqa: PTH123
                        found.update(quoted.findall(source.read()))
                except OSError:
                    continue
    return sorted(found)


def main() -> None:
    """Prints the answer."""
    answer = []
    for registry in json.load(sys.stdin):
        folder = _folder(registry["package"])
        known = None
        if folder is not None:
            known = (_registered if registry["module"] else _named_in_sources)(folder, registry)
        answer.append(
            {"prefix": registry["prefix"], "installed": folder is not None, "known": known}
        )
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


main()
