"""The engines that the suite can start, by the name that ``--engine`` takes, and which it is: its
version, and the release or the build that it goes by."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from sm121.core import builds, errors
from sm121.core.errors import UsageError
from sm121.engines import llama_cpp, protocol, sglang, vllm
from sm121.engines.protocol import Engine, TellsOptions

_ENGINES: dict[str, protocol.Engine] = {
    engine.name: engine for engine in (vllm.Vllm(), sglang.SGLang(), llama_cpp.LlamaCpp())
}


def names() -> tuple[str, ...]:
    """The engines that can be started."""
    return tuple(_ENGINES)


def register(engine: protocol.Engine) -> None:
    """Add an engine, or replace the one of the same name. Call it from a conftest.py or from a
    plugin that is loaded with ``-p``: before the options are read."""
    _ENGINES[engine.name] = engine


def engine(name: str) -> protocol.Engine:
    """The engine of that name. Raises UsageError: the suite cannot start such an engine."""
    if name not in _ENGINES:
        raise UsageError(
            f"--engine {name}: expected one of {', '.join(names())}; "
            "any other OpenAI-compatible server can be attached with --base-url"
        )
    return _ENGINES[name]


@dataclass(frozen=True)
class Installed:
    """An engine that will be started, or a server's."""

    #: As it calls itself; None where its files do not say.
    version: str | None = None
    #: The parser's options; None where the version alone is enough, or no parser can be asked.
    options: frozenset[str] | None = None
    #: The build that a server's log shows.
    build: str | None = None

    @property
    def identity(self) -> str | None:
        """The release that it goes by (`builds.identity`)."""
        return builds.identity(self.version, self.options, self.build)


def installed(engine: Engine, python: str, environment: Mapping[str, str]) -> Installed:
    """The engine of an interpreter in that environment. Raises UsageError: there is none."""
    version, options = engine.check_interpreter(python, environment), None
    if not builds.is_settled(version) and isinstance(engine, TellsOptions):
        with contextlib.suppress(errors.UsageError):  # a parser that cannot be asked tells nothing
            options = engine.options(python, environment)
    return Installed(version, options)
