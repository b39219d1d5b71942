"""verdict.json: its model, its schema, and writing it while the run goes on."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sm121.core import lenient, templates
from sm121.core.data_file import Record
from sm121.core.files import write_text
from sm121.core.printable import json_text
from sm121.core.profile import FULL
from sm121.core.profile_fields import LEVELS
from sm121.core.unmet import Fact, text
from sm121.core.verdict import Severity, Verdict, worst
from sm121.engines.pool import StartReport
from sm121.measure.box import Reading
from sm121.measure.growth import Growth
from sm121.run.engine_report import EngineReport
from sm121.run.fingerprint import Fingerprint

NAME = "verdict.json"
SCHEMA_VERSION = 2


class BoxReport(Record):
    """State of the machine. UNKNOWN until it was measured."""

    state: str = "UNKNOWN"
    reason: str | None = "the box was not measured"
    before: Reading | None = None
    after: Reading | None = None
    load_during: float | None = None
    """Share of the CPU that others took in between."""

    @property
    def looked_at(self) -> bool:
        """Whether anything in the run asked for the state: else this is as a run begins."""
        return self != BoxReport()


class LevelReport(Record):
    """A level: its verdict, and how many of its tests ended how."""

    verdict: Verdict = Verdict.NOT_RUN
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    waived: int = 0
    known: int = 0
    """They failed, and in the same way in the run that this one is compared with."""
    listed: int = 0
    """They failed, and the profile does not need their severity."""
    invalid: int = 0
    inconclusive: int = 0
    not_run: int = 0


_COUNTED_AS = {verdict: verdict.value.lower() for verdict in Verdict}
_COUNTED_AS |= {Verdict.PASS: "passed", Verdict.FAIL: "failed"}

UNFINISHED = "the run has not finished"
#: The kind of a crash by which the machine ended the run: too little memory to go on.
MEMORY_FLOOR = "memory_floor"
#: Before the ids of what is reported beside the tests.
BESIDE = "end of the run::"


class JudgedKernel(Record):
    """What a test of the numerics is about."""

    operation: str
    provider: str | None = None
    """Whose kernel was compared with the oracle; null where none was."""


class TestReport(Record):
    """One test. ``message`` is one line for people; ``unmet`` is what programs read."""

    __test__ = False  # a report, not a test: pytest would collect the name

    id: str
    level: str
    verdict: Verdict
    message: str = ""
    seconds: float = 0.0
    unmet: list[Fact] = Field(default_factory=list)
    """What does not hold: of a failure, and of what is not decided."""
    skipped: bool = False
    waived: bool = False
    severity: Severity = Severity.BLOCKER
    """Of its failure; of a test that passed, what a failure would be."""
    tolerated: Literal["known", "listed"] | None = None
    """Why its failure does not count: the run that this one is compared with has it, too, or the
    profile does not need its severity."""
    kernel: JudgedKernel | None = None
    """Of the numerics alone."""
    ability: str | None = None
    """What of an engine it needs: ``oracle`` where its answers are compared with the oracle's."""
    metrics: list[str] = Field(default_factory=list)
    """What it measured."""
    deviations: list[str] | None = None
    """What it excused because it is known of this version of the engine; null where it looks for
    none."""
    symptoms: list[str] = Field(default_factory=list)
    """How each of these deviations showed, one line."""

    @classmethod
    def of(
        cls, identity: str, level: str, *facts: Fact, verdict: Verdict = Verdict.FAIL
    ) -> "TestReport":
        """What does not hold beside the tests."""
        return cls(id=identity, level=level, verdict=verdict, message=text(facts), unmet=[*facts])

    @property
    def is_beside(self) -> bool:
        """Whether it was found beside the tests, and not by one."""
        return self.id.startswith(BESIDE)

    @property
    def is_of_option(self) -> bool:
        """Whether it is the decision of an option, such as ``--benchmark-compare-fail``."""
        return self.id.startswith("--")

    @property
    def facts(self) -> list[Fact]:
        """What does not hold; the message of one that has no facts of its own."""
        return self.unmet or [Fact("", self.message)]

    @property
    def counted(self) -> Verdict:
        """The verdict that counts: an excused failure is none. Nothing but a failure is excused."""
        return Verdict.PASS if self.excused and self.verdict is Verdict.FAIL else self.verdict

    @property
    def excused(self) -> bool:
        """Whether its failure does not count."""
        return self.waived or self.tolerated is not None

    @property
    def executed(self) -> bool:
        """Whether it ran; one that was skipped, or not reached, decides nothing."""
        return not self.skipped and self.verdict is not Verdict.NOT_RUN


class ConfigurationGate(Record):
    """The gate that a configuration of the profile has of its own, and its verdict."""

    configuration: str
    minimum: float | None = None
    at_most: float | None = None
    verdict: Verdict


class MetricReport(Record):
    """One measured quantity and its gate. Null where nothing was measured or demanded."""

    value: float | None
    unit: str
    ci_low: float | None = None
    ci_high: float | None = None
    confidence: float | None = None
    rounds: int = 0
    starts: int | None = None
    """Starts of the server that it is of (``ab:``: of each side); null where that is not known. One
    start is one start, however many rounds it has."""
    start_spread: float | None = None
    """Standard deviation, as a fraction, of earlier starts of this build that its gate was judged
    with; null where too few are stored."""
    minimum: float | None = None
    target: float | None = None
    stretch: float | None = None
    at_most: float | None = None
    grade: str | None = None
    clock: str | None = None
    roofline: float | None = None
    """Of a decode rate: its share of ``bound``."""
    bound: float | None = None
    """tok/s that the memory allows with ``bytes_per_token``."""
    bytes_per_token: int | None = None
    """What the engine reads for a token, by the formats that it has; null where not known."""
    out_of_reach: str | None = None
    """What it reads, where its gate cannot be reached with that, and what could reach it."""
    case: str | None = None
    """Of a kernel's time: what was timed, with its sizes; null of a server's metric."""
    configuration_gate: ConfigurationGate | None = None
    """Of a metric that failed the project's gate: what others have measured of the configuration
    under test, less a tenth. Null where the configuration has no gate of its own."""
    #: Of a server that drafts: the fixed texts that it is of, the tokens of a step, and the share
    #: of the drafts that was accepted.
    texts: list[str] | None = None
    accepted_length: float | None = None
    acceptance_rate: float | None = None
    verdict: Verdict = Verdict.NOT_RUN
    """NOT_RUN beside a value: no gate decides on it, and it was measured on a busy machine."""

    @property
    def gated(self) -> bool:
        """Whether something is demanded of it."""
        return self.minimum is not None or self.at_most is not None


class MemoryReport(Record):
    """Memory under load: how it grew, and what a graph of it needs. ``file`` has every sample."""

    file: str
    device_memory: str
    """Where the device's memory is read, or why it is not."""
    samples: int
    peak_bytes: int | None = None
    available_min_bytes: int | None = None
    growth: list[Growth] = Field(default_factory=list)
    curve: list[tuple[float, int, int, float | None]] = Field(default_factory=list)
    """(seconds, bytes of the server's processes, bytes available, share of the KV cache used)."""
    verdict: Verdict = Verdict.NOT_RUN


class CrashReport(Record):
    """An abnormal end, and where its bundle is."""

    kind: str
    summary: str
    owner: str
    happened: str = ""
    """What ended, in words without the cause: "the server died"; empty in older files."""
    test: str | None = None
    bundle: str | None = None
    """Folder of the bundle, in the report directory; null where it could not be written."""


class ChangeReport(Record):
    """A metric that is worse than before by more than is allowed, or may be."""

    metric: str
    unit: str
    here: float | None
    before: float | None
    worse: float | None
    """A fraction: 0.1 for 10 % worse; null where there is no ratio."""
    allowed: float
    """As ``worse``; in ``unit`` where that is null."""
    beside: str
    """What it is compared with, in words: "the trusted run", "5 stored runs", "A"."""
    verdict: Verdict


class ShardTest(Record):
    """A test of the whole run, whichever shard has it."""

    id: str
    level: str


class ShardReport(Record):
    """Which part of a run this is (``--shard``)."""

    index: int
    of: int
    tests: list[ShardTest]
    """All of the whole run, in its order."""


class AgainstReport(Record):
    """This run against a trusted one (``--against``). Of tests, their ids."""

    run: str
    """Which it was."""
    engine: str
    no_worse: bool = False
    new: list[str] = Field(default_factory=list)
    """They do not hold, and did there, or were not there."""
    changed: list[str] = Field(default_factory=list)
    """They failed there, too, but in another way."""
    known: list[str] = Field(default_factory=list)
    """They failed there in the same way."""
    listed: list[str] = Field(default_factory=list)
    """They fail, did not there, and the profile does not need their severity."""
    mended: list[str] = Field(default_factory=list)
    """They failed there, and hold."""
    missing: list[str] = Field(default_factory=list)
    """They ran there, and not here, where they were asked for."""
    not_asked: list[str] = Field(default_factory=list)
    """Levels that ran there, and of which nothing was asked here."""
    path: list[str] = Field(default_factory=list)
    """What differs of the kernel path, though no other was asked for."""
    path_told: list[str] = Field(default_factory=list)
    """What differs of the kernel path as it was asked for, or was not shown there."""
    differs: list[str] = Field(default_factory=list)
    """What else was asked in another way, or of another version."""
    worse: list[str] = Field(default_factory=list)
    """Metrics that are worse, or may be."""
    unjudged: list[str] = Field(default_factory=list)
    """Names of metrics that are worse than allowed, and too few samples say so."""
    metrics: list[str] = Field(default_factory=list)
    """The other metrics of both runs."""
    rates_not_judged: str | None = None
    """Why no rate and no time was compared: the box of the trusted run was DEGRADED; null where
    they were."""
    trade: str = ""
    """How much faster it is, and what its rounding costs; empty where not both were measured."""
    measured: dict[str, MetricReport] = Field(default_factory=dict)
    """What the trusted run measured, where both did."""

    def __str__(self) -> str:
        unjudged, others = " and ".join(self.unjudged), ", ".join(self.not_asked)
        not_compared = f" ({others} not compared)" if others else ""
        not_judged = f" ({unjudged} not judged)" if unjudged else ""
        if self.rates_not_judged is not None:
            not_judged += f" (rates not judged: {self.rates_not_judged})"
        how = f"{'not ' * self.no_worse}worse than {self.run}{not_compared}{not_judged}"
        return f"{how}; {self.trade}" if self.trade else how


class VerdictFile(Record):
    """The whole of verdict.json."""

    schema_version: int = SCHEMA_VERSION
    verdict: Verdict = Verdict.NOT_RUN
    exit_status: int = Verdict.NOT_RUN.exit_status
    reason: str = UNFINISHED
    finished: bool = False
    certified: bool | None = None
    certificate_levels: list[str] | None = None
    """The levels that the certificate asks for: tests of others were left out. Null without
    ``--certify``."""
    arch: str | None
    profile: str
    question: str | None = None
    """What was asked instead of the profile's own question; null where nothing was."""
    started: str
    duration_s: float = 0.0
    engine: EngineReport
    box: BoxReport = Field(default_factory=BoxReport)
    levels: dict[str, LevelReport] = Field(default_factory=dict)
    metrics: dict[str, MetricReport] = Field(default_factory=dict)
    tests: list[TestReport] = Field(default_factory=list)
    starts: list[StartReport] = Field(default_factory=list)
    unproven: list[str] = Field(default_factory=list)
    remarks: list[str] = Field(default_factory=list)
    memory: MemoryReport | None = None
    crashes: list[CrashReport] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=dict)
    fingerprint: Fingerprint | None = None
    """What was asked, of what, on which machine; null in files of earlier versions."""
    shard: ShardReport | None = None
    against: AgainstReport | None = None
    """Null without ``--against``."""
    changes: list[ChangeReport] = Field(default_factory=list)
    """Metrics that are worse than in the trusted run, in stored runs or of A (``--ab``)."""

    def judge(self) -> None:
        """Set the levels' verdicts and the run's from the tests. A test that did not execute
        decides nothing, but without any executed test, or unfinished, they are NOT_RUN."""
        for level in dict.fromkeys(test.level for test in self.tests):
            tests = [test for test in self.tests if test.level == level]
            counts = Counter(
                _how_excused(test)
                if test.excused and test.counted is Verdict.PASS
                else "skipped"
                if test.skipped
                else _COUNTED_AS[test.verdict]
                for test in tests
            )
            verdict = worst(test.counted for test in tests if test.executed)
            self.levels[level] = LevelReport(verdict=verdict, **counts)
        every = [level.verdict for level in self.levels.values()]
        verdicts: list[Verdict] = [verdict for verdict in every if verdict is not Verdict.NOT_RUN]
        if not self.finished:
            verdicts.append(Verdict.NOT_RUN)
        if self._ended_by is not None:
            verdicts.append(Verdict.INCONCLUSIVE)
        self.settle(worst(verdicts))

    @property
    def _ended_by(self) -> CrashReport | None:
        """What ended the run although all that ran may have held: the machine could not go on."""
        return next((crash for crash in self.crashes if crash.kind == MEMORY_FLOOR), None)

    @property
    def certificate_covers(self) -> str | None:
        """Levels that the certificate covers, that ran beside it, and that were not selected; None
        without ``--certify``."""
        if self.certificate_levels is None:
            return None
        others = [level for level in LEVELS if level not in self.certificate_levels]
        beside = [level for level in others if level in self.levels]
        missing = [level for level in others if level not in self.levels]
        text = ", ".join(self.certificate_levels)
        if beside:
            text += f"; also ran, beside the certificate: {', '.join(beside)}"
        return f"{text}; not selected: {', '.join(missing)}" if missing else text

    @property
    def certificate(self) -> str:
        """Whether it was certified, with how many waivers (``certified with 3 waivers``), and by
        whose profile where that is not the shipped one."""
        waived = sum(test.waived for test in self.tests)
        waivers = f" with {waived} waiver{'s' * (waived > 1)}" if waived else ""
        foreign = self.fingerprint is not None and self.fingerprint.profile_shipped is False
        by = f" by profile {self.profile}, which is not the shipped one" if foreign else ""
        return f"certified{waivers}{by}" if self.certified else "not certified"

    def why(self) -> str:
        """One line on why a run has its verdict, so far as it went."""
        excused = [t for t in self.tests if t.excused and t.counted is not t.verdict]
        return templates.rendered(
            "why.j2",
            run=self,
            ended=self._ended_by,
            excused=Counter(map(_how_excused, excused)),
            unfinished=UNFINISHED,
            full=FULL,
        )

    def settle(self, verdict: Verdict) -> None:
        """Set the run's verdict together with its exit status."""
        self.verdict = verdict
        self.exit_status = verdict.exit_status


def _how_excused(test: TestReport) -> str:
    return "waived" if test.waived else test.tolerated or ""


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of verdict.json, as published in docs/."""
    schema = VerdictFile.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def write(file: VerdictFile, path: Path) -> None:
    """Write atomically: a reader, or a crash, sees the old file or the new one."""
    write_text(json_text(file) + "\n", path)


def parse(raw: Any) -> VerdictFile:
    """A verdict.json of any version: what came later has its default, unknown keys are left out.
    Raises ValueError: it is not one."""
    if not isinstance(raw, dict) or "schema_version" not in raw:
        raise ValueError("it has no schema_version")
    if raw["schema_version"] == 1:  # it has a failure's text alone
        for test in raw.get("tests") or ():
            if isinstance(test, dict) and test.get("said"):
                test["unmet"] = [{"required": "", "observed": test["said"]}]
    file = lenient.validate(VerdictFile, raw)
    for name, kind in (("git_shas", dict), ("gpus", list)):
        entries = file.environment.get(name) or kind()
        values = entries.values() if isinstance(entries, dict) else entries
        if not isinstance(entries, kind) or not all(
            isinstance(each or {}, dict) for each in values
        ):
            raise ValueError(f"expected {kind.__name__} of objects at environment.{name}")
    return file


def read(path: Path) -> VerdictFile:
    """Read a verdict.json of any version. A number that is none, as Python writes it, is null.
    Raises OSError, ValueError: it is not there, or not one."""
    return parse(json.loads(path.read_text("utf-8"), parse_constant=lambda _: None))
