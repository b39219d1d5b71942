"""``--certify``: what a certificate requires beyond a plain run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sm121.core.profile import Certify
from sm121.core.verdict import Verdict, worst
from sm121.run.verdict_file import VerdictFile


def certify(
    file: VerdictFile,
    required: Certify,
    *,
    deselected: Sequence[str],
    inapplicable: Collection[str],
) -> None:
    """Compare a run that has finished and was judged with what a certificate requires.

    Args:
        file: the run; its verdict, reason and ``certified`` are set.
        required: the profile's ``[certify]``.
        deselected: ids of tests that were removed by -m, -k or --deselect.
        inapplicable: ids of tests that no certificate of this profile needs.
    """
    gaps = _gaps(file, required, deselected, inapplicable)
    if gaps:
        file.settle(worst([file.verdict, *(verdict for verdict, _ in gaps)]))
        file.reason = "not certified: " + "; ".join(text for _, text in gaps)
    file.certified = file.verdict is Verdict.PASS


def _gaps(
    file: VerdictFile, required: Certify, deselected: Sequence[str], inapplicable: Collection[str]
) -> list[tuple[Verdict, str]]:
    """What is missing for a certificate, each with the verdict that follows."""
    gaps: list[tuple[Verdict, str]] = []
    for level in required.levels:
        tests = [test for test in file.tests if test.level == level]
        if not tests:
            gaps.append((Verdict.NOT_RUN, f"level {level} has no test that was selected"))
        required_here = [test for test in tests if test.id not in inapplicable]
        skipped = [test.id for test in required_here if test.skipped and not test.waived]
        if skipped:
            gaps.append((Verdict.NOT_RUN, f"{len(skipped)} of {level} skipped ({skipped[0]})"))
    if deselected:
        what = f"{len(deselected)} tests deselected ({deselected[0]})"
        gaps.append((Verdict.NOT_RUN, what))
    unproven = [name for name in required.path if getattr(file.engine.path, name) is None]
    if unproven:
        gaps.append((Verdict.INVALID, f"kernel path not proven: {', '.join(unproven)}"))
    if file.unproven:
        gaps.append((Verdict.INVALID, f"unproven: {file.unproven[0]}"))
    if required.box == "QUALIFIED" and file.box.state != "QUALIFIED":
        state = f"the box is {file.box.state}, expected QUALIFIED ({file.box.reason})"
        gaps.append((Verdict.INCONCLUSIVE, state))
    return gaps
