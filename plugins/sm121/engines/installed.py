"""Which engine it is: its version, and the release or the build that it goes by."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from sm121.core import builds, errors
from sm121.engines.protocol import Engine, TellsOptions


@dataclass(frozen=True)
class Installed:
    """An engine that will be started, or a server's."""

    #: As it calls itself; None where its files do not say.
    version: str | None = None
    #: The parser's options; None where the version alone tells what the engine is, or where the
    #: engine has no parser that can be asked.
    options: frozenset[str] | None = None
    #: The build that a server's log shows.
    build: str | None = None

    @property
    def identity(self) -> str | None:
        """The release that it goes by (`builds.identity`)."""
        return builds.identity(self.version, self.options, self.build)


def look(engine: Engine, python: str, environment: Mapping[str, str]) -> Installed:
    """The engine of an interpreter in that environment. Raises UsageError: there is none."""
    version, options = engine.check_interpreter(python, environment), None
    if not builds.is_settled(version) and isinstance(engine, TellsOptions):
        with contextlib.suppress(errors.UsageError):  # a parser that cannot be asked tells nothing
            options = engine.options(python, environment)
    return Installed(version, options)
