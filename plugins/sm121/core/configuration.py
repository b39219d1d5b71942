"""A server configuration: everything that determines how an engine process is started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from sm121.core import digest, engine_arguments

#: The placeholder for the model's folder in an argument.
_MODEL = "{model}"


@dataclass(frozen=True)
class Span:
    """How to start a server that spans several machines."""

    launcher: str
    #: The number of machines.
    count: int
    #: The command that runs Python on each other node, in the order of their ranks.
    commands: tuple[tuple[str, ...], ...] = ()
    #: The address of this machine. If None, all nodes are on this machine.
    address: str | None = None


@dataclass(frozen=True)
class Rank:
    """The part of a server that one machine (node) runs."""

    number: int
    #: The number of nodes.
    count: int
    #: The address at which the other nodes connect to rank 0.
    address: str
    #: The port at that address.
    port: int


@dataclass(frozen=True)
class ServerConfiguration:
    """How a server is started. Equal configurations share one server."""

    name: str
    engine: str
    #: The engine's interpreter, or the executable of an engine without one.
    python: str
    model: str
    served_name: str
    #: The arguments, without those that the engine's module adds (address, API key, model and
    #: name). ``{model}`` stands for the model's folder; `given` replaces it.
    arguments: tuple[str, ...] = ()
    #: Environment variables to add to the suite's own environment, as sorted pairs of name and
    #: value.
    environment: tuple[tuple[str, str], ...] = ()
    #: Whether the engine logs at its debug level.
    debug: bool = False
    #: Whether vLLM's worker additionally logs the attention backend of each layer.
    speaking_worker: bool = False
    #: The folder for the traces of the engine's profiler. If None, the server has no profiler.
    traces: str | None = None
    #: How the server spans several machines. If None, it runs only on this machine.
    span: Span | None = None
    #: A digest (12 hexadecimal digits) of the fields in which servers differ.
    key: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        parts: list[object] = [
            self.engine,
            self.python,
            self.model,
            self.served_name,
            self.arguments,
            self.environment,
            self.debug,
            self.speaking_worker,
        ]
        if self.traces is not None:  # the path of the folder does not distinguish servers
            parts.append("profiler")
        if self.span is not None:
            parts.append([self.span.launcher, self.span.count, self.span.commands])
        object.__setattr__(self, "key", digest.of_value(parts)[:12])

    @property
    def given(self) -> tuple[str, ...]:
        """The arguments that the engine gets, with the model's folder in place of ``{model}``."""
        return tuple(argument.replace(_MODEL, self.model) for argument in self.arguments)

    @property
    def revision(self) -> str | None:
        """The revision of the hub's model that the arguments name; None if they name none."""
        return engine_arguments.parse_options(self.arguments).get("revision")

    @property
    def variables(self) -> dict[str, str]:
        """The server's environment: this process's variables, overridden by the configuration's."""
        return os.environ | dict(self.environment)


def environment_items(*layers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Merge environments into one tuple of sorted pairs.

    Args:
        *layers: The environments. Later ones override earlier ones.
    """
    merged: dict[str, str] = {}
    for layer in layers:
        merged.update(layer)
    return tuple(sorted(merged.items()))
