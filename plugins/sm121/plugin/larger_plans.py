"""What the plan of a run leaves out, and what the larger plans take."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sm121.core.profile import FULL
from sm121.plugin import planning, selection
from sm121.plugin.stash import LEVEL, SETTINGS
from sm121.run.record import Target


@dataclass(frozen=True)
class LargerPlan:
    """A plan that runs more checks."""

    name: str
    checks: int
    #: How long it takes, as "about 30 min"; None where nothing is known.
    minutes: str | None


@dataclass(frozen=True)
class LeftOut:
    """What a plan leaves out of the tests that were collected, and the plans that have more."""

    plan: str
    checks: int
    larger: tuple[LargerPlan, ...]

    def __str__(self) -> str:
        plans = [
            f"--plan {each.name} ({each.checks} checks"
            + (f", {each.minutes})" if each.minutes is not None else ")")
            for each in self.larger
        ]
        plural = "" if self.checks == 1 else "s"
        return f"plan {self.plan} left out {self.checks} check{plural}: {', '.join(plans)}"


LEFT_OUT = pytest.StashKey[LeftOut]()


def look(config: pytest.Config, target: Target, items: Sequence[pytest.Item]) -> LeftOut | None:
    """Count what the plan of the run left out. None: nothing, or the target is not known."""
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
