"""The protocols of engine modules. To add an engine, write a module that implements `Engine`."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from sm121.core.configuration import Rank, ServerConfiguration


class Engine(Protocol):
    """How to start one kind of engine.

    The methods only return data; they do not start the engine.
    """

    name: str
    #: Arguments that the suite sets itself, so that users may not set them.
    reserved_arguments: tuple[str, ...]
    #: Variables that the suite sets itself, so that users may not set them.
    reserved_variables: tuple[str, ...]

    def check_interpreter(self, python: str, environment: Mapping[str, str]) -> str | None:
        """Return the version of the engine, or None if its files do not contain one.

        Args:
            python: The interpreter that would run the engine, or the engine's own program.
            environment: The whole environment in which it would run.

        Raises:
            UsageError: The interpreter does not exist, or the engine is not installed in it.
        """

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        """Return the command line. It contains no secret.

        Args:
            configuration: The configuration of the server.
            port: The port of 127.0.0.1 at which the server must listen.
        """

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        """Return the whole environment of the engine's process.

        Args:
            configuration: The configuration of the server.
            api_key: The API key that the server must require.
        """


@runtime_checkable
class Profiling(Protocol):
    """An engine whose kernels can be profiled while it serves."""

    def can_profile(self, python: str, environment: Mapping[str, str]) -> bool:
        """Return whether the installed engine can write traces (`ServerConfiguration.traces`).

        Args:
            python: The interpreter of the engine.
            environment: The engine's whole environment.
        """


@runtime_checkable
class Spanning(Protocol):
    """An engine whose server may span machines."""

    def rank_command(
        self, configuration: ServerConfiguration, *, port: int, rank: Rank
    ) -> list[str]:
        """Return the command line of the rank on one node.

        Args:
            configuration: The configuration of the server.
            port: The port of 127.0.0.1 at which rank 0 must listen.
            rank: The rank.
        """


@runtime_checkable
class Program(Protocol):
    """An engine that is an executable, not a package of a Python environment."""

    #: The name of the executable on the PATH.
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
            environment: The engine's whole environment.
        """
