"""The validated settings of a run. A mistake is reported in one line before a server starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm121.answers.options import AnswerOptions
from sm121.core import metric_name, options, profile
from sm121.core.options import Option
from sm121.core.profile import Profile
from sm121.engines.options import GivenEngine
from sm121.kernels.options import KernelOptions
from sm121.matrix.options import MatrixOptions
from sm121.measure.plan import Plan
from sm121.performance.options import MeasuringOptions
from sm121.report.options import ReportOptions
from sm121.session import (
    given_ab,
    given_attached,
    given_engine,
    given_judging,
    given_target,
    plan_choice,
)
from sm121.session.given_ab import GivenAb
from sm121.session.given_attached import GivenServer
from sm121.session.given_judging import GivenJudging
from sm121.session.given_sizes import GivenSizes
from sm121.session.options import GivenTarget, PartOptions, PlanOptions
from sm121.session.plan_choice import PlanChoice
from sm121.stress.options import StressOptions


@dataclass(frozen=True)
class Worker:
    """A worker process of a run.

    Attributes:
        id: The name of the worker, such as ``gw0``.
        run: The name of the run.
        count: The number of workers.
    """

    id: str
    run: str
    count: int


@dataclass(frozen=True)
class Settings:
    """The settings of a run, in groups.

    A group of options without cross-checks is the class that declares them. The module of each
    other group (``given_*``) reads the group from the command line.
    """

    target: GivenTarget = field(default_factory=GivenTarget)
    engine: GivenEngine = field(default_factory=GivenEngine)
    #: The attached server; None if the suite starts one.
    attached: GivenServer | None = None
    kernels: KernelOptions = field(default_factory=KernelOptions)
    matrix: MatrixOptions = field(default_factory=MatrixOptions)
    measuring: MeasuringOptions = field(default_factory=MeasuringOptions)
    stress: StressOptions = field(default_factory=StressOptions)
    planned: PlanChoice = field(default_factory=PlanChoice)
    #: The comparison of two sides; None without ``--ab``.
    ab: GivenAb | None = None
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    judging: GivenJudging = field(default_factory=GivenJudging)
    report_dir: Path = Path("conformance-report")
    #: The given options that belong to the fingerprint of the run, by name.
    options: Mapping[str, str] = field(default_factory=dict)
    #: The root folder. Its `.cache` contains the oracle's files and the durations of the matrix.
    root: Path = Path()
    #: The worker that this process is; None if the run has only one process.
    worker: Worker | None = None

    @property
    def plan(self) -> str:
        """The name of the plan."""
        return self.planned.name

    @property
    def base_url(self) -> str | None:
        """The URL of the attached server; None if the suite starts one."""
        return self.attached.base_url if self.attached is not None else None

    @property
    def replaced(self) -> GivenSizes:
        """The sizes that replace those of the profile."""
        return GivenSizes(
            prompt_tokens=self.measuring.prompt_tokens,
            requests=self.stress.requests,
            crowd=self.stress.crowd,
        )

    def expected_profile(self) -> Profile:
        """Return the profile that the run will probably have, before its target is resolved."""
        given = self.target
        return profile.expected(given.profile, given.arch, self.engine.name, given.marked)

    def measuring_plan(self, chosen: Profile) -> Plan:
        """Return the plan of the measurements under a profile.

        Args:
            chosen: The profile of the run.
        """
        return Plan.of(chosen, plan=self.plan, sizes=self.measuring.sizes)

    def without_number(self, chosen: Profile) -> list[str]:
        """Return the gates of decode rates that are not measured: ``--depths`` omits their depth.

        Args:
            chosen: The profile of the run.
        """
        whole = Plan.of(chosen, plan=self.plan).depths
        missing = {*whole} - {*self.measuring_plan(chosen).depths}
        gates = [gate.metric for gate in chosen.performance.gates]
        return [name for name in gates if metric_name.depth_of(name) in missing]


def read_settings(
    option: Option, started_in: Path, *, names_tests: bool = False, marked: tuple[str, ...] = ()
) -> Settings:
    """Read the settings from a command line.

    Args:
        option: A function that returns the value of an option.
        started_in: The folder to which paths of options are relative.
        names_tests: Whether the command line names levels or tests.
        marked: Architectures that ``-m`` names.

    Returns:
        The settings of the run.

    Raises:
        UsageError: An option is wrong, or contradicts another one.
    """
    ab = given_ab.read_options(option, started_in)
    sides = ab.sides if ab is not None else None
    url = given_attached.url_of(option, sides)
    target = given_target.read_options(option, marked, url)
    engine = given_engine.read_options(option, target.profile, url, marked)
    attached = given_attached.read_options(option, url, sides, target.profile)
    report = options.read(ReportOptions, option)
    judging = given_judging.read_options(option, started_in, target.waiver_file)
    planned = plan_choice.of_options(
        options.read(PlanOptions, option),
        options.read(PartOptions, option),
        profile.expected(target.profile, target.arch, engine.name, marked),
        trusted=judging.against.newest.file if judging.against is not None else None,
        names_tests=names_tests,
    )
    return Settings(
        target=target,
        engine=engine,
        attached=attached,
        kernels=options.read(KernelOptions, option),
        matrix=options.read(MatrixOptions, option),
        measuring=options.read(MeasuringOptions, option),
        stress=options.read(StressOptions, option),
        planned=planned,
        ab=ab,
        answers=options.read(AnswerOptions, option),
        judging=judging,
        report_dir=(started_in / report.report_dir).resolve(),
    )
