"""The plan of a run.

``pytest --collect-only`` makes it; both this command and ``sm121 plan`` show it.

``sm121 plan`` starts ``pytest --collect-only`` with the environment variable `VARIABLE`. The plugin
writes a `PlanAnswer` to the file that this variable names.
"""

import os
from pathlib import Path

from sm121.core.data_file import Record
from sm121.core.profile_fields import LEVELS
from sm121.core.templates import one_line, rendered

#: The environment variable with the path of the file to which the plan is written.
VARIABLE = "SM121_PLAN_FILE"


class Machine(Record):
    """The machine on which pytest runs."""

    #: The machine's architecture; None if the suite has no name for it.
    arch: str | None
    #: How the architecture was detected.
    evidence: str
    #: The name of the machine's GPU, or of its CPU if it has no GPU.
    processor: str | None
    cores: int | None
    memory_gib: int | None
    #: One line per known fault of the machine.
    faults: list[str]


class StartedEngine(Record):
    """The engine that the run would start."""

    name: str
    version: str | None
    python: str
    model: str


class SpannedNodes(Record):
    """The machines of a server that spans several machines."""

    count: int
    tensor_parallel: int
    #: The name of the launcher on all machines; None if the server is attached.
    launcher: str | None
    transports: list[str]
    #: The shell command for each of the other nodes.
    commands: list[str]


class PlanTime(Record):
    """A plan of the profile, and its duration."""

    name: str
    checks: int
    #: Number of checks whose duration was measured on this machine.
    timed: int
    #: The duration of each of the plan's levels; None if it is unknown.
    levels: dict[str, str | None]
    #: The duration of the whole plan; None if it is unknown.
    time: str | None


class ShippedTimes(Record):
    """The durations of a profile that are shipped with the suite, and their sources."""

    start: str
    start_source: str
    #: The source of each plan's duration. The keys are the names of the plans.
    plans: dict[str, str]


class PlannedTarget(Record):
    """The configuration that the run would test, and the durations."""

    arch: str
    profile: str
    configuration: str
    #: The address of the attached server; None if the run would start a server.
    attached_at: str | None
    engine: StartedEngine
    nodes: SpannedNodes | None
    #: Known facts about the configuration before a start, one line each.
    facts: list[str]
    #: Why the durations of earlier runs could not be read; None if they could be read.
    problem: str | None
    plans: list[PlanTime]
    #: The durations that the suite ships; None if it ships none for this profile.
    shipped: ShippedTimes | None


class RunPlan(Record):
    """The plan of a run."""

    #: The number of checks that would run in each level.
    checks: dict[str, int]
    #: The ids of the tests that would not run. The keys are the reasons.
    not_run: dict[str, list[str]]
    #: The ids of the deselected tests.
    deselected: list[str]
    #: The machine; None if it was not examined, because no test of a level is selected.
    machine: Machine | None
    #: The target; None if no profile is known for it.
    target: PlannedTarget | None

    @property
    def is_empty(self) -> bool:
        """Whether no test was collected."""
        return not self.checks and not self.not_run


class PlanAnswer(Record):
    """The answer that pytest gives ``sm121 plan``: a plan, or why the request is refused."""

    plan: RunPlan | None = None
    refusal: str | None = None


def text(plan: RunPlan) -> str:
    """Return a plan as readable text.

    Args:
        plan: The plan.
    """
    return rendered("would_run.txt.j2", one_line, plan=plan, levels=LEVELS)


def write_answer(answer: PlanAnswer) -> None:
    """Write an answer for ``sm121 plan``. Do nothing if ``sm121 plan`` did not start pytest.

    Args:
        answer: The answer.
    """
    path = os.environ.get(VARIABLE)
    if path is not None:
        Path(path).write_text(answer.model_dump_json(), "utf-8")


def read_answer(file: Path) -> PlanAnswer:
    """Read the answer of pytest.

    Args:
        file: The file that `VARIABLE` names.

    Returns:
        The answer; an empty one if pytest wrote none.
    """
    if not file.is_file():
        return PlanAnswer()
    return PlanAnswer.model_validate_json(file.read_text("utf-8"))
