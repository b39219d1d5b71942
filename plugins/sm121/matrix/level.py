"""The matrix level: it runs the cells of a plan and finds the values that fail."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from sm121.core.configuration import ServerConfiguration
from sm121.core.time_range import duration
from sm121.core.unmet import Fact, Unmet, require, require_none
from sm121.core.verdict import Invalid, NotRun
from sm121.matrix import covering, feature_matrix, isolation, size
from sm121.matrix.axes import Cell, label
from sm121.matrix.covering import Planned
from sm121.matrix.examine import Baseline, Examiner
from sm121.matrix.plan import CellPlan
from sm121.matrix.space import identity
from sm121.run.cell_record import CellOutcome, CellRecord
from sm121.run.events import CellExamined
from sm121.run.run import Run

#: Seconds of a test's time limit that are reserved for stopping a server and writing reports.
_SPARE_S = 15.0
#: The folder in the report directory with everything that the matrix level writes.
FOLDER = "matrix"
#: Outcomes that a waiver cannot tolerate, as text.
_NEVER_WAIVED = {CellOutcome.CRASH: "a crash", CellOutcome.FALLBACK: "the kernel path"}


class MatrixLevel:
    """Runs the cells of a plan, and writes ``matrix/`` after each.

    A cell with an outcome in the run's events is not examined again. If the run was resumed, these
    are the cells of the killed process, too; the baseline is then started again for comparison.

    If the suite starts its servers, each cell can run. An attached server is assumed to be the cell
    that is examined: the baseline, or another cell if ``baseline`` has the results of a baseline.
    Without a log of an attached server, expectations on log lines are not checked.

    Args:
        run: The run.
        plan: The cells.
        cache: The folder for the oracle's results. None: the folder of the level.
        baseline: The answers and the rate of another level's baseline.
    """

    def __init__(
        self,
        run: Run,
        plan: CellPlan,
        *,
        cache: Path | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        self.run = run
        self.plan = plan
        self.space = plan.space
        self.directory = run.record.directory / FOLDER
        self.sets: list[isolation.FailingSet] = []
        oracles = (cache or self.directory) / "oracle"
        self._examiner = Examiner(run, plan.space, plan.settings, self.directory, baseline, oracles)

    @property
    def baseline(self) -> Baseline | None:
        """The baseline's answers and rate; None before it has run."""
        return self._examiner.baseline

    @property
    def records(self) -> Sequence[CellRecord]:
        """The cells of this run, as they ended."""
        return self.run.record.cells

    def judge(self, planned: Planned | None) -> None:
        """Check that a cell works; run it if it has no outcome yet.

        Args:
            planned: The cell; None if the plan has no cells.

        Raises:
            Unmet: The cell does not work. A crash or another kernel path is never waived.
            Invalid: The cell's rate is invalid, or another check was undecided.
            NotRun: The cell could not run.
        """
        if planned is None:
            raise NotRun(f"profile {self.plan.profile.name} has no cells")
        record = self._record_of(planned) or self.examine(planned)
        file = record.bundle or record.log
        fact = Fact(
            required="a cell that works",
            observed=f"{record.outcome}: {record.reason}",
            evidence=str(self.run.record.directory / file) if file else "",
        )
        if record.outcome is CellOutcome.INVALID:
            raise Invalid(fact)
        if record.outcome is CellOutcome.NOT_RUN:
            raise NotRun(fact)
        if record.outcome.broken:
            raise Unmet(fact, never_waived=_NEVER_WAIVED.get(record.outcome, ""))

    def covered(self) -> None:
        """Check that the plan contains all allowed combinations of its strength.

        Raises:
            Unmet: A combination is missing.
        """
        strength = self.plan.array.strength
        if not isinstance(strength, int):
            return
        cells = [planned.cell for planned in self.plan.cells]
        covered = covering.coverage(self.space, cells, strength)
        missing = ", ".join(map(label, covered.missing[:5]))
        required = f"all allowed combinations of {strength} values"
        require(not missing, required, f"all but {missing}")

    def isolate(self) -> None:
        """Check that nothing fails; find the smallest failing sets.

        Raises:
            Unmet: Some values fail. The facts are the sets.
            NotRun: No cell has an outcome.
        """
        if not self.records:
            raise NotRun("no cell has an outcome")
        boots = self.plan.settings.isolation_boots
        limit = float(self.plan.profile.test_timeout_s.get("matrix", float("inf")))
        deadline = time.monotonic() + limit - _SPARE_S

        def try_cell(cell: dict[str, str]) -> CellRecord | None:
            nonlocal boots
            longest = max(record.took_s for record in self.records)
            if boots == 0 or self.run.servers.obstacle() or time.monotonic() + longest > deadline:
                return None
            boots -= 1
            self.run.record.say("matrix", f"isolating: {identity(self.space, cell)}")
            return self.examine(Planned(cell, ("isolating",)), isolating=True)

        self._found(isolation.smallest(self.space, list(self.records), try_cell, self._found))
        file = self.directory / feature_matrix.MARKDOWN
        facts = [Fact("no failing set", str(failing_set)) for failing_set in self.sets]
        require_none(facts, evidence=file)

    def _found(self, sets: Sequence[isolation.FailingSet]) -> None:
        """Keep and write the failing sets found so far, in case the test runs out of time."""
        self.sets = list(sets)
        self.write()

    def outlook(self) -> list[str]:
        """Return the size of the matrix: one line on the axes, one on the cells."""
        return size.of_run(self.plan)

    def account(self) -> list[str]:
        """Return the results as lines for the terminal."""
        spent = size.spent(self.records, self.run.record.references)
        planned = {identity(self.space, planned.cell) for planned in self.plan.cells}
        not_run = planned - {record.id for record in self.records}
        lines = []
        if not_run:
            lines.append(f"{len(not_run)} of {len(planned)} cells have no outcome")
        if self.records:
            lines.append(feature_matrix.counted(self.records))
        lines.append(
            f"{spent['cells']:.0f} cells with {spent['boots']:.0f} starts in "
            f"{duration(spent['seconds'])}, of which the starts took {duration(spent['boot_s'])}"
        )
        lines.extend(map(str, self.sets))
        lines.append(str(self.directory / feature_matrix.MARKDOWN))
        return [self.run.record.redact(line) for line in lines]

    def configuration(self, cell: Cell) -> ServerConfiguration | None:
        """Return the configuration of a cell's server.

        Args:
            cell: The cell.

        Returns:
            A configuration of the profile if it is equal, else a new one. None if the server is
            attached.
        """
        if self.run.servers.attached is not None:
            return None
        arguments, environment = self.plan.of_cell(cell)
        for shipped in self.run.configurations.by_name.values():
            if shipped.arguments == arguments and shipped.environment == environment:
                return shipped
        under_test = self.run.configurations.managed(self.run.profile.under_test)
        configuration = dataclasses.replace(
            under_test, name="matrix", arguments=arguments, environment=environment, traces=None
        )
        return dataclasses.replace(configuration, name=f"matrix-{configuration.key[:8]}")

    def write(self, *, interrupted: bool = False) -> None:
        """Write matrix.json and FEATURE_MATRIX.md with the results so far.

        Args:
            interrupted: Whether no more cells will run.
        """
        file = feature_matrix.build(
            self.space,
            self.plan.array,
            self.records,
            self.sets,
            profile=self.plan.profile.name,
            references=self.run.record.references,
            interrupted=interrupted,
        )
        feature_matrix.write(
            self.space,
            file,
            self.directory,
            command=self.plan.command,
            redact=self.run.record.redact,
        )

    def examine(self, planned: Planned, *, isolating: bool = False) -> CellRecord:
        """Run a cell to its end. If the baseline has no answers yet, run the baseline first.

        Args:
            planned: The cell.
            isolating: Whether it runs to find a smallest failing set, not as part of the plan. If
                it has run already, its server is started again.

        Raises:
            NotRun: No further server can be started, or the baseline has no answers.
        """
        run = self.run
        is_baseline = planned.cell == self.space.baseline
        obstacle = run.servers.obstacle()
        if obstacle is not None:
            raise NotRun(obstacle)
        if self.baseline is None and not is_baseline:
            self._examine_baseline()
        name = identity(self.space, planned.cell)
        run.record.say("matrix", f"{name} ({len(self.records) + 1})")
        configuration = self.configuration(planned.cell)
        again = isolating and self._record_of(planned) is not None
        if again and configuration is not None:
            run.servers.start_anew(configuration)
        record = self._examiner.examine(planned, configuration, isolating=isolating)
        run.record.say("matrix", f"{name}: {record.outcome} {record.reason[:160]}")
        if not is_baseline or isolating or planned in self.plan.cells:
            run.record.emit(CellExamined(record))
            self.write()
        return record

    def _examine_baseline(self) -> None:
        """Run the baseline for comparison; its own test is in another shard or worker."""
        if self.run.servers.attached is not None:
            raise NotRun(
                "the attached server cannot be compared with itself: give the "
                "results of a level that ran on the baseline's server"
            )
        self.run.record.say("matrix", "the baseline, to compare with")
        baseline = Planned(self.space.baseline, ("baseline",))
        record = self._examiner.examine(baseline, self.configuration(baseline.cell))
        self.run.record.emit(CellExamined(record, is_reference=True))
        if record.outcome.broken and self._record_of(baseline) is None:
            self._examiner.baseline = None
        if self.baseline is None:
            raise NotRun("the baseline gave no answers, so no cell can be compared with it")

    def _record_of(self, planned: Planned) -> CellRecord | None:
        for record in self.records:
            if record.values == planned.cell:
                return record
        return None
