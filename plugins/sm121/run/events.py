"""The events of a run, and ``run.jsonl``, which has one of them on each line.

A run appends each event when it happens. `sm121.run.fold` makes verdict.json of the events.

    {"at_s": 12.031, "kind": "decided", "test": {"id": "tests/test_smoke.py::test_health", ...}}

``at_s`` are the seconds since the run began. The first event is `Opened`; it has the version of the
format. A stream of a later version, and a kind that is not known, are refused: a fold that leaves
out an event is of another run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from sm121.core.verdict import Verdict
from sm121.engines.pool import StartReport
from sm121.run.details import FailureDetail, Samples, Series
from sm121.run.engine_report import EngineReport
from sm121.run.fingerprint import Fingerprint
from sm121.run.machine_report import BoxReport, CrashReport, MemoryReport
from sm121.run.verdict_file import (
    AgainstReport,
    ChangeReport,
    MetricReport,
    ShardReport,
    ShardTest,
    TestReport,
)

NAME = "run.jsonl"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The run began."""

    arch: str | None
    profile: str
    question: str | None
    started: str
    certificate_levels: list[str] | None
    engine: EngineReport
    schema_version: int = SCHEMA_VERSION
    kind: Literal["opened"] = "opened"


@dataclass(frozen=True)
class Collected:
    """The tests of the run, in its order, and the shard that they are."""

    tests: list[ShardTest]
    shard: ShardReport | None = None
    kind: Literal["collected"] = "collected"


@dataclass(frozen=True)
class EnvironmentRead:
    """The environment record, and the fingerprint that is made of it."""

    environment: dict[str, Any]
    fingerprint: Fingerprint | None
    kind: Literal["environment_read"] = "environment_read"


@dataclass(frozen=True)
class EnvironmentNoted:
    """An entry of the environment record became known, or changed."""

    name: str
    value: Any
    kind: Literal["environment_noted"] = "environment_noted"


@dataclass(frozen=True)
class EngineShown:
    """The engine with its kernel path, as far as the evidence shows them now."""

    engine: EngineReport
    kind: Literal["engine_shown"] = "engine_shown"

    @classmethod
    def of(cls, before: EngineReport, **changed: Any) -> "EngineShown":
        """Return the event that fields of the engine's report changed.

        Args:
            before: The report so far.
            **changed: The fields.
        """
        return cls(before.model_copy(update=changed))


@dataclass(frozen=True)
class ServerStarting:
    """The suite starts a server."""

    configuration: str
    kind: Literal["server_starting"] = "server_starting"


@dataclass(frozen=True)
class StartEnded:
    """A start has ended: the server is ready, or its ``startup_s`` is null."""

    start: StartReport
    kind: Literal["start_ended"] = "start_ended"


@dataclass(frozen=True)
class ServerStopped:
    """A server that the suite started has ended, and what it left was looked for."""

    log: str
    clean: bool
    kind: Literal["server_stopped"] = "server_stopped"


@dataclass(frozen=True)
class Died:
    """Something ended abnormally, and its bundle was written."""

    crash: CrashReport
    kind: Literal["died"] = "died"


@dataclass(frozen=True)
class Decided:
    """A decision on a test, or one beside the tests."""

    test: TestReport
    kind: Literal["decided"] = "decided"


@dataclass(frozen=True)
class Overruled:
    """A decision was replaced."""

    test: str
    verdict: Verdict
    message: str
    kind: Literal["overruled"] = "overruled"


@dataclass(frozen=True)
class Measured:
    """A metric was measured, or its verdict was withdrawn."""

    name: str
    metric: MetricReport
    kind: Literal["measured"] = "measured"


@dataclass(frozen=True)
class Sampled:
    """The raw samples of a metric that was measured."""

    name: str
    samples: Samples
    kind: Literal["sampled"] = "sampled"


@dataclass(frozen=True)
class Described:
    """The command of the run, and the requirement of each test."""

    command: str
    requirements: dict[str, str]
    kind: Literal["described"] = "described"


@dataclass(frozen=True)
class FailureShown:
    """A failed test as pytest shows it."""

    failure: FailureDetail
    kind: Literal["failure_shown"] = "failure_shown"


@dataclass(frozen=True)
class HistoryRead:
    """The metrics over the stored runs, and the lines of the regression level."""

    history: dict[str, Series]
    findings: list[str]
    kind: Literal["history_read"] = "history_read"


@dataclass(frozen=True)
class BoxRead:
    """The state of the machine by its readings so far."""

    box: BoxReport
    kind: Literal["box_read"] = "box_read"


@dataclass(frozen=True)
class MemoryRead:
    """The memory under load."""

    memory: MemoryReport
    kind: Literal["memory_read"] = "memory_read"


@dataclass(frozen=True)
class Changed:
    """All metrics that are worse than before, or may be."""

    changes: list[ChangeReport]
    kind: Literal["changed"] = "changed"


@dataclass(frozen=True)
class Compared:
    """The run was compared with a trusted one."""

    against: AgainstReport
    kind: Literal["compared"] = "compared"


@dataclass(frozen=True)
class Remarked:
    """A remark."""

    line: str
    kind: Literal["remarked"] = "remarked"


@dataclass(frozen=True)
class Unproven:
    """A property that could not be checked."""

    line: str
    kind: Literal["unproven"] = "unproven"


@dataclass(frozen=True)
class UndecidedDropped:
    """The tests that were not decided belong to another worker."""

    kind: Literal["undecided_dropped"] = "undecided_dropped"


@dataclass(frozen=True)
class Distrusted:
    """Later results cannot be trusted: a crash left the GPU or the machine in doubt."""

    why: str
    kind: Literal["distrusted"] = "distrusted"


@dataclass(frozen=True)
class Resumed:
    """Another process goes on with the run. The tests in ``again`` are run again, or at last."""

    again: list[str]
    kind: Literal["resumed"] = "resumed"


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The run ended. An event that decides something opens it again."""

    finished: bool
    verdict: Verdict
    reason: str
    certified: bool | None
    duration_s: float
    kind: Literal["closed"] = "closed"


Event: TypeAlias = Annotated[
    Opened
    | Collected
    | EnvironmentRead
    | EnvironmentNoted
    | EngineShown
    | ServerStarting
    | StartEnded
    | ServerStopped
    | Died
    | Distrusted
    | Decided
    | Overruled
    | Measured
    | Sampled
    | Described
    | FailureShown
    | HistoryRead
    | BoxRead
    | MemoryRead
    | Changed
    | Compared
    | Remarked
    | Unproven
    | UndecidedDropped
    | Resumed
    | Closed,
    Field(discriminator="kind"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


@dataclass(frozen=True)
class Stamped:
    """An event and its time.

    Attributes:
        at_s: The seconds since the run began.
        event: The event.
    """

    at_s: float
    event: Event


@dataclass(frozen=True)
class Stream:
    """The whole lines of a ``run.jsonl``.

    Attributes:
        events: The events, in their order.
        size: The bytes of these lines. What is behind them is a torn line.
    """

    events: Sequence[Stamped]
    size: int


def to_line(stamped: Stamped) -> str:
    """Return an event as a line of ``run.jsonl``, in ASCII and with its newline.

    Args:
        stamped: The event with its time.
    """
    values = _EVENT.dump_python(stamped.event, mode="json")
    return json.dumps({"at_s": stamped.at_s, **values}) + "\n"


def from_line(line: str) -> Stamped:
    """Return the event of a line.

    Args:
        line: The line.

    Raises:
        ValueError: It is no event that this version of the suite knows.
    """
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("expected an object")
    at_s = float(values.pop("at_s", 0.0))
    version = values.get("schema_version", SCHEMA_VERSION)
    if values.get("kind") == "opened" and version != SCHEMA_VERSION:
        raise ValueError(f"expected schema_version {SCHEMA_VERSION}, got {version!r}")
    try:
        return Stamped(at_s, _EVENT.validate_python(values, extra="ignore"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the event"
        raise ValueError(f"{first['msg']} at {where}") from error


def read(path: Path) -> Stream:
    """Read a ``run.jsonl``. The last line may be torn: it was being written when the run died.

    Args:
        path: The file.

    Returns:
        The events of its whole lines.

    Raises:
        OSError: It cannot be read.
        ValueError: A whole line is no event that this version of the suite knows. The message names
            the line.
    """
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    stamped = []
    for number, line in enumerate(content[:size].splitlines(), start=1):
        try:
            stamped.append(from_line(line.decode("ascii")))
        except ValueError as error:
            raise ValueError(f"line {number} of {path.name}: {error}") from error
    return Stream(stamped, size)
