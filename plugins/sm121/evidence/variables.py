"""Which variables the installed engine knows, by its own registry and not by a list of ours."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from pydantic import Field, model_validator

from sm121.core.data_file import DataTable

_TIMEOUT_S = 60.0
_ASKED_OF = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "HOME", "LD_LIBRARY_PATH")


class Registry(DataTable):
    """Where the variables of one prefix are known."""

    prefix: str = Field(pattern=r"^[A-Z][A-Z0-9]*_$")
    package: str
    """The import name of the package that reads them."""
    module: str | None = None
    """File of the package that holds the dictionary `name` of all of them."""
    name: str | None = None
    suffixes: tuple[str, ...] = ()
    """Without a dictionary: the sources that are searched for the variables' names."""
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _one_way(self) -> Registry:
        if (self.module is None) != (self.name is None) or (self.module is None) == (
            not self.suffixes
        ):
            raise ValueError("expected either module and name, or suffixes")
        return self


@dataclass(frozen=True)
class Knowledge:
    """What the engine's environment says of the variables of one prefix."""

    package: str
    installed: bool
    known: frozenset[str] | None
    """None where it could not be asked."""
    problem: str | None = None


def ask(
    python: str, environment: Mapping[str, str], registries: Sequence[Registry]
) -> dict[str, Knowledge]:
    """What the packages of an interpreter know, by prefix.

    The interpreter is started once for a set of registries; an answer is kept. Where it does not
    answer, `known` is None and `problem` says why.
    """
    kept = tuple((name, environment[name]) for name in _ASKED_OF if name in environment)
    return dict(_ask(python, kept, tuple(registries)))


@lru_cache(maxsize=16)
def _ask(
    python: str, environment: tuple[tuple[str, str], ...], registries: tuple[Registry, ...]
) -> tuple[tuple[str, Knowledge], ...]:
    source = (files("sm121.evidence") / "variable_probe.py").read_text("utf-8")
    question = json.dumps([registry.model_dump() for registry in registries])
    problem = None
    answers: list[dict[str, Any]] = []
    try:
        probe = subprocess.run(
            [python, "-c", source],
            input=question, env={**dict(environment), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"{python} did not answer ({error})"
    else:
        lines = probe.stdout.strip().splitlines()
        try:
            answers = json.loads(lines[-1]) if probe.returncode == 0 and lines else []
        except json.JSONDecodeError:
            answers = []
        if not answers:
            last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
            problem = f"{python} cannot read the engine's own list of variables: {last[:200]}"
    by_prefix = {answer["prefix"]: answer for answer in answers}
    result = []
    for registry in registries:
        answer = by_prefix.get(registry.prefix)
        known = None if answer is None or answer["known"] is None else frozenset(answer["known"])
        installed = answer is not None and bool(answer["installed"])
        result.append((registry.prefix, Knowledge(registry.package, installed, known, problem)))
    return tuple(result)
