"""Report what is installed in an interpreter's environment, without importing packages.

The module runs in the engine's environment (``python -c``). Because this environment does not
contain the suite, the module uses only the standard library. A package is located by its import
specification, because an engine on PYTHONPATH (as in the development container) has no metadata.

If standard input is ``null``, the program prints one JSON object about the installed packages. If
standard input is a list of registries of environment variables, the program prints for each
registry whether its package is installed, and the names of the variables that the package reads:

* A registry with ``module`` is a file of the package with a dictionary ``name`` of all variables
  (``vllm/envs.py``). The file is loaded separately if possible, because importing the whole package
  takes seconds and may fail for other reasons.
* For a registry with ``suffixes``, the package's sources are searched for names of variables. A
variable whose name is in no source file cannot be read by the package.
"""

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
    """Return the folder of a package or of a module, or None if it is not installed."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        return folder
    if spec.origin:
        return str(Path(spec.origin).parent)
    return None


def _constant(folder: str | None, file: str, name: str) -> str | None:
    """Return the value of a string constant in a source file, or None."""
    if folder is None:
        return None
    try:
        text = Path(folder, file).read_text("utf-8")
    except OSError:
        return None
    # The pattern matches, for example, ``__commit_id__ = commit_id = 'g0123abc'`` and ``cuda:
    # Optional[str] = '13.0'``.
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
        with contextlib.suppress(OSError):  # the file belongs to another user, or was removed
            if path.name.endswith(tuple(registry["suffixes"])) and path.is_file():
                variables.update(quoted.findall(path.read_text("utf-8", "replace")))
    return sorted(variables)


def _known(registry: dict[str, Any]) -> dict[str, Any]:
    folder = _location(registry["package"])
    names = None
    if folder is not None and registry["module"]:
        names = _registered(folder, registry)
    elif folder is not None:
        names = _named_in_sources(folder, registry)
    return {"prefix": registry["prefix"], "installed": folder is not None, "known": names}


def installed() -> dict[str, dict[str, str]]:
    """Return the installed distributions, by their normalised names.

    Returns:
        ``packages``: the versions; ``commits``: the commits, for distributions whose metadata has
        one.
    """
    packages: dict[str, str] = {}
    commits: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # `distribution.metadata` would also parse the description, which takes ten times as long.
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        fields = dict(reversed(_FIELD.findall(text.partition("\n\n")[0])))
        name = re.sub(r"[-_.]+", "-", fields.get("Name", "")).lower()
        # If a name has several distributions, Python imports the first one.
        if not name or "Version" not in fields or name in packages:
            continue
        packages[name] = fields["Version"]
        commit = _COMMIT.search(distribution.read_text("direct_url.json") or "")
        if commit is not None:
            commits[name] = commit[1]
    return {"packages": packages, "commits": commits}


def _describe_packages() -> dict[str, Any]:
    vllm = _location("vllm")
    flashinfer = _location("flashinfer")
    torch = _location("torch")
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


def _answer_to(question: list[dict[str, Any]] | None) -> Any:
    if question is None:
        return _describe_packages()
    return [_known(registry) for registry in question]


if __name__ == "__main__":
    answer = _answer_to(json.load(sys.stdin))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
