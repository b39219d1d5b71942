"""Chooses the plan of a run, with the reason. Default plans are defined only here."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from sm121.core.profile import Profile
from sm121.core.profile_fields import FULL
from sm121.run.verdict_file import VerdictFile
from sm121.session.options import PartOptions, PlanOptions

#: The plan of a run whose command line names no plan, level or test.
DEFAULT = "quick"


class Reason(StrEnum):
    """The reason for the plan of a run, as the header shows it."""

    NAMED = "named by --plan"
    CERTIFICATE = "a certificate covers every check"
    SHARD = "shards divide the whole plan"
    TESTS = "all checks of the named levels and tests are run"
    TRUSTED = "the plan of the trusted run"
    NOTHING_NAMED = "no plan, level or test is named"
    NO_DEFAULT = f"the profile has no plan {DEFAULT}"


@dataclass(frozen=True)
class PlanChoice:
    """A plan, and the reason why it was chosen."""

    name: str = FULL
    reason: Reason = Reason.NAMED

    @property
    def is_named(self) -> bool:
        """Whether the user named the plan itself."""
        return self.reason is Reason.NAMED


def choose(
    named: str | None,
    plans: Collection[str],
    *,
    certify: bool = False,
    shard: bool = False,
    names_tests: bool = False,
    trusted: str | None = None,
) -> PlanChoice:
    """Choose the plan of a run.

    Args:
        named: The value of ``--plan``, or None.
        plans: The plans of the profile, apart from ``full``.
        certify: Whether ``--certify`` was given.
        shard: Whether ``--shard`` was given.
        names_tests: Whether a path, ``-k`` or ``-m`` names levels or tests.
        trusted: The plan of the run that ``--against`` names, or None.

    Returns:
        The plan, and why it was chosen.
    """
    if named is not None:
        return PlanChoice(named, Reason.NAMED)
    if certify:
        return PlanChoice(FULL, Reason.CERTIFICATE)
    if shard:
        return PlanChoice(FULL, Reason.SHARD)
    if names_tests:
        return PlanChoice(FULL, Reason.TESTS)
    if trusted not in (None, FULL, DEFAULT):  # a run of plan full can be compared with any plan
        return PlanChoice(str(trusted), Reason.TRUSTED)
    if DEFAULT not in plans:
        return PlanChoice(FULL, Reason.NO_DEFAULT)
    return PlanChoice(DEFAULT, Reason.NOTHING_NAMED)


def of_options(
    given: PlanOptions,
    parts: PartOptions,
    profile: Profile,
    *,
    trusted: VerdictFile | None,
    names_tests: bool,
) -> PlanChoice:
    """Choose the plan of a run by its command line.

    Args:
        given: The options ``--plan`` and ``--certify``.
        parts: The option ``--shard``.
        profile: The profile that the run will have.
        trusted: The run that ``--against`` names, or None.
        names_tests: Whether the command line names levels or tests.

    Returns:
        The plan, and why it was chosen.

    Raises:
        UsageError: The profile has no such plan.
    """
    planned = choose(
        given.plan,
        profile.plans,
        certify=given.certify,
        shard=parts.shard is not None,
        names_tests=names_tests,
        trusted=_plan_of(trusted) if trusted is not None else None,
    )
    profile.plan(planned.name)
    return planned


def _plan_of(run: VerdictFile) -> str | None:
    if run.fingerprint is not None:
        return run.fingerprint.plan
    return None
