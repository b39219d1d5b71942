"""Run scripts in an engine's interpreter, in the environment of a server."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sm121.core import errors, redaction

#: A script that prints the files of modules, with and without PYTHONPATH and the working directory.
_IMPORTS = """
import importlib, importlib.util as u, json, os, site, sys
def origins():
    found = {}
    for name in names:
        found[name] = None
        spec = u.find_spec(name)
        if spec is None:
            continue
        folders = list(spec.submodule_search_locations or [])
        if spec.origin:
            found[name] = spec.origin
        elif folders:
            found[name] = folders[0]
    return found
names = json.load(sys.stdin)
imported = origins()
added = {os.path.abspath(p) for p in ["", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]}
sys.path[:] = [p for p in sys.path if os.path.abspath(p) not in added]
users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
for folder in [*site.getsitepackages(), *users]:
    site.addsitedir(folder)
importlib.invalidate_caches()
print(json.dumps({"installed": origins(), "origins": imported}))
"""


class NoAnswer(errors.Sm121Error):
    """A script that `ask` ran has failed. The message contains the interpreter and the reason."""


def ask(
    python: str,
    script: str | Path,
    environment: Mapping[str, str],
    question: object = None,
    *,
    within_s: float = 60.0,
) -> Any:
    """Run a script, and return the JSON value that it prints in its last line.

    Args:
        python: The interpreter.
        script: The source, or the path of a file.
        environment: The whole environment of the script.
        question: Data for the script's standard input, as JSON.
        within_s: The time limit, in seconds.

    Raises:
        NoAnswer: The script cannot be started, takes too long, fails, or prints no JSON.
    """
    words = [python, str(script)] if isinstance(script, Path) else [python, "-c", script]
    try:
        run = subprocess.run(
            words,
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=within_s,
            env=dict(environment),
        )
    except OSError as error:
        raise NoAnswer(f"{python} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"{python} did not answer within {within_s:g} s") from error
    lines = run.stdout.strip().splitlines()
    if run.returncode != 0 or not lines:
        messages = run.stderr.strip().splitlines()
        last = messages[-1] if messages else "no message"
        raise NoAnswer(f"{python} ended with {run.returncode}: {redaction.redact(last)[:200]}")
    try:
        return json.loads(lines[-1])  # a sitecustomize module may print lines before the last one
    except ValueError as error:
        raise NoAnswer(f"{python} answered something else: {lines[-1][:200]}") from error


def packages(
    python: str, names: Sequence[str], environment: Mapping[str, str]
) -> dict[str, list[str | None]]:
    """Find packages in an interpreter's environment, without importing them.

    Args:
        python: The interpreter.
        names: The names of the packages.
        environment: The whole environment of the interpreter.

    Returns:
        For each name, a list of the folder (None if the package is missing) and the version (None
        if unknown).

    Raises:
        NoAnswer: The interpreter fails, or gives no answer in time.
    """
    source = (files("sm121.core") / "package_probe.py").read_text("utf-8")
    return dict(ask(python, source, environment, list(names)))


def package(python: str, name: str, environment: Mapping[str, str]) -> dict[str, str | None] | None:
    """Find one package in an interpreter's environment, without importing it.

    Args:
        python: The interpreter.
        name: The name of the package.
        environment: The whole environment of the interpreter.

    Returns:
        A dictionary with ``version`` (None if unknown) and ``folder``; None if the package is
        missing.

    Raises:
        NoAnswer: The interpreter fails, or gives no answer in time.
    """
    folder, version = packages(python, [name], environment)[name]
    if folder is None:
        return None
    return {"version": version, "folder": folder}


@dataclass(frozen=True)
class UnmetRequirement:
    """A requirement of an installed package that another installed package does not meet."""

    package: str
    version: str
    #: The requirement in the package's metadata, such as ``torch==2.13.0``.
    requirement: str
    #: The installed version of the required package.
    installed: str


def unmet_requirements(
    python: str, watched: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> list[UnmetRequirement]:
    """Compare the requirements of packages with the versions in an interpreter's environment.

    Args:
        python: The interpreter.
        watched: For each package, the names of those required packages whose versions to check.
        environment: The whole environment of the interpreter.

    Returns:
        The requirements that are not met; empty if the interpreter does not have `packaging`.

    Raises:
        NoAnswer: The interpreter fails, or gives no answer in time.
    """
    source = (files("sm121.core") / "requirement_probe.py").read_text("utf-8")
    question = {package: list(names) for package, names in watched.items()}
    return [UnmetRequirement(**entry) for entry in ask(python, source, environment, question)]


@dataclass(frozen=True)
class Imports:
    """The files that an interpreter imports."""

    #: The file of each module; None if the interpreter does not have the module.
    origins: dict[str, str | None]
    #: The files that would be imported without PYTHONPATH and the working directory. Editable
    #: installs count.
    installed: dict[str, str | None]


def imports(python: str, modules: Sequence[str], environment: Mapping[str, str]) -> Imports:
    """Find the files that an interpreter would import.

    Args:
        python: The interpreter.
        modules: The names of top-level modules.
        environment: The whole environment of the interpreter.

    Raises:
        NoAnswer: The interpreter fails, or gives no answer in time.
    """
    answer = ask(python, _IMPORTS, environment, list(modules))
    return Imports(answer["origins"], answer["installed"])


def misplaced(found: Imports, checkouts: Mapping[str, str]) -> list[str]:
    """Return a line for each module that would be imported from an unexpected place.

    Args:
        found: The files of the modules.
        checkouts: For each module, the folder of its checkout. If the module is in this folder, it
            must be imported from there, else from the packages that are installed in the
            interpreter's environment.
    """
    lines = []
    for name, origin in found.origins.items():
        if origin is None:
            continue
        checkout = Path(checkouts[name]) if name in checkouts else None
        if checkout is not None and (checkout / name).is_dir():
            if not Path(origin).is_relative_to(checkout):
                lines.append(
                    f"{name}: expected the one of the checkout {checkout}, got {origin} "
                    f"(put {checkout} on PYTHONPATH)"
                )
            continue
        file = found.installed[name]
        if file is not None and Path(origin).resolve() == Path(file).resolve():
            continue
        required = file or "an installed package (there is none)"
        lines.append(
            f"{name}: expected {required}, got {origin} "
            "(unset PYTHONPATH, or name the checkout in the profile's engine.checkouts)"
        )
    return lines
