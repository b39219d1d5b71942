"""Reads the options about measurements: plan, sizes, percentiles, axes of the matrix."""

from dataclasses import dataclass, field

from sm121.core.options import Option
from sm121.core.profile import Profile
from sm121.measure.plan import Sizes
from sm121.session import given_numbers, given_sizes, plan_choice
from sm121.session.given_judging import GivenJudging
from sm121.session.given_sizes import GivenSizes
from sm121.session.plan_choice import PlanChoice


@dataclass(frozen=True)
class GivenMeasuring:
    """The settings of measurements; a field has its default if its option was not given."""

    planned: PlanChoice = field(default_factory=PlanChoice)
    sizes: Sizes = field(default_factory=Sizes)
    #: Sizes that replace those of the profile.
    replaced: GivenSizes = field(default_factory=GivenSizes)
    percentiles: bool = False
    #: The axes of the matrix, by name or path (default: the profile's).
    axes: str | None = None


def read_options(
    option: Option, expected: Profile, judging: GivenJudging, *, names_tests: bool
) -> GivenMeasuring:
    """Read the options.

    Args:
        option: A function that returns the value of an option.
        expected: The profile that the run will probably have.
        judging: The options ``--against`` and ``--certify``. A trusted run determines the plan, and
            a certificate requires percentiles.
        names_tests: Whether the command line names levels or tests.

    Raises:
        UsageError: An option is wrong, or the profile has no such plan.
    """
    trusted = judging.against.newest.file if judging.against is not None else None
    return GivenMeasuring(
        planned=plan_choice.of_options(option, expected, trusted=trusted, names_tests=names_tests),
        sizes=_sizes(option),
        replaced=given_sizes.read_options(option),
        percentiles=option("--percentiles") or judging.certify,
        axes=option("--matrix-axes"),
    )


def _sizes(option: Option) -> Sizes:
    return Sizes(
        generated_tokens=given_numbers.numbers(option, "--tg", "32,128", least=2) or (),
        only_depths=given_numbers.numbers(option, "--depths", "0,4096"),
        depths=given_numbers.numbers(option, "--depth", "1024") or (),
        concurrency=given_numbers.numbers(option, "--concurrency", "4,8", least=1) or (),
        rounds=given_numbers.number("--rounds", option("--rounds")),
    )
