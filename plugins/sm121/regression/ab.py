"""A against B: the two sides of ``--ab`` from the command line, and the record of their starts.

The sides are two builds or configurations, started in turns. One start is one sample: memory
layout, autotuning and temperature differ from start to start, and more rounds on one server do not
average them out. Each start gives one value per metric. Starts come in pairs in alternating order
(A B, B A, ...), and the interval of the ratio B / A is computed over pairs. A start on another
kernel path than the requested one does not count, and neither does a comparison of a server with
itself: see `sm121.regression.visit_checks`.
"""

import re
import shlex
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from sm121.core import engine_arguments
from sm121.core.address import root_of
from sm121.core.data_file import Record
from sm121.core.errors import UsageError
from sm121.regression.change import Change

#: The name of the record in a report directory.
FILE = "ab.json"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_PYTHON = "--engine-python"
_LOG = "--server-log"


@dataclass(frozen=True)
class Side:
    """Side A or side B of a comparison, as the command line describes it."""

    #: The argument of ``--ab``.
    text: str
    #: The URL of a running server; None for a configuration.
    url: str | None = None
    #: The log of that server.
    log: Path | None = None
    #: The interpreter of the engine; None for the one under test.
    python: str | None = None
    #: The engine's arguments in addition to those of the configuration under test.
    arguments: tuple[str, ...] = ()
    #: The environment variables (name, value) in addition to those of the configuration under test.
    environment: tuple[tuple[str, str], ...] = ()


def parse_sides(texts: Sequence[str], own_options: Container[str] = ()) -> tuple[Side, Side]:
    """Parse both sides of ``--ab``.

    Args:
        texts: The two arguments. Either both are a URL, optionally followed by
            ``--server-log PATH``; or both are additions to the configuration under test: engine
            arguments, ``KEY=VALUE`` and ``--engine-python PATH``.
        own_options: The names of the suite's options. A side must not begin with one of them.

    Returns:
        The sides A and B.

    Raises:
        UsageError: The arguments are neither of these, or both sides are the same.
    """
    first, second = (_side(text) for text in texts)
    for side in (first, second):
        _refuse_swallowed_word(side, texts, own_options)
    if (first.url is None) != (second.url is None):
        raise UsageError("--ab: expected two URLs or two configurations, got one of each")
    if first.url is not None and second.url is not None and _place(first.url) == _place(second.url):
        raise UsageError(f"--ab: expected the URLs of two servers, got {first.url} twice")
    if first == second == Side(first.text):
        raise UsageError(
            f"--ab {shlex.join(texts)}: expected two different configurations, got the one under "
            "test twice. Name the arguments that one of them adds: --ab '' '--flag'"
        )
    return first, second


def _refuse_swallowed_word(side: Side, texts: Sequence[str], own_options: Container[str]) -> None:
    """Reject a side that looks like a path or an option of the suite.

    If the user gives only one argument, ``--ab`` takes the next word of the command line as B.
    """
    if not side.arguments:
        return
    first = side.arguments[0]
    option = next(engine_arguments.options([first]), None)
    name = option.name if option is not None else first
    is_own = name in own_options
    if name and (is_own or not name.startswith("-")):
        kind = "an option of the suite" if is_own else "neither of them"
        raise UsageError(
            f"--ab {shlex.join(texts)}: expected two texts, each with a URL, or with "
            f"KEY=VALUE and engine arguments; got {name}, which is {kind}. Write '' for the "
            "configuration under test: --ab '' '--flag'"
        )


def _place(url: str) -> tuple[str, int, str]:
    """Return host, port and path of an address; all names of this machine count as one host."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if host in ("127.0.0.1", "::1"):
        host = "localhost"
    default_port = 443 if parts.scheme == "https" else 80
    return host, parts.port or default_port, parts.path


def _side(text: str) -> Side:
    if text.startswith(("http://", "https://")):
        return _side_of_url(text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        line = f"--ab {text!r}: expected arguments that a shell can split: {error}"
        raise UsageError(line) from error
    python: str | None = None
    arguments: list[str] = []
    environment: list[tuple[str, str]] = []
    while words:
        word = words.pop(0)
        name, _, value = word.partition("=")
        if name == _PYTHON:
            if not value and words:
                value = words.pop(0)
            python = value
            if not Path(python).is_file():
                raise UsageError(f"--ab {text!r}: {_PYTHON}: there is no file {python!r}")
        elif _VARIABLE.match(word) and not arguments:
            environment.append((name, value))
        else:
            arguments.append(word)
    return Side(text, python=python, arguments=tuple(arguments), environment=tuple(environment))


def _side_of_url(text: str) -> Side:
    """Parse a URL, optionally followed by ``--server-log PATH`` or ``--server-log=PATH``."""
    address, _, behind = text.partition(" ")
    url = root_of(address, "--ab")
    behind = behind.strip()
    if not behind:
        return Side(url, url)
    words = re.split(r"[\s=]+", behind, maxsplit=1)
    if len(words) < 2 or words[0] != _LOG or not words[1]:
        raise UsageError(f"--ab {url}: expected only {_LOG} PATH after it, got {behind}")
    value = words[1]
    log = Path(value.strip("'\"")).absolute()
    if not log.is_file():
        raise UsageError(f"--ab {url}: {_LOG}: there is no file {value!r}")
    return Side(url, url, log)


def order(pairs: int) -> list[str]:
    """Return the order of the starts, so that a drift of the machine favours neither side.

    Args:
        pairs: The number of pairs.

    Returns:
        The side of each start: A B, B A, A B, ...
    """
    sides: list[str] = []
    for pair in range(pairs):
        sides += ("A", "B") if pair % 2 == 0 else ("B", "A")
    return sides


@dataclass(frozen=True)
class MetricOfStart:
    """The value of a metric after one start."""

    value: float
    unit: str
    higher_is_better: bool


@dataclass
class Visit:
    """One measurement of side A or B: after a start, or of its running server."""

    #: The side of the comparison, "A" or "B".
    side: str
    metrics: dict[str, MetricOfStart] = field(default_factory=dict)
    #: The kernel path that the log shows; empty without a log.
    path: dict[str, Any] = field(default_factory=dict)
    #: The kernel path that the configuration requests: each request with its state.
    requested: list[str] = field(default_factory=list)
    #: The file name of the log.
    log: str | None = None
    #: Why the server did not serve; None if it did.
    failure: str | None = None


class AbFile(Record):
    """ab.json: every start of a comparison and its results, for a report."""

    sides: tuple[str, str]
    """The words given for A and for B; empty for the configuration under test."""
    void: str | None = None
    """Why the comparison does not count; null if it does."""
    visits: list[Visit] = Field(default_factory=list)
    outcomes: list[Change] = Field(default_factory=list)

    @field_validator("outcomes", mode="before")
    @classmethod
    def _name_words(cls, outcomes: Any) -> Any:
        """Read files written until 28 November 2026, whose ``text`` was ``METRIC: WORDS``."""
        if not isinstance(outcomes, list):
            return outcomes
        renamed = []
        for outcome in outcomes:
            if isinstance(outcome, dict) and isinstance(outcome.get("text"), str):
                outcome = dict(outcome)
                text = outcome.pop("text")
                outcome.setdefault("words", text.removeprefix(f"{outcome.get('metric')}: "))
            renamed.append(outcome)
        return renamed

    def path(self, side: str) -> dict[str, Any]:
        """Return the kernel path of the last start of a side that has one; empty if none has.

        Args:
            side: "A" or "B".
        """
        for visit in reversed(self.visits):
            if visit.side == side and visit.path:
                return visit.path
        return {}

    def requested(self, side: str) -> list[str]:
        """Return the kernel-path requests of all starts of a side, without duplicates.

        Args:
            side: "A" or "B".
        """
        lines: dict[str, None] = {}
        for visit in self.visits:
            if visit.side == side:
                lines.update(dict.fromkeys(visit.requested))
        return list(lines)

    def failures(self, side: str) -> list[str]:
        """Return the failures of the starts of a side.

        Args:
            side: "A" or "B".
        """
        return [visit.failure for visit in self.visits if visit.side == side and visit.failure]

    def logs(self, side: str) -> list[str]:
        """Return the names of the logs of a side, without duplicates.

        Args:
            side: "A" or "B".
        """
        logs = [visit.log for visit in self.visits if visit.side == side and visit.log]
        return list(dict.fromkeys(logs))
