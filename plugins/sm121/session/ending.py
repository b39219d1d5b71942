"""Decides the verdict of a run at its end, from its tests and its settings."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sm121.core.verdict import Verdict
from sm121.run.events import Closed
from sm121.run.record import RunRecord, Target
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


def closed(
    record: RunRecord,
    settings: Settings,
    target: Target,
    gaps: CertificateGaps,
    *,
    finished: bool,
    interrupted: bool = False,
) -> Closed:
    """Return the last event of a run. A run whose report cannot be written is not PASS.

    Args:
        record: The record of the run with all other events. It is not changed.
        settings: The settings of the run.
        target: The target of the run.
        gaps: Further facts for a certificate.
        finished: Whether every selected test has a verdict.
        interrupted: Whether a signal ended the run.

    Returns:
        The verdict of the run with its reason, and whether the run is certified.
    """
    file = record.file.model_copy(deep=True)
    file.finished = finished
    _judge(file, settings, target, gaps)
    if record.unwritten is not None and file.verdict is Verdict.PASS:
        file.settle(Verdict.INCONCLUSIVE)
        file.reason = record.unwritten
    return Closed(
        finished=finished,
        verdict=file.verdict,
        reason=file.reason,
        certified=file.certified,
        no_oracle=file.no_oracle,
        duration_s=record.log.age_s,
        interrupted=interrupted,
    )


def _judge(file: VerdictFile, settings: Settings, target: Target, gaps: CertificateGaps) -> None:
    """Set the verdict and the reason of a copy of the run, and whether the run is certified."""
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
        file.reason += f"; because of --depths, these gates have no number: {', '.join(gates)}"
    for line in settings.replaced.deviations(target.profile):
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
