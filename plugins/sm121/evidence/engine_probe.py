"""Asks an interpreter what is installed in its environment, without importing any of it. Runs
inside the engine's environment (``python -c``), which has nothing of this suite: standard library
only. A package is located by its import specification, because an engine on PYTHONPATH (as in the
development container) has no metadata.

Asked ``null`` on its standard input it prints one JSON object about what is installed. Asked a list
of registries of environment variables it prints, for each, whether the package is there and which
names it knows:

* a registry with ``module`` is a file of the package that holds a dictionary ``name`` of all
  variables (``vllm/envs.py``). It is loaded by itself where that works, since importing the whole
  package takes seconds and may fail for reasons of its own.
* one with ``suffixes`` is read from the package's sources: a variable that no source names is not
  read by it."""

import contextlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

_FIELD = re.compile(r"(?m)^(Name|Version):[ \t]*(\S+)")
_COMMIT = re.compile(r'"commit_id":\s*"([^"]+)"')


def _location(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.submodule_search_locations:
        return next(iter(spec.submodule_search_locations), None)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else None


def _constant(folder: str | None, file: str, name: str) -> str | None:
    if folder is None:
        return None
    try:
        text = Path(folder, file).read_text("utf-8")
    except OSError:
        return None
    # __commit_id__ = commit_id = 'g0123abc', and cuda: Optional[str] = '13.0'
    assigned = r"(?::[^=\n]+)?\s*=\s*(?:\w+\s*=\s*)?['\"]([^'\"]+)['\"]"
    match = re.search(rf"(?m)^{re.escape(name)}{assigned}", text)
    return match.group(1) if match else None


def _registered(folder: str, registry: dict[str, Any]) -> list[str]:
    path = Path(folder, registry["module"])
    try:
        spec: Any = importlib.util.spec_from_file_location("sm121_registry", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, AttributeError):
        stem = registry["module"].removesuffix(".py").replace("/", ".")
        module = importlib.import_module(f"{registry['package']}.{stem}")
    return [str(name) for name in getattr(module, registry["name"])]


def _named_in_sources(folder: str, registry: dict[str, Any]) -> list[str]:
    quoted = re.compile(rf"""["']({re.escape(registry["prefix"])}[A-Z0-9_]+)["']""")
    variables: set[str] = set()
    for path in Path(folder).rglob("*"):
        with contextlib.suppress(OSError):  # not ours to read, or gone
            if path.name.endswith(tuple(registry["suffixes"])) and path.is_file():
                variables.update(quoted.findall(path.read_text("utf-8", "replace")))
    return sorted(variables)


def _known(registry: dict[str, Any]) -> dict[str, Any]:
    folder = _location(registry["package"])
    names = None
    if folder is not None:
        names = (_registered if registry["module"] else _named_in_sources)(folder, registry)
    return {"prefix": registry["prefix"], "installed": folder is not None, "known": names}


def installed() -> dict[str, dict[str, str]]:
    """Versions of all distributions, and the commits of those whose metadata has one, by name."""
    packages: dict[str, str] = {}
    commits: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # `distribution.metadata` parses the description too, which takes ten times as long.
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        fields = dict(reversed(_FIELD.findall(text.partition("\n\n")[0])))
        name = re.sub(r"[-_.]+", "-", fields.get("Name", "")).lower()
        if not name or "Version" not in fields or name in packages:  # the first of a name counts
            continue
        packages[name] = fields["Version"]
        if commit := _COMMIT.search(distribution.read_text("direct_url.json") or ""):
            commits[name] = commit[1]
    return {"packages": packages, "commits": commits}


def _answer() -> dict[str, Any]:
    vllm, flashinfer, torch = _location("vllm"), _location("flashinfer"), _location("torch")
    return {
        "python": sys.version.split()[0],
        **installed(),
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


if __name__ == "__main__":
    question = json.load(sys.stdin)
    answer = _answer() if question is None else [_known(registry) for registry in question]
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
