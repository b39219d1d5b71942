"""What a run would ask: made by ``pytest --collect-only``, shown by it and by ``sm121 plan``.

``sm121 plan`` starts ``pytest --collect-only`` with the variable `VARIABLE`. The plugin writes an
`Answer` to the file that it names.
"""

import os
from pathlib import Path

from sm121.core.data_file import Record
from sm121.core.profile_fields import LEVELS
from sm121.core.templates import one_line, rendered

#: The variable with the path of the file that gets the answer.
VARIABLE = "SM121_PLAN_FILE"


class Machine(Record):
    """This machine."""

    #: Its architecture; None: the suite has no name for it.
    arch: str | None
    #: How the architecture was detected.
    evidence: str
    #: The name of its GPU, or of its CPU where it has no GPU.
    processor: str | None
    cores: int | None
    memory_gib: int | None
    #: A line for each known fault of it.
    faults: list[str]


class StartedEngine(Record):
    """The engine that would be started."""

    name: str
    version: str | None
    python: str
    model: str


class SpannedNodes(Record):
    """The machines of a server that spans several."""

    count: int
    tensor_parallel: int
    #: None: the server is attached.
    launcher: str | None
    transports: list[str]
    #: The command of each other node, as a shell reads it.
    commands: list[str]


class PlanTime(Record):
    """A plan of the profile, and how long it takes."""

    name: str
    checks: int
    #: How many of the checks were timed on this machine.
    timed: int
    #: The time of each level that it has; None: not known.
    levels: dict[str, str | None]
    #: The time of all of it; None: not known.
    time: str | None


class ShippedTimes(Record):
    """What ships about the time that a profile takes, with its sources."""

    start: str
    start_source: str
    #: The source of each plan, by its name.
    plans: dict[str, str]


class PlannedTarget(Record):
    """What would be judged, and how long it takes."""

    arch: str
    profile: str
    configuration: str
    #: The address of the attached server; None: a server would be started.
    attached_at: str | None
    engine: StartedEngine
    nodes: SpannedNodes | None
    #: What is known before a start, a line each.
    facts: list[str]
    #: Why the times of earlier runs could not be read; None: they could.
    problem: str | None
    plans: list[PlanTime]
    #: None: nothing ships about this profile.
    shipped: ShippedTimes | None


class RunPlan(Record):
    """What a run would ask."""

    #: How many checks would run, by level.
    checks: dict[str, int]
    #: The ids of the tests that would not run, by the reason.
    not_run: dict[str, list[str]]
    #: The ids of the deselected tests.
    deselected: list[str]
    #: None: the run was not opened, since it has no test of a level.
    machine: Machine | None
    #: None: no profile is known for the target.
    target: PlannedTarget | None

    @property
    def is_empty(self) -> bool:
        """Whether no test was collected."""
        return not self.checks and not self.not_run


class Answer(Record):
    """What pytest answers ``sm121 plan``: a plan, or why the request is refused."""

    plan: RunPlan | None = None
    refusal: str | None = None


def text(plan: RunPlan) -> str:
    """Return a plan as text for people.

    Args:
        plan: The plan.
    """
    return rendered("would_run.txt.j2", one_line, plan=plan, levels=LEVELS)


def tell(answer: Answer) -> None:
    """Write an answer for ``sm121 plan``. Do nothing if another command started pytest.

    Args:
        answer: The answer.
    """
    path = os.environ.get(VARIABLE)
    if path is not None:
        Path(path).write_text(answer.model_dump_json(), "utf-8")


def read(file: Path) -> Answer:
    """Read the answer of pytest.

    Args:
        file: The file that `VARIABLE` named.

    Returns:
        The answer; an empty one if pytest ended without one.
    """
    if not file.is_file():
        return Answer()
    return Answer.model_validate_json(file.read_text("utf-8"))
