"""Sets the verdict of a run from its tests and its settings."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sm121.core.verdict import Verdict
from sm121.run.record import Target
from sm121.run.verdict_file import VerdictFile
from sm121.session import certification
from sm121.session.settings import Settings


@dataclass(frozen=True)
class CertificateGaps:
    """Facts about a run that a certificate needs and verdict.json does not contain.

    Attributes:
        deselected: Ids of tests that -m, -k or --deselect removed.
        inapplicable: Ids of tests that no certificate requires.
        kernel_unread: Why kernel messages could not be read; None if they were read.
    """

    deselected: Sequence[str]
    inapplicable: Collection[str]
    kernel_unread: str | None


def judge(file: VerdictFile, settings: Settings, target: Target, gaps: CertificateGaps) -> None:
    """Set the verdict and the reason of a run, and whether it is certified.

    Args:
        file: The run with all decisions.
        settings: The settings of the run.
        target: The target of the run.
        gaps: Further facts for a certificate.
    """
    file.judge()
    if file.finished and target.obstacle is not None:
        file.settle(Verdict.NOT_RUN)
        file.reason = target.obstacle
        file.certified = False if settings.judging.certify else None
        return
    file.reason = file.why()
    if target.profile is None:
        return
    gates = settings.without_number(target.profile)
    if gates:
        file.reason += f"; --depths leaves gates without a number: {', '.join(gates)}"
    for line in settings.measuring.replaced.deviations(target.profile):
        file.reason += f"; {line}"
    if not file.finished or not settings.judging.certify:
        return
    certification.certify(
        file,
        target.profile,
        certification.inventory(),
        deselected=gaps.deselected,
        inapplicable=gaps.inapplicable,
    )
    if file.against is not None and not file.certified:
        file.reason += f"; {file.against}"
    if file.certified and gaps.kernel_unread is not None:
        file.reason += f"; {gaps.kernel_unread}"
