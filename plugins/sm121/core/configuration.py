"""A server configuration: everything that decides what an engine process will be."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sm121.core import digest

_MODEL = "{model}"


@dataclass(frozen=True)
class Span:
    """How a server is started that spans ``count`` machines. ``commands``: of each other node, by
    rank, what runs Python there; ``address``: of this machine (None: all of them are this one)."""

    launcher: str
    count: int
    commands: tuple[tuple[str, ...], ...] = ()
    address: str | None = None


@dataclass(frozen=True)
class Rank:
    """One node's part of a span; ``address`` and ``port``: where rank 0 gathers the others."""

    number: int
    count: int
    address: str
    port: int


@dataclass(frozen=True)
class ServerConfiguration:
    """One distinct start-up of an engine. Equal configurations share one server. ``arguments`` and
    ``environment`` come on top of what the engine module adds (address, key, model, name) and of
    the suite's own environment. ``{model}`` in an argument is the model's folder (`given`)."""

    name: str
    engine: str
    python: str
    model: str
    served_name: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    debug: bool = False
    speaking_worker: bool = False
    #: For the traces of the engine's profiler, off until it is asked. None: it has none.
    traces: str | None = None
    #: None: the server is on this machine alone.
    span: Span | None = None
    key: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        parts: tuple[object, ...] = (
            self.engine, self.python, self.model, self.served_name, self.arguments,
            self.environment, self.debug, self.speaking_worker,
        )  # fmt: skip
        if self.traces is not None:  # where the traces go makes no other server
            parts = (*parts, "profiler")
        if self.span is not None:
            parts = (*parts, [self.span.launcher, self.span.count, self.span.commands])
        object.__setattr__(self, "key", digest.of(parts)[:12])

    @property
    def given(self) -> tuple[str, ...]:
        """The arguments as the engine gets them."""
        return tuple(argument.replace(_MODEL, self.model) for argument in self.arguments)


def environment_items(*layers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Layered environments as sorted pairs; later layers win."""
    return tuple(sorted({name: layer[name] for layer in layers for name in layer}.items()))
