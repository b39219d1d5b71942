"""What the user asked for, validated. A mistake is reported in one line before anything starts."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm121.core import metric_name, profile, waivers
from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.core.profile import Profile
from sm121.core.waivers import Waiver
from sm121.engines import given_key
from sm121.measure.plan import Plan, Sizes
from sm121.oracles.formats import Rounding
from sm121.regression import hypothesis
from sm121.regression.ab import Side
from sm121.regression.hypothesis import Hypothesis
from sm121.run import stored_benchmarks
from sm121.session import (
    given_engine,
    given_files,
    given_nodes,
    plan_choice,
    trusted_runs,
)
from sm121.session.plan_choice import PlanChoice
from sm121.session.trusted_runs import Trusted

_EXAMPLES = {"--depth": "1024", "--depths": "0,4096", "--tg": "32,128", "--concurrency": "4,8"}


@dataclass(frozen=True)
class Worker:
    """This process, as one of several that share a run.

    Attributes:
        id: Its name, as ``gw0``.
        run: The name of the run.
        count: How many there are.
    """

    id: str
    run: str
    count: int


@dataclass(frozen=True)
class Settings:
    """What was asked for; None where an option was not given."""

    arch: str | None = None
    #: Architectures that ``-m`` names.
    marked: tuple[str, ...] = ()
    profile: Profile | None = None
    engine: str = given_engine.DEFAULT
    #: The engine at --base-url, if the user named it.
    attached_engine: str | None = None
    engine_python: str = sys.executable
    engine_arguments: tuple[str, ...] = ()
    engine_environment: tuple[tuple[str, str], ...] = ()
    engine_debug: bool = False
    base_url: str | None = None
    api_key: str | None = None
    server_log: Path | None = None
    #: Whether that log comes on standard input.
    log_on_stdin: bool = False
    #: The container whose log it is.
    container: str | None = None
    #: The option that names a log that comes as a stream.
    log_name: str | None = None
    #: Of an attached server that spans machines, those of its other nodes.
    node_logs: tuple[Path, ...] = ()
    launcher: str | None = None
    node_commands: tuple[tuple[str, ...], ...] = ()
    master_address: str | None = None
    model: str | None = None
    served_name: str | None = None
    kernel_provider: str | None = None
    full_shapes: bool = False
    kernel_trace: str = "auto"
    planned: PlanChoice = field(default_factory=PlanChoice)
    sizes: Sizes = field(default_factory=Sizes)
    percentiles: bool = False
    ab: tuple[Side, Side] | None = None
    ab_pairs: int = 3
    hypothesis: Hypothesis | None = None
    waivers: tuple[Waiver, ...] = ()
    against: Trusted | None = None
    certify: bool = False
    report_dir: Path = Path("conformance-report")
    configuration: str | None = None
    reference: Path | None = None
    oracle: Path | None = None
    #: What the server rounds beyond the checkpoint; None: its path tells it.
    rounding: Rounding | None = None
    golden: Path | None = None
    record_golden: Path | None = None
    exam: Path | None = None
    scores: Path | None = None
    #: The axes of the matrix, by name or path (default: the profile's).
    axes: str | None = None
    #: The options given that change or add to what is measured, by name.
    options: Mapping[str, str] = field(default_factory=dict)
    #: Its `.cache` has the oracle's files and the matrix's durations.
    root: Path = Path()
    #: Which process of several this is; None where it is the only one.
    worker: Worker | None = None

    @property
    def plan(self) -> str:
        """The name of the plan."""
        return self.planned.name

    def expected_profile(self) -> Profile:
        """Return the profile that the run will probably have, before its target is resolved."""
        return profile.expected(self.profile, self.arch, self.engine, self.marked)

    def measuring_plan(self, chosen: Profile) -> Plan:
        """Return what is measured under a profile.

        Args:
            chosen: The profile in force.
        """
        return Plan.of(chosen, plan=self.plan, sizes=self.sizes)

    def without_number(self, chosen: Profile) -> list[str]:
        """Return the gates of decode rates that ``--depths`` leaves without a number.

        Args:
            chosen: The profile in force.
        """
        whole = Plan.of(chosen, plan=self.plan).depths
        missing = {*whole} - {*self.measuring_plan(chosen).depths}
        gates = [gate.metric for gate in chosen.performance.gates]
        return [name for name in gates if metric_name.depth_of(name) in missing]


def read(
    option: Option, started_in: Path, *, names_tests: bool = False, marked: tuple[str, ...] = ()
) -> Settings:
    """Read the settings from a command line.

    Args:
        option: Gives the value of an option.
        started_in: The folder to which paths of options are relative.
        names_tests: Whether the command line names levels or tests.
        marked: Architectures that ``-m`` names.

    Returns:
        The settings of the run.

    Raises:
        UsageError: An option is wrong, or contradicts another one.
    """
    base_url = given_engine.base_url(option)
    ab = given_engine.sides(option, base_url)
    if not base_url and ab is not None and ab[0].url is not None:
        base_url = ab[0].url
    arch = given_engine.arch(option)
    chosen = given_engine.named_profile(option)
    engine = given_engine.started(option, chosen, base_url)
    given_engine.refuse_conflicts(option, base_url)
    logs = given_nodes.server_logs(option, ab, base_url, chosen)
    if option("--hypothesis") is not None and ab is None:
        raise UsageError("--hypothesis: expected together with --ab A B, which it is judged from")
    trusted = _against(option, started_in)
    expected = profile.expected(chosen, arch, engine, marked)
    return Settings(
        arch=arch,
        marked=marked,
        profile=chosen,
        engine=engine,
        attached_engine=option("--engine") if base_url else None,
        engine_python=given_engine.program(option, engine, base_url),
        engine_arguments=given_engine.arguments(option),
        engine_environment=given_engine.variables(option),
        engine_debug=option("--engine-debug"),
        base_url=base_url,
        api_key=given_key.api_key(option) if base_url else None,
        server_log=logs[0] if logs else None,
        log_on_stdin=given_nodes.is_log_on_stdin(option),
        container=option("--container"),
        node_logs=logs[1:],
        launcher=given_nodes.launcher(option, chosen, base_url),
        node_commands=given_nodes.commands(option, chosen),
        master_address=option("--master-addr"),
        model=given_files.model(option, base_url),
        served_name=_served_name(option, base_url),
        kernel_provider=option("--kernel-provider"),
        full_shapes=option("--full-shapes"),
        kernel_trace=option("--kernel-trace"),
        planned=_planned(option, expected, trusted, names_tests=names_tests),
        sizes=_sizes(option),
        percentiles=option("--percentiles") or option("--certify"),
        ab=ab,
        ab_pairs=_count("--ab-pairs", option("--ab-pairs")) or 3,
        hypothesis=_hypothesis(option, started_in),
        waivers=waivers.load(given_files.path(option, "--waivers")),
        against=trusted,
        certify=option("--certify"),
        report_dir=(started_in / option("--report-dir")).resolve(),
        configuration=option("--configuration"),
        reference=given_files.reference_checkpoint(option),
        rounding=_rounding(option),
        oracle=given_files.oracle(option),
        golden=given_files.existing(option, "--golden"),
        record_golden=given_files.new(option, "--record-golden"),
        exam=given_files.existing(option, "--exam"),
        scores=given_files.interpreter(option, "--scores"),
        axes=option("--matrix-axes"),
    )


def _planned(
    option: Option, expected: Profile, trusted: Trusted | None, *, names_tests: bool
) -> PlanChoice:
    """Return the plan that the options name, or that they need."""
    newest = trusted.newest.file if trusted is not None else None
    return plan_choice.of_options(option, expected, trusted=newest, names_tests=names_tests)


def _served_name(option: Option, base_url: str | None) -> str | None:
    """The model's name on the server; of an attached one ``--model`` is another word for it."""
    name: str | None = option("--served-model-name")
    if not name and base_url:
        name = option("--model")
    return name or None


def _sizes(option: Option) -> Sizes:
    return Sizes(
        generated_tokens=_counts(option, "--tg", least=2) or (),
        only_depths=_counts(option, "--depths"),
        depths=_counts(option, "--depth") or (),
        concurrency=_counts(option, "--concurrency", least=1) or (),
        rounds=_count("--rounds", option("--rounds")),
    )


def _hypothesis(option: Option, started_in: Path) -> Hypothesis | None:
    file = option("--hypothesis")
    if file is None:
        return None
    return hypothesis.load(started_in / file)


def _rounding(option: Option) -> Rounding | None:
    text = option("--rounding")
    if text is None:
        return None
    return Rounding.parse(text)


def _against(option: Option, started_in: Path) -> Trusted | None:
    """The trusted run that ``--against`` names. Its folder is not that of this run's report."""
    named = option("--against")
    if named is None:
        return None
    if named != trusted_runs.TRUSTED:
        run = started_in / named
        report = started_in / option("--report-dir")
        if run.resolve().is_relative_to(report.resolve()):
            raise UsageError(
                f"--against {run}: expected a run that is kept elsewhere: this one's report goes "
                "there; name it with --report-dir, or keep the other one with `sm121 trust`"
            )
        named = str(run)
    storage = stored_benchmarks.storage_folder(option("--benchmark-storage"), started_in)
    return trusted_runs.load(named, storage)


def _counts(option: Option, name: str, least: int = 0) -> tuple[int, ...] | None:
    """The different numbers of a list with commas; None without the option."""
    text = option(name)
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= least for part in parts):
        example = _EXAMPLES[name]
        raise UsageError(
            f"{name} {text}: expected numbers of at least {least}, as in {name} {example}"
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def _count(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} {text}: expected a number, 1 or more")
    return int(text)
