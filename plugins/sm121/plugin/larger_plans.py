"""Finds how many checks the plan of a run leaves out, and how long larger plans take."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sm121.answers import exam
from sm121.core.profile_fields import FULL
from sm121.plugin import planning, run_again, selection
from sm121.plugin.stash import ID, LEVEL, SETTINGS
from sm121.run.record import Target
from sm121.session.session import Session


@dataclass(frozen=True)
class LargerPlan:
    """A plan that runs more checks.

    Attributes:
        name: The name of the plan.
        checks: The number of its checks.
        minutes: Its duration, such as "about 30 min"; None if it is not known.
    """

    name: str
    checks: int
    minutes: str | None

    def __str__(self) -> str:
        if self.minutes is None:
            return f"--plan {self.name} ({self.checks} checks)"
        return f"--plan {self.name} ({self.checks} checks, {self.minutes})"


@dataclass(frozen=True)
class LeftOut:
    """The number of collected checks that a plan leaves out, and the plans with more checks.

    Attributes:
        plan: The name of the plan.
        checks: The number of checks that the plan leaves out.
        larger: The plans with more checks.
    """

    plan: str
    checks: int
    larger: tuple[LargerPlan, ...]

    def __str__(self) -> str:
        plans = ", ".join(str(each) for each in self.larger)
        plural = "" if self.checks == 1 else "s"
        return f"plan {self.plan} left out {self.checks} check{plural}: {plans}"


LEFT_OUT = pytest.StashKey[LeftOut]()
#: The test that asks the section ``document`` of an exam. Each plan asks all other sections of the
#: exam of --exam (see `selection.is_asked`).
_OF_DOCUMENTS = "test_long_documents_are_read"


def lines(
    config: pytest.Config, session: Session | None, items: Sequence[pytest.Item]
) -> list[str]:
    """Return one line for each reason why tests were left out; the plan comes first.

    Args:
        config: The configuration of pytest. Its stash keeps the lines for the end of the run.
        session: The run; None without one.
        items: The selected tests.
    """
    of_plan = None if session is None else _count_left_out(config, session.run.target, items)
    others = config.stash.get(selection.LEFT_OUT, [])
    return [*others] if of_plan is None else [str(of_plan), *others]


def _count_left_out(
    config: pytest.Config, target: Target, items: Sequence[pytest.Item]
) -> LeftOut | None:
    """Count the checks that the plan left out, and report if it left out a section of ``--exam``.

    The result is None if no check was left out, or if the run has no profile.
    """
    left = config.stash.get(selection.NOT_IN_PLAN, [])
    if target.profile is None or not left:
        return None
    _note_section_left_out(config, target)
    plan = config.stash[SETTINGS].plan
    asked = [item for item in items if LEVEL in item.stash]
    larger = []
    for name in [*target.profile.plans, FULL]:
        planned = planning.plan_time(config, target, name, items)
        if planned.checks > len(asked):
            larger.append(LargerPlan(name, planned.checks, planned.time))
    config.stash[LEFT_OUT] = LeftOut(plan, len(left), tuple(larger))
    return config.stash[LEFT_OUT]


def gates_left_out(config: pytest.Config, session: Session) -> str | None:
    """Return a line with those gates of the named configuration that the run has not measured.

    Args:
        config: The configuration of pytest.
        session: The run, which is closed.

    Returns:
        The line, with the command that measures these gates. None if no configuration with gates
        was named, if nothing was measured, or if the plan left out no measurement.
    """
    files = []
    for item in config.stash.get(selection.NOT_IN_PLAN, []):
        if item.stash[LEVEL] == "performance":
            files.append(item.stash[ID].partition("::")[0])
    if not files:
        return None
    chosen = session.run.target.profile
    if chosen is None or chosen.question is None:
        return None
    metrics = session.run.record.file.metrics
    gates = []
    for gate in chosen.configurations[chosen.question].gates:
        metric = metrics.get(gate.metric)
        if metric is None or metric.value is None:
            gates.append(gate.metric)
    if not metrics or not gates:
        return None
    plan = config.stash[SETTINGS].plan
    command = run_again.of_files_whole(config, session, list(dict.fromkeys(files)))
    return (
        f"gates of configuration {chosen.question} without a number in plan {plan}: "
        f"{', '.join(gates)}. Measure them: {command}"
    )


def _note_section_left_out(config: pytest.Config, target: Target) -> None:
    """Note in a line that the plan leaves out a section of the exam of ``--exam``, if it does."""
    given = config.getoption("--exam")
    if given is None or target.profile is None:
        return
    items = config.stash.get(selection.NOT_IN_PLAN, [])
    left = {selection.function_name(item) for item in items}
    correctness = target.profile.correctness
    if _OF_DOCUMENTS not in left or exam.load(correctness.exam).document is None:
        return
    remedy = f"--plan {FULL} has them"
    reason = correctness.cannot.get("long_document")
    if reason is not None:
        remedy = f"profile {target.profile.name} leaves them out in each plan: {reason}"
    plan = config.stash[SETTINGS].plan
    line = f"--exam {given}: the questions about a document are not in plan {plan}; {remedy}"
    config.stash.setdefault(selection.LEFT_OUT, []).append(line)
