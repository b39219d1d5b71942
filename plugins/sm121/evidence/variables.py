"""Which environment variables the installed engine knows, as the engine itself lists them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from pydantic import Field, model_validator

from sm121.core import data_file, interpreter

_ASKED_OF = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "HOME", "LD_LIBRARY_PATH")


class Registry(data_file.DataTable):
    """Where the variables with one prefix are listed."""

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
    def _one_way(self) -> "Registry":
        if (self.module is None) != (self.name is None) or (self.module is None) == (
            not self.suffixes
        ):
            raise ValueError("expected either module and name, or suffixes")
        return self


@dataclass(frozen=True)
class Knowledge:
    """What the engine's environment says of the variables of one prefix."""

    installed: bool
    known: frozenset[str] | None
    """None where it could not be asked."""
    problem: str | None = None


def ask(
    python: str, environment: Mapping[str, str], registries: Sequence[Registry]
) -> dict[str, Knowledge]:
    """What the packages of an interpreter know, by prefix; it is started once for a set of
    registries. Where it does not answer, `known` is None and `problem` says why."""
    relevant = tuple((name, environment[name]) for name in _ASKED_OF if name in environment)
    return _ask(python, relevant, tuple(registries))


@lru_cache(maxsize=16)
def _ask(
    python: str, environment: tuple[tuple[str, str], ...], registries: tuple[Registry, ...]
) -> dict[str, Knowledge]:
    source = (files("sm121.evidence") / "engine_probe.py").read_text("utf-8")
    variables = {**dict(environment), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        answers = interpreter.ask(
            python, source, variables, [registry.model_dump() for registry in registries]
        )
    except interpreter.NoAnswer as error:
        problem = f"the engine's own list of variables cannot be read: {error}"
        return {r.prefix: Knowledge(False, None, problem) for r in registries}
    return {
        registry.prefix: Knowledge(
            answer["installed"],
            None if answer["known"] is None else frozenset(answer["known"]),
        )
        for registry, answer in zip(registries, answers, strict=True)
    }
