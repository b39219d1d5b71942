"""The engines that the suite can start (the values of ``--engine``), and their versions."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sm121.core import builds, engine_arguments, errors
from sm121.core.errors import UsageError
from sm121.engines import llama_cpp, protocol, sglang, vllm
from sm121.engines.protocol import Engine, TellsOptions

_ENGINES: dict[str, protocol.Engine] = {
    engine.name: engine for engine in (vllm.Vllm(), sglang.SGLang(), llama_cpp.LlamaCpp())
}


def names() -> tuple[str, ...]:
    """Return the names of the engines that can be started."""
    return tuple(_ENGINES)


def register(engine: protocol.Engine) -> None:
    """Add an engine, or replace the engine of the same name.

    Call it before pytest reads the options: from a conftest.py, or from a plugin that is loaded
    with ``-p``.

    Args:
        engine: The engine.
    """
    _ENGINES[engine.name] = engine


def engine(name: str) -> protocol.Engine:
    """Return the engine with a given name.

    Args:
        name: The name.

    Raises:
        UsageError: The suite has no engine of this name that it can start.
    """
    if name not in _ENGINES:
        raise UsageError(
            f"--engine {name}: expected one of {', '.join(names())}; "
            "any other OpenAI-compatible server can be attached with --base-url"
        )
    return _ENGINES[name]


@dataclass(frozen=True)
class Reserved:
    """An argument or a variable that only the suite may set."""

    #: The name in ``reserved_arguments`` or ``reserved_variables`` of the engine.
    name: str
    #: The word as the user wrote it, for example ``--api_key=x`` for the name ``--api-key``.
    written: str


def reserved(name: str, arguments: Iterable[str], variables: Iterable[str] = ()) -> Reserved | None:
    """Return the first argument or variable that only the suite may set; None if there is none.

    Args:
        name: The name of the engine.
        arguments: Arguments of its command line.
        variables: Names of environment variables.
    """
    known = engine(name)
    for argument in arguments:
        for option in engine_arguments.options([argument]):
            if option.name in known.reserved_arguments:
                return Reserved(option.name, argument)
    for variable in variables:
        if variable in known.reserved_variables:
            return Reserved(variable, variable)
    return None


@dataclass(frozen=True)
class Installed:
    """The version of an engine that will be started, or that a server runs."""

    #: The version in the engine's own files; None if they do not contain one.
    version: str | None = None
    #: The options of the engine's parser; None if the version is sufficient, or if there is no
    #: parser to query.
    options: frozenset[str] | None = None
    #: The name of the build that the server's log shows; None if it shows none.
    build: str | None = None

    @property
    def identity(self) -> str | None:
        """The engine's release or build (`builds.identity`)."""
        return builds.identity(self.version, self.options, self.build)


def installed(engine: Engine, python: str, environment: Mapping[str, str]) -> Installed:
    """Return the version of an engine that is installed.

    Args:
        engine: The engine.
        python: The engine's interpreter, or its program.
        environment: The whole environment in which the engine would run.

    Raises:
        UsageError: The engine is not installed in the interpreter.
    """
    version = engine.check_interpreter(python, environment)
    options = None
    if not builds.is_settled(version) and isinstance(engine, TellsOptions):
        with contextlib.suppress(errors.UsageError):  # without a parser, the options are unknown
            options = engine.options(python, environment)
    return Installed(version, options)
