"""The model of verdict.json, its JSON Schema, and the functions that read and write it."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sm121.core import described_schema, lenient, templates
from sm121.core.data_file import Record
from sm121.core.files import write_text
from sm121.core.json_text import json_text
from sm121.core.node_id import name_of
from sm121.core.profile_fields import FULL, LEVELS
from sm121.core.unmet import Fact, facts_text
from sm121.core.verdict import Severity, Verdict, worst
from sm121.engines.pool import StartReport
from sm121.run.engine_report import EngineReport
from sm121.run.fingerprint import Fingerprint
from sm121.run.machine_report import MEMORY_FLOOR, BoxReport, CrashReport, MemoryReport
from sm121.run.shard_report import ShardReport

NAME = "verdict.json"
SCHEMA_VERSION = 2


class LevelReport(Record):
    """A level: its verdict, and the number of its tests with each outcome."""

    verdict: Verdict = Verdict.NOT_RUN
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    waived: int = 0
    known: int = 0
    """The number of failures that the trusted run (``--against``) has in the same way."""
    listed: int = 0
    """The number of failures of a severity that the profile tolerates."""
    invalid: int = 0
    inconclusive: int = 0
    not_run: int = 0


#: For each verdict: the field of `LevelReport` with the number of its tests.
_COUNTED_AS = {
    Verdict.PASS: "passed",
    Verdict.FAIL: "failed",
    Verdict.INVALID: "invalid",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.NOT_RUN: "not_run",
}

#: The reason of a run that is in progress, or was killed.
UNFINISHED = "the run has not finished"
#: The prefix of the ids of decisions that no test makes.
BESIDE = "end of the run::"
#: The prefix of the ids of decisions by ``--against``.
AGAINST = "--against::"


class JudgedKernel(Record):
    """The kernel that a numerics test compares with the oracle."""

    operation: str
    provider: str | None = None
    """The provider whose kernel was compared with the oracle; null if none was."""


class TestReport(Record):
    """One test. ``message`` is one line for people; ``unmet`` is what programs read."""

    __test__ = False  # pytest would collect the class because of its name

    id: str
    level: str
    verdict: Verdict
    message: str = ""
    seconds: float = 0.0
    unmet: list[Fact] = Field(default_factory=list)
    """The unmet requirements of a failure, or of an undecided test."""
    skipped: bool = False
    waived: bool = False
    severity: Severity = Severity.BLOCKER
    """The severity of the test's failure; for a passed test, the severity of a possible failure."""
    tolerated: Literal["known", "listed"] | None = None
    """Why the test's failure does not count: the run of ``--against`` has it too, or the profile
    tolerates its severity."""
    kernel: JudgedKernel | None = None
    """The kernel that a test of the numerics judged; null for other tests."""
    ability: str | None = None
    """The ability that the engine needs for the test: ``oracle`` for answers like the oracle's."""
    metrics: list[str] = Field(default_factory=list)
    """The metrics that the test measured; for a decision of an option, those that it judged."""
    deviations: list[str] | None = None
    """The known deviations of this engine's version that the test found and did not count as
    failures; null if the test looks for none."""
    symptoms: list[str] = Field(default_factory=list)
    """The symptom of each deviation in ``deviations``, in one line."""
    mended: list[str] = Field(default_factory=list)
    """The known bugs and deviations of this engine's version that did not occur in the test, each
    in one line."""
    known_bug: str | None = None
    """The known bug of the engine that explains the failure, with its versions and its link."""

    @classmethod
    def of(
        cls, identity: str, level: str, *facts: Fact, verdict: Verdict = Verdict.FAIL
    ) -> "TestReport":
        """Return a decision that no test makes.

        Args:
            identity: The id of the decision.
            level: The level to which the decision belongs.
            *facts: The unmet requirements.
            verdict: The verdict.
        """
        return cls(
            id=identity, level=level, verdict=verdict, message=facts_text(facts), unmet=list(facts)
        )

    @property
    def name(self) -> str:
        """The id without its file and its class, or the words of a decision that no test makes."""
        return self.id.removeprefix(BESIDE) if self.has_no_test else name_of(self.id)

    @property
    def has_no_test(self) -> bool:
        """Whether this is a decision that no test makes."""
        return self.id.startswith(BESIDE)

    @property
    def is_of_option(self) -> bool:
        """Whether an option made this decision, such as ``--benchmark-compare-fail``."""
        return self.id.startswith("--")

    @property
    def facts(self) -> list[Fact]:
        """The unmet requirements; if there are none, one requirement whose text is the message."""
        return self.unmet or [Fact("", self.message)]

    @property
    def counted(self) -> Verdict:
        """The verdict that counts: PASS for an excused failure, otherwise the verdict."""
        if self.excused and self.verdict is Verdict.FAIL:
            return Verdict.PASS
        return self.verdict

    @property
    def excused(self) -> bool:
        """Whether this is a failure that does not count."""
        return self.waived or self.tolerated is not None

    @property
    def executed(self) -> bool:
        """Whether the test ran. A test that was skipped or not reached has no effect."""
        return not self.skipped and self.verdict is not Verdict.NOT_RUN


class ConfigurationGate(Record):
    """A gate that the profile sets for one configuration only, and its verdict."""

    configuration: str
    minimum: float | None = None
    at_most: float | None = None
    verdict: Verdict


class MetricReport(Record):
    """One metric and its gate. Values that were not measured, and unset limits, are null."""

    value: float | None
    unit: str
    ci_low: float | None = None
    ci_high: float | None = None
    confidence: float | None = None
    rounds: int = 0
    starts: int | None = None
    """The starts of the server (for ``ab:``, of each side); null if they are not known. A start
    counts once, however many rounds it has."""
    start_spread: float | None = None
    """The standard deviation between earlier starts of this build, as a fraction, with which the
    gate was judged; null if too few starts are stored."""
    minimum: float | None = None
    target: float | None = None
    stretch: float | None = None
    at_most: float | None = None
    grade: str | None = None
    clock: str | None = None
    roofline: float | None = None
    """The share of ``bound`` that a decode rate reached."""
    bound: float | None = None
    """The rate in tok/s that the memory allows with ``bytes_per_token``."""
    bytes_per_token: int | None = None
    """The bytes that the engine reads for a token, by its formats; null if they are not known."""
    out_of_reach: str | None = None
    """Why the gate cannot be reached with ``bytes_per_token``; a configuration that could do so."""
    case: str | None = None
    """The case of a kernel's time, with its sizes; null for a server's metric."""
    configuration_gate: ConfigurationGate | None = None
    """If the gate in force failed: the gate that the profile sets for the configuration under test
    only, and its verdict. Null if the configuration has none."""
    texts: list[str] | None = None
    """The fixed texts that a server with speculative decoding answered."""
    accepted_length: float | None = None
    """The tokens per step of a server with speculative decoding."""
    acceptance_rate: float | None = None
    """The fraction of the draft tokens that was accepted."""
    verdict: Verdict = Verdict.NOT_RUN
    """The verdict; NOT_RUN with a value: it was measured on a busy machine, and has no gate."""

    @property
    def gated(self) -> bool:
        """Whether the metric has a gate."""
        return self.minimum is not None or self.at_most is not None


class ChangeReport(Record):
    """A metric that is worse than before by more than is allowed, or may be worse."""

    metric: str
    unit: str
    here: float | None
    before: float | None
    worse: float | None
    """By which fraction the metric is worse, for example 0.1 for 10 %; null without a ratio."""
    allowed: float
    """The allowed value of ``worse``; if ``worse`` is null, the allowed difference in ``unit``."""
    beside: str
    """The reference in words: "the trusted run", "5 stored runs", "A"."""
    verdict: Verdict


class AgainstReport(Record):
    """The comparison of this run with a trusted run (``--against``). Lists of tests contain ids."""

    run: str
    """The trusted run."""
    engine: str
    no_worse: bool = False
    nothing_in_common: bool = False
    new: list[str] = Field(default_factory=list)
    """Failures of tests that passed in the trusted run, or that it did not have."""
    changed: list[str] = Field(default_factory=list)
    """Failures in both runs, in different ways."""
    known: list[str] = Field(default_factory=list)
    """Failures in both runs, in the same way."""
    listed: list[str] = Field(default_factory=list)
    """New failures of a severity that the profile tolerates."""
    mended: list[str] = Field(default_factory=list)
    """Tests that failed in the trusted run and pass in this one."""
    missing: list[str] = Field(default_factory=list)
    """Tests of the trusted run that were selected in this run but did not run."""
    not_asked: list[str] = Field(default_factory=list)
    """Levels of the trusted run of which no test was selected in this run."""
    path: list[str] = Field(default_factory=list)
    """Differences of the kernel path that no request explains."""
    path_told: list[str] = Field(default_factory=list)
    """Differences of the kernel path that were requested, or that the trusted log did not show."""
    differs: list[str] = Field(default_factory=list)
    """Other differences in the requests, or in versions."""
    worse: list[str] = Field(default_factory=list)
    """Metrics that are worse, or may be worse."""
    unjudged: list[str] = Field(default_factory=list)
    """Names of metrics that were not judged, for example because of too few samples."""
    metrics: list[str] = Field(default_factory=list)
    """The other metrics of both runs."""
    rates_not_judged: str | None = None
    """Why rates and times were not compared (DEGRADED machine, or nothing measured), or null."""
    trade: str = ""
    """How much faster this run is, and the cost of its rounding; empty unless both are measured."""
    measured: dict[str, MetricReport] = Field(default_factory=dict)
    """The metrics of the trusted run that both runs measured."""

    def __str__(self) -> str:
        line = f"not worse than {self.run}" if self.no_worse else f"worse than {self.run}"
        if self.not_asked:
            line += f" ({', '.join(self.not_asked)} not compared)"
        if self.unjudged:
            line += f" ({' and '.join(self.unjudged)} not judged)"
        if self.rates_not_judged is not None:
            line += f" (rates not judged: {self.rates_not_judged})"
        if self.trade:
            line += f"; {self.trade}"
        return line


class VerdictFile(Record):
    """The content of verdict.json."""

    schema_version: int = SCHEMA_VERSION
    verdict: Verdict = Verdict.NOT_RUN
    exit_status: int = Verdict.NOT_RUN.exit_status
    reason: str = UNFINISHED
    finished: bool = False
    certified: bool | None = None
    no_oracle: str | None = None
    """Why the profile's model has no oracle, in a certified run. Null if it has one."""
    certificate_levels: list[str] | None = None
    """The levels of ``--certify``; tests of other levels were left out. Null without it."""
    arch: str | None
    profile: str
    question: str | None = None
    """The question that the named configuration's gates test; null if the profile's gates apply."""
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
    """The fingerprint of the run; null in files of earlier versions."""
    shard: ShardReport | None = None
    against: AgainstReport | None = None
    """The comparison with the trusted run; null without ``--against``."""
    changes: list[ChangeReport] = Field(default_factory=list)
    """Metrics that are worse than in the trusted run, in stored runs or in A (``--ab``)."""

    def judge(self) -> None:
        """Set the verdicts of the levels and of the run from the tests.

        Tests that did not run have no effect. A level without a test that ran is NOT_RUN, and so
        is an unfinished run.
        """
        by_level: dict[str, list[TestReport]] = {}
        for test in self.tests:
            by_level.setdefault(test.level, []).append(test)
        for level, tests in by_level.items():
            counts = Counter(_counted_as(test) for test in tests)
            verdict = worst(test.counted for test in tests if test.executed)
            self.levels[level] = LevelReport(verdict=verdict, **counts)
        verdicts: list[Verdict] = []
        for report in self.levels.values():
            if report.verdict is not Verdict.NOT_RUN:
                verdicts.append(report.verdict)
        if not self.finished:
            verdicts.append(Verdict.NOT_RUN)
        if self._ended_by is not None:
            verdicts.append(Verdict.INCONCLUSIVE)
        self.settle(worst(verdicts))

    @property
    def _ended_by(self) -> CrashReport | None:
        """The crash in which the suite ended the run for lack of memory; None without one."""
        ended = [crash for crash in self.crashes if crash.kind == MEMORY_FLOOR]
        return ended[0] if ended else None

    @property
    def certificate_covers(self) -> str | None:
        """The levels that the certificate covers, other levels that ran, and levels not selected.

        None without ``--certify``.
        """
        if self.certificate_levels is None:
            return None
        others = [level for level in LEVELS if level not in self.certificate_levels]
        beside = [level for level in others if level in self.levels]
        missing = [level for level in others if level not in self.levels]
        text = ", ".join(self.certificate_levels)
        if beside:
            text += f"; also ran, but not required by the certificate: {', '.join(beside)}"
        if missing:
            text += f"; not selected: {', '.join(missing)}"
        return text

    @property
    def certificate(self) -> str:
        """The certificate in words: ``certified with 3 waivers``, ``not certified``.

        The text names the profile if it is not one that the suite ships.
        """
        if not self.certified:
            return "not certified"
        line = "certified"
        waived = [test for test in self.tests if test.waived]
        if waived:
            noun = "waiver" if len(waived) == 1 else "waivers"
            line += f" with {len(waived)} {noun}"
        if self.fingerprint is not None and self.fingerprint.profile_shipped is False:
            line += f" by profile {self.profile}, which is not the shipped one"
        if self.no_oracle is not None:
            line += f", without an oracle: {self.no_oracle}"
        return line

    def why(self) -> str:
        """Return the reason for the run's verdict so far as one line."""
        excused = Counter(
            _how_excused(test) for test in self.tests if test.counted is not test.verdict
        )
        return templates.rendered(
            "why.j2",
            run=self,
            ended=self._ended_by,
            excused=excused,
            unfinished=UNFINISHED,
            full=FULL,
        )

    def settle(self, verdict: Verdict) -> None:
        """Set the run's verdict and its exit status.

        Args:
            verdict: The verdict.
        """
        self.verdict = verdict
        self.exit_status = verdict.exit_status


def _counted_as(test: TestReport) -> str:
    """Return the field of `LevelReport` that counts a test."""
    if test.excused and test.counted is Verdict.PASS:
        return _how_excused(test)
    if test.skipped:
        return "skipped"
    return _COUNTED_AS[test.verdict]


def _how_excused(test: TestReport) -> str:
    """Return "waived", "known" or "listed"; an empty string if the failure is not excused."""
    if test.waived:
        return "waived"
    return test.tolerated or ""


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of verdict.json, as published in docs/."""
    schema = described_schema.json_schema(VerdictFile, "serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def write(file: VerdictFile, path: Path) -> None:
    """Write a verdict.json atomically: a reader finds the old or the new content, never a mixture.

    Args:
        file: The content.
        path: The path of the file.

    Raises:
        OSError: The file cannot be written.
    """
    write_text(json_text(file) + "\n", path)


def parse(raw: Any) -> VerdictFile:
    """Parse the data of a verdict.json of any version.

    Args:
        raw: The parsed JSON. Missing fields get their defaults; unknown keys are ignored.

    Raises:
        ValueError: The data are not a verdict.json.
    """
    if not isinstance(raw, dict) or "schema_version" not in raw:
        raise ValueError("it has no schema_version")
    tests = raw.get("tests")
    # Version 1 has the text of a failure instead of the unmet requirements.
    if raw["schema_version"] == 1 and isinstance(tests, list):
        for test in tests:
            if isinstance(test, dict) and test.get("said"):
                test["unmet"] = [{"required": "", "observed": test["said"]}]
    file = lenient.validate(VerdictFile, raw)
    shas = file.environment.get("git_shas") or {}
    if not isinstance(shas, dict) or not _are_objects(shas.values()):
        raise ValueError("expected dict of objects at environment.git_shas")
    gpus = file.environment.get("gpus") or []
    if not isinstance(gpus, list) or not _are_objects(gpus):
        raise ValueError("expected list of objects at environment.gpus")
    return file


def _are_objects(values: Iterable[Any]) -> bool:
    """Return whether each value is an object or null."""
    return all(isinstance(value or {}, dict) for value in values)


def read(path: Path) -> VerdictFile:
    """Read a verdict.json of any version.

    Args:
        path: The file. NaN and Infinity, which Python's json module may write, are read as null.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a verdict.json.
    """
    return parse(json.loads(path.read_text("utf-8"), parse_constant=lambda _: None))
