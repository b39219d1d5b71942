"""``--certify``: what a merge gate insists on beyond what a plain run reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sm121.core.errors import UsageError
from sm121.core.verdict import Verdict, worst
from sm121.run.reason import reason

if TYPE_CHECKING:
    from sm121.plugin.run import Run

#: Node ids of level tests that -m, -k or --deselect removed.
DESELECTED = pytest.StashKey[list[str]]()


def refuse_a_selection(config: pytest.Config) -> None:
    """A certificate is about everything: what narrows the run unseen is refused.

    Tests removed by -m, -k or --deselect are seen, and reported as gaps.

    Raises:
        UsageError: paths, node ids or options that leave files out were given.
    """
    narrowing = {
        "--ignore": config.option.ignore,
        "--ignore-glob": config.option.ignore_glob,
        "--lf": getattr(config.option, "lf", False),
        "--sw": getattr(config.option, "stepwise", False),
    }
    given = [name for name, value in narrowing.items() if value]
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        given.append("paths or node ids")
    if given:
        raise UsageError(
            f"--certify with {', '.join(given)}: expected a run of all levels; leave these out"
        )


def conclude(run: Run) -> None:
    """Give the finished run its reason, and under ``--certify`` hold it against the profile."""
    file = run.file
    if run.target.obstacle is not None:
        file.settle(Verdict.NOT_RUN)
        file.reason = run.target.obstacle
        file.certified = False if run.settings.certify else None
        return
    file.reason = reason(file)
    if run.settings.certify:
        gaps = _gaps(run)
        if gaps:
            file.settle(worst([file.verdict, *(verdict for verdict, _ in gaps)]))
            file.reason = "not certified: " + "; ".join(text for _, text in gaps)
        file.certified = file.verdict is Verdict.PASS


def _gaps(run: Run) -> list[tuple[Verdict, str]]:
    """What is missing for a certificate, each with the verdict that it means."""
    required = run.profile.certify
    gaps: list[tuple[Verdict, str]] = []
    for level in required.levels:
        tests = [test for test in run.file.tests if test.level == level]
        if not tests:
            gaps.append((Verdict.NOT_RUN, f"level {level} has no test that was selected"))
        required_here = [test for test in tests if test.id not in run.inapplicable]
        skipped = [test.id for test in required_here if test.skipped and not test.waived]
        if skipped:
            gaps.append((Verdict.NOT_RUN, f"{len(skipped)} of {level} skipped ({skipped[0]})"))
    if run.deselected:
        what = f"{len(run.deselected)} tests deselected ({run.deselected[0]})"
        gaps.append((Verdict.NOT_RUN, what))
    path = run.file.engine.path
    unproven = [name for name in required.path if getattr(path, name) is None]
    if unproven:
        gaps.append((Verdict.INVALID, f"kernel path not proven: {', '.join(unproven)}"))
    if run.file.unproven:
        gaps.append((Verdict.INVALID, f"unproven: {run.file.unproven[0]}"))
    if required.box == "QUALIFIED" and run.file.box.state != "QUALIFIED":
        state = f"the box is {run.file.box.state}, expected QUALIFIED ({run.file.box.reason})"
        gaps.append((Verdict.INCONCLUSIVE, state))
    return gaps
