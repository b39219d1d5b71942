"""Asking an engine's interpreter, in the environment that a server is started with."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sm121.core import errors, redaction

# What is installed is found without PYTHONPATH and the working directory.
_IMPORTS = """
import importlib, importlib.util as u, json, os, site, sys
def origins():
    found = {}
    for name in names:
        spec = u.find_spec(name)
        places = list(spec.submodule_search_locations or []) if spec else []
        found[name] = spec.origin or places[0] if spec and (spec.origin or places) else None
    return found
names = json.load(sys.stdin)
seen = origins()
added = {os.path.abspath(p) for p in ["", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]}
sys.path[:] = [p for p in sys.path if os.path.abspath(p) not in added]
users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
for folder in [*site.getsitepackages(), *users]:
    site.addsitedir(folder)
importlib.invalidate_caches()
print(json.dumps({"installed": origins(), "origins": seen}))
"""


class NoAnswer(errors.Sm121Error):
    """An interpreter that was asked something did not answer. The message names it and says why."""


def ask(
    python: str,
    script: str | Path,
    environment: Mapping[str, str],
    question: object = None,
    *,
    within_s: float = 60.0,
) -> Any:
    """What a script (its source, or its file) prints as JSON in its last line, when ``python`` runs
    it in that whole environment, with the question as JSON on its standard input. Raises NoAnswer:
    it cannot be started, takes longer than ``within_s`` seconds, fails, or prints no JSON."""
    try:
        run = subprocess.run(
            [python, str(script)] if isinstance(script, Path) else [python, "-c", script],
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
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoAnswer(f"{python} ended with {run.returncode}: {redaction.redact(last)[:200]}")
    try:
        return json.loads(lines[-1])  # a sitecustomize may print before it
    except ValueError as error:
        raise NoAnswer(f"{python} answered something else: {lines[-1][:200]}") from error


def packages(
    python: str, names: Sequence[str], environment: Mapping[str, str]
) -> dict[str, list[str | None]]:
    """Folder (None: there is none) and version (None: not known) of packages. Raises NoAnswer."""
    source = (files("sm121.core") / "package_probe.py").read_text("utf-8")
    return dict(ask(python, source, environment, list(names)))


def package(python: str, name: str, environment: Mapping[str, str]) -> dict[str, str | None] | None:
    """Version (None: not known) and folder of a package; None: there is none. Raises NoAnswer."""
    folder, version = packages(python, [name], environment)[name]
    return None if folder is None else {"version": version, "folder": folder}


@dataclass(frozen=True)
class Imports:
    """From where an interpreter imports."""

    #: File of each module, None for one that it does not have.
    origins: dict[str, str | None]
    #: The same for what is installed in its environment, also as an editable install.
    installed: dict[str, str | None]


def imports(python: str, modules: Sequence[str], environment: Mapping[str, str]) -> Imports:
    """Where ``python`` would import each module from. Raises NoAnswer: it does not answer."""
    answer = ask(python, _IMPORTS, environment, list(modules))
    return Imports(answer["origins"], answer["installed"])


def misplaced(found: Imports, checkouts: Mapping[str, str]) -> list[str]:
    """Modules that do not come from the checkout expected, where there is one, else from what is
    installed in the interpreter's environment; a line each."""
    wrong = []
    for name, origin in found.origins.items():
        if origin is None:
            continue
        checkout = Path(checkouts[name]) if name in checkouts else None
        if checkout is not None and (checkout / name).is_dir():
            if not Path(origin).is_relative_to(checkout):
                wrong.append(
                    f"{name}: required from the checkout {checkout}, seen {origin} "
                    f"(put {checkout} on PYTHONPATH)"
                )
        elif (file := found.installed[name]) is None or (
            Path(origin).resolve() != Path(file).resolve()
        ):
            required = file or "an installed package, of which there is none"
            wrong.append(
                f"{name}: required from {required}, seen {origin} "
                "(unset PYTHONPATH, or name the checkout in the profile's engine.checkouts)"
            )
    return wrong
