"""The protocols of engine modules. A new engine is one more module that satisfies `Engine`."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from sm121.core.configuration import Rank, ServerConfiguration


class Engine(Protocol):
    """How one kind of engine is started. No method starts anything itself."""

    name: str
    #: Arguments that the suite sets itself, so that users may not set them.
    reserved_arguments: tuple[str, ...]
    #: Variables that the suite sets itself, so that users may not set them.
    reserved_variables: tuple[str, ...]

    def check_interpreter(self, python: str, environment: Mapping[str, str]) -> str | None:
        """Return the version of the engine, or None if its files do not say.

        Args:
            python: The interpreter that would run it, or the program itself.
            environment: The whole environment in which it would run.

        Raises:
            UsageError: The interpreter is missing or has no such engine.
        """

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        """Return the command line. It contains no secret.

        Args:
            configuration: The configuration of the server.
            port: The port of 127.0.0.1 at which it must listen.
        """

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        """Return the whole environment of the engine's process.

        Args:
            configuration: The configuration of the server.
            api_key: The key that it must require.
        """


@runtime_checkable
class Profiling(Protocol):
    """An engine whose kernels can be profiled while it serves."""

    def can_profile(self, python: str, environment: Mapping[str, str]) -> bool:
        """Return whether an engine can be profiled, with `ServerConfiguration.traces`.

        Args:
            python: The interpreter of the engine.
            environment: Its whole environment.
        """


@runtime_checkable
class Spanning(Protocol):
    """An engine whose server may span machines."""

    def rank_command(
        self, configuration: ServerConfiguration, *, port: int, rank: Rank
    ) -> list[str]:
        """Return the command line of one node's part.

        Args:
            configuration: The configuration of the server.
            port: The port of 127.0.0.1 at which rank 0 must listen.
            rank: The part.
        """


@runtime_checkable
class Program(Protocol):
    """An engine that is a program, not a package of a Python environment."""

    #: Its name on the PATH.
    program: str


@runtime_checkable
class ChecksArguments(Protocol):
    """An engine whose argument parser runs without starting a server."""

    def check_arguments(
        self, python: str, lists: Sequence[Sequence[str]], environment: Mapping[str, str]
    ) -> list[str | None]:
        """Return the engine's own message for each list of arguments; None if it accepts it.

        Args:
            python: The interpreter of the engine, or the program itself.
            lists: The lists of arguments.
            environment: The whole environment of the engine.
        """


@runtime_checkable
class TellsOptions(Protocol):
    """An engine whose parser lists its options."""

    def options(self, python: str, environment: Mapping[str, str]) -> frozenset[str]:
        """Return the options of the engine's own parser.

        Args:
            python: The interpreter of the engine.
            environment: Its whole environment.
        """
