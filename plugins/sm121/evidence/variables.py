"""Find the environment variables that the installed engine reads, in the engine's own files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from pydantic import Field, model_validator

from sm121.core import data_file, interpreter

#: The variables that determine which packages an interpreter finds.
_OF_THE_INTERPRETER = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "HOME",
    "LD_LIBRARY_PATH",
)


class Registry(data_file.DataTable):
    """Where to find a package's environment variables that have one prefix."""

    prefix: str = Field(pattern=r"^[A-Z][A-Z0-9]*_$")
    package: str
    """The import name of the package that reads the variables."""
    module: str | None = None
    """The package's file with the dictionary `name` of all variables."""
    name: str | None = None
    suffixes: tuple[str, ...] = ()
    """If there is no dictionary, the source files with these suffixes are searched for names of
    variables."""
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _has_one_list(self) -> "Registry":
        has_module = self.module is not None
        has_name = self.name is not None
        has_suffixes = bool(self.suffixes)
        if has_module != has_name or has_module == has_suffixes:
            raise ValueError("registry: expected either module and name, or suffixes")
        return self


@dataclass(frozen=True)
class Knowledge:
    """What is known about the environment variables with one prefix that the engine reads.

    Attributes:
        installed: Whether the package is installed.
        known: The names of the variables; None if they could not be read.
        problem: The reason why they could not be read.
    """

    installed: bool
    known: frozenset[str] | None
    problem: str | None = None


def ask(
    python: str, environment: Mapping[str, str], registries: Sequence[Registry]
) -> dict[str, Knowledge]:
    """Find the variables that an interpreter's packages read.

    The interpreter is started once for a set of registries; the result is cached.

    Args:
        python: The interpreter.
        environment: The interpreter's environment.
        registries: Where to find the packages' variables.

    Returns:
        The knowledge for each prefix. If the interpreter fails, `Knowledge.problem` has the reason.
    """
    relevant: list[tuple[str, str]] = []
    for name in _OF_THE_INTERPRETER:
        if name in environment:
            relevant.append((name, environment[name]))
    return _ask(python, tuple(relevant), tuple(registries))


@lru_cache(maxsize=16)
def _ask(
    python: str, environment: tuple[tuple[str, str], ...], registries: tuple[Registry, ...]
) -> dict[str, Knowledge]:
    source = (files("sm121.evidence") / "engine_probe.py").read_text("utf-8")
    variables = {**dict(environment), "PYTHONDONTWRITEBYTECODE": "1"}
    question = [registry.model_dump() for registry in registries]
    try:
        answers = interpreter.ask(python, source, variables, question)
    except interpreter.NoAnswer as error:
        problem = f"the engine's own list of variables cannot be read: {error}"
        unanswered = Knowledge(installed=False, known=None, problem=problem)
        return {registry.prefix: unanswered for registry in registries}
    by_prefix: dict[str, Knowledge] = {}
    for registry, answer in zip(registries, answers, strict=True):
        names = answer["known"]
        known = None if names is None else frozenset(names)
        by_prefix[registry.prefix] = Knowledge(answer["installed"], known)
    return by_prefix
