"""A against B: two builds or configurations, started in turns, with the start as the unit. What
differs from start to start (memory layout, autotuning, the temperature) is not averaged out by more
rounds on one server. So each start gives one value per metric, starts come in pairs whose order
alternates (A B, B A, ...), and the interval of the ratio B / A is over pairs. A measurement on
another kernel path than was asked for counts neither way, and a comparison of a thing with itself
says nothing: the rules of every other measurement."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from sm121.core import engine_arguments, own_options
from sm121.core.configuration import ServerConfiguration
from sm121.core.data_file import Record
from sm121.core.engine_arguments import normal_name
from sm121.core.engine_settings import KernelPathRequirement
from sm121.core.errors import UsageError
from sm121.core.server import Server, root_of
from sm121.engines import requested
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.requirement import COMPARED, contradictions
from sm121.regression.change import Change

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_PYTHON = "--engine-python"
_LOG = "--server-log"
FILE = "ab.json"
#: Of the kernel path: what makes two servers differ in what they compute, or how fast.
EFFECTS = (
    "attention", "moe", "kv_layout", "cuda_graphs", "speculative", "native_fp4", "dtype",
    "kv_cache_dtype", "load_format", "quantization", "prefix_caching", "block_size", "version",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One of the two, as it was given."""

    text: str
    url: str | None = None
    log: Path | None = None
    python: str | None = None
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def parse_sides(texts: Sequence[str]) -> tuple[Side, Side]:
    """Both sides of ``--ab``: two URLs, each perhaps with ``--server-log PATH`` behind it, or for
    each the engine's arguments, ``KEY=VALUE`` and ``--engine-python PATH`` that come on top of the
    configuration under test. Raises UsageError: they are not that."""
    first, second = (_side(text) for text in texts)
    for side in (first, second):
        # Where only one word was given, the other is what stood behind it: a path, or an option.
        word = [*side.arguments, ""][0].partition("=")[0]
        is_own = word in own_options.every()
        if word and (is_own or not word.startswith("-")):
            kind = "an option of the suite" if is_own else "none of them"
            raise UsageError(
                f"--ab {shlex.join(texts)}: expected two words, each a URL, or KEY=VALUE and "
                f"arguments of the engine, {word} is {kind}; '' is what is under test itself: "
                "--ab '' '--flag'"
            )
    if (first.url is None) != (second.url is None):
        raise UsageError("--ab: expected two URLs or two configurations, not one of each")
    if first.url is not None and second.url is not None and _place(first.url) == _place(second.url):
        raise UsageError(f"--ab: expected the URLs of two servers, got {first.url} twice")
    if first == second == Side(first.text):
        raise UsageError(
            f"--ab {shlex.join(texts)}: expected two configurations that differ, got what is under "
            "test twice; name what one of them adds: --ab '' '--flag'"
        )
    return first, second


def _place(url: str) -> tuple[str, int, str]:
    """Host, port and path of an address; every name of this machine's own is one host."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ("localhost" if host in ("127.0.0.1", "::1") else host, port, parts.path)


def _side(text: str) -> Side:
    if text.startswith(("http://", "https://")):
        url, _, behind = text.partition(" ")
        url, log = root_of(url, "--ab"), None
        if behind.strip():
            name, value = [*re.split(r"[\s=]+", behind.strip(), maxsplit=1), ""][:2]
            if name != _LOG or not value:
                raise UsageError(f"--ab {url}: expected nothing but {_LOG} PATH behind it")
            log = Path(value.strip("'\"")).absolute()
            if not log.is_file():
                raise UsageError(f"--ab {url}: {_LOG}: there is no file {value!r}")
        return Side(url, url, log)
    try:
        words = shlex.split(text)
    except ValueError as error:
        line = f"--ab {text!r}: expected arguments as a shell reads them: {error}"
        raise UsageError(line) from error
    python: str | None = None
    arguments: list[str] = []
    environment: list[tuple[str, str]] = []
    while words:
        word = words.pop(0)
        name, _, value = word.partition("=")
        if name == _PYTHON:
            python = value or (words.pop(0) if words else "")
            if not Path(python).is_file():
                raise UsageError(f"--ab {text!r}: {_PYTHON}: there is no file {python!r}")
        elif _VARIABLE.match(word) and not arguments:
            environment.append((name, value))
        else:
            arguments.append(word)
    return Side(text, None, None, python, tuple(arguments), tuple(environment))


@dataclass(frozen=True)
class MetricOfStart:
    """A metric of one start."""

    value: float
    unit: str
    higher_is_better: bool


@dataclass
class Visit:
    """One start of a side, or one visit to its server: what was measured, or how it failed."""

    side: str
    metrics: dict[str, MetricOfStart] = field(default_factory=dict)
    #: What ran, by the evidence; empty where no log is known.
    path: dict[str, Any] = field(default_factory=dict)
    #: What was asked for, and what became of it.
    requested: list[str] = field(default_factory=list)
    log: str | None = None
    failure: str | None = None


class AbFile(Record):
    """ab.json: every start of a comparison and what followed, as a report reads it again."""

    sides: tuple[str, str]
    """What was given for A and for B; empty for the configuration under test as it is."""
    void: str | None = None
    """Why nothing of it counts; null while it does."""
    visits: list[Visit] = Field(default_factory=list)
    outcomes: list[Change] = Field(default_factory=list)

    def path(self, side: str) -> dict[str, Any]:
        return next((v.path for v in reversed(self.visits) if v.side == side and v.path), {})

    def requested(self, side: str) -> list[str]:
        lines = (line for visit in self.visits if visit.side == side for line in visit.requested)
        return [*dict.fromkeys(lines)]

    def failures(self, side: str) -> list[str]:
        return [v.failure for v in self.visits if v.side == side and v.failure]

    def logs(self, side: str) -> list[str]:
        return [*dict.fromkeys(v.log for v in self.visits if v.side == side and v.log)]


def order(pairs: int) -> list[str]:
    """Whose turn it is: A B, B A, A B, ... so that a drift of the machine favours nobody."""
    return [side for pair in range(pairs) for side in (("A", "B") if pair % 2 == 0 else ("B", "A"))]


def not_as_asked(
    required: KernelPathRequirement,
    server: Server,
    path: KernelPath,
    configuration: ServerConfiguration | None,
    under_test: str,
) -> list[str]:
    """What of a visit is not what it was to be, a line each: what the profile requires, but for the
    values that the side asks for. ``configuration``: without the side's; None: a URL."""
    wrong = list(path.differences)
    if server.log is None:
        return wrong
    fields: set[str | None] = set()
    if configuration is not None:
        others = {report.by for report in requested.compare(configuration, path)}
        fields = {report.field for report in path.requested if report.by not in others}
    if fields:  # the side's word replaces the profile's; the rules on lines are about its values
        silent = {name: None for name in COMPARED if name in fields}
        required = required.model_copy(update=silent).model_copy(update={"rules": ()})
    return [*wrong, *map(str, contradictions(required, path, server.log, under_test))]


def moved(visit: Visit, earlier: Sequence[Visit]) -> list[str]:
    """What a visit ran otherwise than the first one of its side, a line each."""
    first = next((each for each in earlier if each.side == visit.side and each.path), None)
    if first is None:
        return []
    return [  # what one log shows and another does not, as a build that is cached, is no move
        f"{name} is {visit.path[name]}, at its first visit it was {value}"
        for name, value in first.path.items()
        if None not in (value, visit.path.get(name)) and visit.path[name] != value
    ]


def the_same(
    sides: tuple[Side, Side], engine: str, a: Visit, b: Visit
) -> tuple[str | None, str | None]:
    """Why a comparison of two configurations is one of a thing with itself, and what of their
    difference nothing shows; None and None where neither is so."""
    first, second = sides
    if first.text == second.text:
        return None, None  # asked for: how far starts of one thing differ
    rules = requested.load_requests(engine).request
    of_a, of_b = _requested(first), _requested(second)
    changed = {n for n in {*of_a, *of_b} if of_a.get(n) != of_b.get(n)}
    # A table in JSON is there by its inner names, too.
    changed = {n for n in changed if not any(other.startswith(f"{n}.") for other in changed)}
    fields: dict[str, str] = {}
    for rule in rules:
        if rule.field == "cuda_graphs":  # eager mode turns compilation off, too, and none shows it
            continue
        for name in filter(None, (rule.argument, rule.variable, *rule.aliases)):
            fields[normal_name(name)] = rule.field
    unknown = {name for name in changed if name not in fields}
    if first.python != second.python:
        unknown.add("--engine-python")
    moved = {fields[name] for name in changed if name in fields}
    observed = {f for f in moved if a.path.get(f) is not None or b.path.get(f) is not None}
    differing = {f for f in observed if a.path.get(f) != b.path.get(f)}
    if not unknown and not differing and observed == moved:
        values = ", ".join(f"{name} {a.path.get(name)}" for name in sorted(moved))
        return (
            f"B ran what A ran ({values or 'the same options'}): of a comparison with itself "
            f"nothing follows for {second.text!r} against {first.text!r}",
            None,
        )
    silent = sorted(unknown | {name for name in changed if fields.get(name) in moved - observed})
    if differing or not silent or "--engine-python" in unknown:
        return None, None
    return None, f"A/B: nothing shows that {', '.join(silent)} made B another server than A"


def _requested(side: Side) -> dict[str, str]:
    words = engine_arguments.read(side.arguments)
    return {**words, **{normal_name(name): value for name, value in side.environment}}
