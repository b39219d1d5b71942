"""The matrix level: the cells of a plan, what each came to, and what that says together."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from sm121.core.configuration import ServerConfiguration
from sm121.core.time_range import duration
from sm121.core.unmet import Fact, Unmet, require, require_none
from sm121.core.verdict import Invalid, NotRun
from sm121.matrix import covering, feature_matrix, isolation, size
from sm121.matrix.axes import Cell, identity, label
from sm121.matrix.covering import Planned
from sm121.matrix.examine import Baseline, Examiner
from sm121.matrix.outcome import CellOutcome, CellRecord
from sm121.matrix.plan import CellPlan
from sm121.run.harness import Harness

#: Of a test's time, what is kept for stopping a server and for the reports.
_SPARE_S = 15.0
#: Of the report directory: everything that the matrix level writes.
FOLDER = "matrix"
_NEVER_WAIVED = {CellOutcome.CRASH: "a crash", CellOutcome.FALLBACK: "the kernel path"}


class MatrixLevel:
    """Runs the cells of a `plan`, each when asked for, and writes ``matrix/`` after each. Where the
    suite starts its servers, any cell can be examined. An attached one is taken for what the cell
    says: the baseline, or, with the `baseline` of another level (its answers and rate), any other
    cell; what the log does not show is not taken on trust. `cache`: folder of what oracles
    computed (default: the level's own)."""

    def __init__(
        self,
        harness: Harness,
        plan: CellPlan,
        *,
        cache: Path | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        self.harness = harness
        self.plan = plan
        self.space = plan.space
        self.directory = harness.directory / FOLDER
        #: Cells of this run, as they ended.
        self.records: list[CellRecord] = []
        #: Starts of the baseline that are no cell of this run's: others were compared with them.
        self.references: list[CellRecord] = []
        self.sets: list[isolation.FailingSet] = []
        oracles = (cache or self.directory) / "oracle"
        self._examiner = Examiner(
            harness, plan.space, plan.settings, self.directory, baseline, oracles
        )

    @property
    def baseline(self) -> Baseline | None:
        """The baseline's answers and rate, once it was examined."""
        return self._examiner.baseline

    def judge(self, planned: Planned | None) -> None:
        """The cell works. Raises Unmet: it does not; names the outcome, the reason and the
        evidence. A crash and another kernel path are never waived. Invalid, NotRun: that could not
        be told."""
        if planned is None:
            raise NotRun(f"profile {self.plan.profile.name} has no cells to try")
        record = self._record_of(planned) or self.examine(planned)
        evidence = record.bundle or record.log
        fact = Fact(
            "the cell works",
            f"{record.outcome}: {record.reason}",
            evidence=f"{self.harness.directory / evidence}" if evidence else "",
        )
        if record.outcome is CellOutcome.INVALID:
            raise Invalid(fact)
        if record.outcome is CellOutcome.NOT_RUN:
            raise NotRun(fact)
        if record.outcome.broken:
            raise Unmet(fact, never_waived=_NEVER_WAIVED.get(record.outcome, ""))

    def covered(self) -> None:
        """The plan has every combination that was asked for. Raises Unmet: it has not."""
        strength = self.plan.array.strength
        if not isinstance(strength, int):
            return
        cells = [planned.cell for planned in self.plan.cells]
        covered = covering.coverage(self.space, cells, strength)
        missing = ", ".join(label(choice) for choice in covered.missing[:5])
        required = f"all allowed combinations of {strength} values"
        require(not missing, required, f"all but {missing}")

    def isolate(self) -> None:
        """Nothing fails, or what fails is known down to the smallest set of values. Raises Unmet:
        names the sets; NotRun: none came to an outcome."""
        if not self.records:
            raise NotRun("no cell came to an outcome")
        boots = self.plan.settings.isolation_boots
        limit = float(self.plan.profile.test_timeout_s.get("matrix", float("inf")))
        ends = time.monotonic() + limit - _SPARE_S

        def try_cell(cell: dict[str, str]) -> CellRecord | None:
            nonlocal boots
            longest = max(record.took_s for record in self.records)
            if boots == 0 or self.harness.obstacle() or time.monotonic() + longest > ends:
                return None
            boots -= 1
            self.harness.say("matrix", f"isolating: {identity(self.space, cell)}")
            return self.examine(Planned(cell, ("isolating",)), isolating=True)

        self._found(isolation.smallest(self.space, list(self.records), try_cell, self._found))
        file = self.directory / feature_matrix.MARKDOWN
        require_none([Fact("no failing set", f"{one}") for one in self.sets], evidence=file)

    def _found(self, sets: Sequence[isolation.FailingSet]) -> None:
        """Keep what is known; a test that runs out of time has written it."""
        self.sets = list(sets)
        self.write()

    def outlook(self) -> list[str]:
        """What is going to happen, a line each."""
        return size.of_run(self.plan)

    def account(self) -> list[str]:
        """What came of it, for the terminal."""
        spent = size.spent(self.records, self.references)
        planned = {identity(self.space, planned.cell) for planned in self.plan.cells}
        open_ones = planned - {record.id for record in self.records}
        lines = [
            f"{len(open_ones)} of {len(planned)} cells have no outcome" if open_ones else "",
            feature_matrix.counted(self.records),
            f"{spent['cells']:.0f} cells on {spent['boots']:.0f} boots in "
            f"{duration(spent['seconds'])}, {duration(spent['boot_s'])} of it boots",
            *(str(one) for one in self.sets),
            f"{self.directory / feature_matrix.MARKDOWN}",
        ]
        return [self.harness.redact(line) for line in lines if line]

    def configuration(self, cell: Cell) -> ServerConfiguration | None:
        """What is started for a cell, the profile's own where it is the same; None: attached."""
        if self.harness.attached is not None:
            return None
        arguments, environment = self.plan.of_cell(cell)
        for shipped in self.harness.configurations.values():
            if shipped.arguments == arguments and shipped.environment == environment:
                return shipped
        under_test = self.harness.managed_configuration(self.harness.profile.under_test)
        configuration = dataclasses.replace(
            under_test, name="matrix", arguments=arguments, environment=environment, traces=None
        )
        return dataclasses.replace(configuration, name=f"matrix-{configuration.key[:8]}")

    def write(self, *, interrupted: bool = False) -> None:
        """matrix.json and FEATURE_MATRIX.md as they stand. `interrupted`: no more cells come."""
        file = feature_matrix.build(
            self.space,
            self.plan.array,
            self.records,
            self.sets,
            profile=self.plan.profile.name,
            references=self.references,
            interrupted=interrupted,
        )
        redact, command = self.harness.redact, self.plan.command
        feature_matrix.write(self.space, file, self.directory, command=command, redact=redact)

    def examine(self, planned: Planned, *, isolating: bool = False) -> CellRecord:
        """Run a cell to its end; the baseline first, where it has given no answers yet.
        `isolating`: it is run to find a smallest set of values, not as part of the plan. Raises
        NotRun: no server is started any more, or nothing is there to compare with."""
        harness = self.harness
        is_baseline = planned.cell == self.space.baseline
        if (why := harness.obstacle()) is not None:
            raise NotRun(why)
        if self.baseline is None and not is_baseline:
            if harness.attached is not None:
                raise NotRun(
                    "the attached server cannot be compared with itself; give the baseline of "
                    "a level whose server is the baseline"
                )
            # Its own test is elsewhere: another shard, another worker.
            harness.say("matrix", "the baseline, to compare with")
            baseline = Planned(self.space.baseline, ("baseline",))
            record = self._examiner.examine(baseline, self.configuration(baseline.cell))
            self.references.append(record)
            if record.outcome.broken and self._record_of(baseline) is None:
                self._examiner.baseline = None
            if self.baseline is None:
                raise NotRun("the baseline came to no answers; nothing can be compared with it")
        name = identity(self.space, planned.cell)
        harness.say("matrix", f"{name} ({len(self.records) + 1})")
        configuration = self.configuration(planned.cell)
        again = isolating and self._record_of(planned) is not None
        if again and configuration is not None:
            harness.start_anew(configuration)
        record = self._examiner.examine(planned, configuration, isolating=isolating)
        harness.say("matrix", f"{name}: {record.outcome} {record.reason[:160]}")
        if not is_baseline or isolating or planned in self.plan.cells:
            self.records.append(record)
            self.write()
        return record

    def _record_of(self, planned: Planned) -> CellRecord | None:
        return next((r for r in self.records if r.values == planned.cell), None)
