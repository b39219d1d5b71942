"""What an engine module provides. A new engine is one more module that satisfies this."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from sm121.core.configuration import Rank, ServerConfiguration


class Engine(Protocol):
    """How one kind of engine is started and asked. No method starts anything itself."""

    name: str
    #: Arguments and variables that the suite sets itself, and a user may not.
    reserved_arguments: tuple[str, ...]
    reserved_variables: tuple[str, ...]

    def check_interpreter(self, python: str, environment: Mapping[str, str]) -> str | None:
        """Version of the engine that ``python`` would run, None if its files do not say. Raises
        UsageError: the interpreter is missing or has no such engine."""

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        """The command line, for 127.0.0.1 and ``port``. It contains no secret."""

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        """The whole environment of the engine's process."""


@runtime_checkable
class Profiling(Protocol):
    """An engine whose kernels can be profiled while it serves."""

    def can_profile(self, python: str, environment: Mapping[str, str]) -> bool:
        """Whether the engine of that interpreter can, with `ServerConfiguration.traces`."""


@runtime_checkable
class Spanning(Protocol):
    """An engine whose server may span machines."""

    def rank_command(
        self, configuration: ServerConfiguration, *, port: int, rank: Rank
    ) -> list[str]:
        """As `Engine.command`, of one node's part."""


@runtime_checkable
class Program(Protocol):
    """An engine that is a program, not a package of a Python environment."""

    #: Its name on the PATH.
    program: str


@runtime_checkable
class ChecksArguments(Protocol):
    """An engine whose argument parser can be asked without starting a server."""

    def check_arguments(
        self, python: str, lists: Sequence[Sequence[str]], environment: Mapping[str, str]
    ) -> list[str | None]:
        """Of each list of arguments the engine's own message where it refuses it, else None."""


@runtime_checkable
class TellsOptions(Protocol):
    """An engine whose parser says which options it has."""

    def options(self, python: str, environment: Mapping[str, str]) -> frozenset[str]:
        """The options of the engine's own parser."""
