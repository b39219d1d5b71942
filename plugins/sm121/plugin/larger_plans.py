"""What the plan of a run leaves out, and what the larger plans take."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sm121.core.profile_fields import FULL
from sm121.plugin import planning, selection
from sm121.plugin.stash import LEVEL, SETTINGS
from sm121.run.record import Target


@dataclass(frozen=True)
class LargerPlan:
    """A plan that runs more checks.

    Attributes:
        name: Its name.
        checks: The number of its checks.
        minutes: How long it takes, as "about 30 min"; None if nothing is known.
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
    """The checks that a plan leaves out of the collected tests, and the plans that have more.

    Attributes:
        plan: The name of the plan.
        checks: The number of checks that it leaves out.
        larger: The plans that have more checks.
    """

    plan: str
    checks: int
    larger: tuple[LargerPlan, ...]

    def __str__(self) -> str:
        plans = ", ".join(str(each) for each in self.larger)
        plural = "" if self.checks == 1 else "s"
        return f"plan {self.plan} left out {self.checks} check{plural}: {plans}"


LEFT_OUT = pytest.StashKey[LeftOut]()


def look(config: pytest.Config, target: Target, items: Sequence[pytest.Item]) -> LeftOut | None:
    """Count the checks that the plan of the run left out.

    Args:
        config: pytest's. The result is kept in its stash.
        target: The target of the run.
        items: The selected tests.

    Returns:
        The checks and the larger plans; None if no check was left out, or without a profile.
    """
    left = config.stash.get(selection.NOT_IN_PLAN, [])
    if target.profile is None or not left:
        return None
    plan = config.stash[SETTINGS].plan
    asked = [item for item in items if LEVEL in item.stash]
    larger = []
    for name in [*target.profile.plans, FULL]:
        checks = len(planning.tests_of(config, name))
        if name != plan and checks > len(asked):
            larger.append(LargerPlan(name, checks, planning.minutes(config, name)))
    config.stash[LEFT_OUT] = LeftOut(plan, len(left), tuple(larger))
    return config.stash[LEFT_OUT]
