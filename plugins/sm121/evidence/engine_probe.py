"""Asks an interpreter what is installed in its environment, without importing any of it.

Runs inside the engine's environment (``python -c``), which has nothing of this suite: standard
library only. Prints one JSON object. A package is located by its import specification, because an
engine on PYTHONPATH (as in the development container) has no metadata.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from typing import Any


def _location(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return next(iter(spec.submodule_search_locations), None)
    return os.path.dirname(spec.origin) if spec.origin else None  # noqa: PTH120


def _constant(folder: str | None, file: str, name: str) -> str | None:
    """The text assigned to a name in a source file; generated version files are not worth an
    import."""
    if folder is None:
        return None
    path = os.path.join(folder, file)  # noqa: PTH118
    try:
        with open(path, encoding="utf-8") as source:  # noqa: PTH123
            text = source.read(100_000)
    except OSError:
        return None
    # __commit_id__ = commit_id = 'g0123abc', and cuda: Optional[str] = '13.0'
    assigned = r"(?::[^=\n]+)?\s*=\s*(?:\w+\s*=\s*)?['\"]([^'\"]+)['\"]"
    match = re.search(rf"(?m)^{re.escape(name)}{assigned}", text)
    return match.group(1) if match else None


def _direct_url(distribution: importlib.metadata.Distribution) -> Any:
    text = distribution.read_text("direct_url.json")
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def main() -> None:
    """Prints the answer."""
    packages: dict[str, str] = {}
    commits: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if not name:
            continue
        packages.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
        url = _direct_url(distribution)
        commit = ((url or {}).get("vcs_info") or {}).get("commit_id")
        if commit:
            commits[re.sub(r"[-_.]+", "-", name).lower()] = commit
    vllm, flashinfer, torch = _location("vllm"), _location("flashinfer"), _location("torch")
    sys.stdout.write(
        json.dumps(
            {
                "python": sys.version.split()[0],
                "packages": packages,
                "commits": commits,
                "locations": {"vllm": vllm, "flashinfer": flashinfer},
                "versions": {
                    "vllm": _constant(vllm, "_version.py", "__version__"),
                    "flashinfer": _constant(flashinfer, "_build_meta.py", "__version__"),
                },
                "built_from": {
                    "vllm": _constant(vllm, "_version.py", "__commit_id__"),
                    "flashinfer": _constant(flashinfer, "_build_meta.py", "__git_version__"),
                },
                "cuda": _constant(torch, "version.py", "cuda"),
            }
        )
    )


main()
