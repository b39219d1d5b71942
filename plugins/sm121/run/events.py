"""The events of a run, and ``run.jsonl``, which contains one event on each line.

A run appends each event when it happens. `sm121.run.fold` computes verdict.json from the events.

    {"at_s": 12.031, "kind": "decided", "test": {"id": "tests/test_smoke.py::test_health", ...}}

``at_s`` is the time in seconds since the run began. The first event is `Opened`, which contains the
version of the format. A file with a later version or with an unknown event is refused, because the
verdict would be wrong without that event.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from sm121.core.verdict import Verdict
from sm121.engines.pool import StartReport
from sm121.engines.signs import CLOCK_SLACK_S, Signs
from sm121.run.cell_record import CellRecord
from sm121.run.details import FailureDetail, Samples, Series
from sm121.run.engine_report import EngineReport
from sm121.run.fingerprint import Fingerprint
from sm121.run.machine_report import BoxReport, CrashReport, MemoryReport
from sm121.run.shard_report import ShardReport, ShardTest
from sm121.run.verdict_file import AgainstReport, ChangeReport, MetricReport, TestReport

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
    """The tests of the run in the order of execution, and the shard to which they belong."""

    tests: list[ShardTest]
    shard: ShardReport | None = None
    #: Whether a comparison with a stored run was requested (``--benchmark-compare``).
    compared: bool = False
    #: The options of this comparison with their values; empty in runs of earlier versions.
    comparison: str = ""
    kind: Literal["collected"] = "collected"


@dataclass(frozen=True)
class EnvironmentRead:
    """The environment record was read, and the fingerprint was computed from it."""

    environment: dict[str, Any]
    fingerprint: Fingerprint | None
    kind: Literal["environment_read"] = "environment_read"


@dataclass(frozen=True)
class EnvironmentNoted:
    """An entry of the environment record was added or changed."""

    name: str
    value: Any
    kind: Literal["environment_noted"] = "environment_noted"


@dataclass(frozen=True)
class EngineShown:
    """The report on the engine and its kernel path, as the evidence so far shows them."""

    engine: EngineReport
    kind: Literal["engine_shown"] = "engine_shown"

    @classmethod
    def of(cls, before: EngineReport, **changed: Any) -> "EngineShown":
        """Return the event for a change of some fields of the engine's report.

        Args:
            before: The report before the change.
            **changed: The new values by field.
        """
        return cls(before.model_copy(update=changed))


@dataclass(frozen=True)
class ServerAttached:
    """The suite attached to a running server. The values are the same as long as its process lives.

    ``--resume`` compares them: the kept verdicts are about this process.
    """

    #: When the process started according to its metrics, in seconds since 1970; null if not known.
    started: float | None
    #: Pid and start time (ticks since boot) of its processes; empty if they are not visible.
    processes: list[tuple[int, int]]
    #: Its counters, and digests of its other values by name, if neither `started` nor `processes`
    #: is known. The values are stored as digests, because an engine may publish a secret of its
    #: command line.
    values: dict[str, str] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    kind: Literal["server_attached"] = "server_attached"

    @classmethod
    def of(cls, signs: Signs) -> "ServerAttached":
        """Return the event for a server.

        Args:
            signs: The values that identify its process.
        """
        processes = sorted(signs.processes)
        if signs.started is not None or processes:
            return cls(signs.started, processes)
        values = {}
        for word, value in signs.words.items():
            values[str(word)] = hashlib.sha256(value.encode()).hexdigest()[:16]
        return cls(None, [], values, dict(signs.counters))

    def is_comparable(self, later: "ServerAttached") -> bool:
        """Return whether a comparison would show that another process answers.

        The result is False if the start time or the processes of the server were visible before,
        but are not visible now.

        Args:
            later: The values of the server that answers now.
        """
        has_starts = self.started is not None and later.started is not None
        has_processes = bool(self.processes and later.processes)
        is_bound = self.started is not None or bool(self.processes)
        return has_starts or has_processes or not is_bound

    def differs_from(self, later: "ServerAttached") -> str | None:
        """Return the proof that another process answers now; None without a proof.

        Args:
            later: The values of the server that answers now.
        """
        if self.started is not None and later.started is not None:
            if abs(self.started - later.started) <= CLOCK_SLACK_S:
                return None
            before, now = (
                time.strftime("%F %TZ", time.gmtime(start))
                for start in (self.started, later.started)
            )
            return f"its process started at {now}, but the earlier one at {before}"
        if self.processes and later.processes:
            if not {*self.processes}.isdisjoint(later.processes):
                return None
            before, now = (
                ", ".join(str(pid) for pid, _start in each.processes) for each in (self, later)
            )
            return f"its processes were {before}, and are {now} now"
        for name, digest in self.values.items():
            if later.values.get(name, digest) != digest:
                return f"its {name} has changed"
        for name, count in self.counters.items():
            if later.counters.get(name, count) < count:
                return f"its {name} fell from {count:g} to {later.counters[name]:g}"
        return None


@dataclass(frozen=True)
class ServerStarting:
    """The suite starts a server."""

    configuration: str
    kind: Literal["server_starting"] = "server_starting"


@dataclass(frozen=True)
class StartEnded:
    """A start has ended: the server is ready, or the start failed and ``startup_s`` is null."""

    start: StartReport
    kind: Literal["start_ended"] = "start_ended"


@dataclass(frozen=True)
class ServerStopped:
    """A server that the suite started has ended, and the suite checked what it left behind."""

    log: str
    clean: bool
    kind: Literal["server_stopped"] = "server_stopped"


@dataclass(frozen=True)
class Died:
    """A process ended abnormally, and its crash bundle was written."""

    crash: CrashReport
    kind: Literal["died"] = "died"


@dataclass(frozen=True)
class Decided:
    """A verdict on a test, or a decision that no test makes."""

    test: TestReport
    kind: Literal["decided"] = "decided"


@dataclass(frozen=True)
class Overruled:
    """The verdict on a test was replaced."""

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
    """The text of a failed test, as pytest prints it."""

    failure: FailureDetail
    kind: Literal["failure_shown"] = "failure_shown"


@dataclass(frozen=True)
class HistoryRead:
    """The metrics in the stored runs, and the findings of the regression level."""

    history: dict[str, Series]
    findings: list[str]
    kind: Literal["history_read"] = "history_read"


@dataclass(frozen=True)
class CellExamined:
    """A cell of the matrix has been examined and has an outcome.

    If ``is_reference`` is true, the cell is the baseline, and this process examined it only to
    compare other cells with it. The baseline's own test runs in another process.
    """

    cell: CellRecord
    is_reference: bool = False
    kind: Literal["cell_examined"] = "cell_examined"


@dataclass(frozen=True)
class BoxRead:
    """The state of the machine, as all readings so far show it."""

    box: BoxReport
    kind: Literal["box_read"] = "box_read"


@dataclass(frozen=True)
class MemoryRead:
    """The memory of the server under load."""

    memory: MemoryReport
    kind: Literal["memory_read"] = "memory_read"


@dataclass(frozen=True)
class Changed:
    """The list of all metrics that are worse than before, or may be worse."""

    changes: list[ChangeReport]
    kind: Literal["changed"] = "changed"


@dataclass(frozen=True)
class Compared:
    """The run was compared with a trusted run."""

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
    """The tests without a verdict were removed, because another worker runs them."""

    kind: Literal["undecided_dropped"] = "undecided_dropped"


@dataclass(frozen=True)
class Distrusted:
    """Later results cannot be trusted, because a crash may have damaged the state of the GPU."""

    why: str
    kind: Literal["distrusted"] = "distrusted"


@dataclass(frozen=True)
class Resumed:
    """Another process continues the run. It runs the tests in ``again``."""

    again: list[str]
    kind: Literal["resumed"] = "resumed"


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The run ended. A later event with a verdict opens it again."""

    finished: bool
    verdict: Verdict
    reason: str
    certified: bool | None
    #: Why the certificate has no oracle; null in runs of earlier versions.
    no_oracle: str | None = None
    duration_s: float
    #: Whether a signal ended the run.
    interrupted: bool = False
    kind: Literal["closed"] = "closed"


Event: TypeAlias = Annotated[
    Opened
    | Collected
    | EnvironmentRead
    | EnvironmentNoted
    | EngineShown
    | ServerAttached
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
    | CellExamined
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
class EventStream:
    """The complete lines of a ``run.jsonl``.

    Attributes:
        events: The events in the order of the file.
        size: The size of these lines in bytes. Any bytes after them are an incomplete line.
    """

    events: Sequence[Stamped]
    size: int


def to_line(stamped: Stamped) -> str:
    """Return an event as a line of ``run.jsonl``: ASCII, with a newline at the end.

    Args:
        stamped: The event with its time.
    """
    values = _EVENT.dump_python(stamped.event, mode="json")
    return json.dumps({"at_s": stamped.at_s, **values}) + "\n"


def from_line(line: str) -> Stamped:
    """Parse a line of ``run.jsonl``.

    Args:
        line: The line.

    Raises:
        ValueError: The line is not an event that this version of the suite knows.
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


def read_events(path: Path) -> EventStream:
    """Read a ``run.jsonl``. Its last line may be incomplete if the run was killed.

    Args:
        path: The file.

    Returns:
        The events of the complete lines.

    Raises:
        OSError: The file cannot be read.
        ValueError: A complete line is not an event that this version of the suite knows. The
            message contains the number of the line.
    """
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    stamped = []
    for number, line in enumerate(content[:size].splitlines(), start=1):
        try:
            stamped.append(from_line(line.decode("ascii")))
        except ValueError as error:
            raise ValueError(f"line {number} of {path.name}: {error}") from error
    return EventStream(stamped, size)
