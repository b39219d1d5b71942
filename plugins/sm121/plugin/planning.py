"""The checks of a run and their duration: briefly in the run's header, in full for ``sm121 plan``.

``sm121 plan`` runs ``pytest --collect-only``, which starts no server. It prints the facts of
`_FACTS`, the checks that cannot run with the reasons, and the duration of each plan of the profile.
"""

import contextlib
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from sm121.checkpoint import inspection
from sm121.compilation.jit import FlashInferModules
from sm121.core import architecture, engine_arguments, interpreter, templates
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.core.errors import Sm121Error, UsageError
from sm121.core.profile import Profile
from sm121.core.profile_fields import FULL
from sm121.core.time_range import TimeRange
from sm121.engines import preflight, registry
from sm121.engines.cuda_versions import CudaVersions
from sm121.evidence.kernel_path import KernelPath
from sm121.kernels import serving
from sm121.machine import box, roofline, start_memory, this_machine
from sm121.machine.start_arguments import StartArguments
from sm121.plugin import selection, timing
from sm121.plugin.selection import WHY_NOT
from sm121.plugin.stash import ID, LEVEL, SETTINGS
from sm121.report import run_plan
from sm121.report.run_plan import RunPlan
from sm121.run import served, stored_run, verdict_file
from sm121.run.record import Target
from sm121.session import certification, durations, forecast, target
from sm121.session.forecast import Check, Forecast
from sm121.session.settings import Settings
from sm121.stress import soak

TARGET = pytest.StashKey[Target]()
#: The collected tests, before a plan or an option removes some of them.
COLLECTED = pytest.StashKey[Sequence[pytest.Item]]()
#: The forecast of the run's duration; known from the header on.
FORECAST = pytest.StashKey[Forecast]()
#: How many of the newest runs in a report directory are searched for a measured memory bandwidth.
_NEWEST = 5
#: The engine whose memory use is forecast; only on a GB10, where host and GPU share the memory.
_FORECAST_ENGINE = "vllm"
_ONE_MEMORY = "sm121"
Fact: TypeAlias = Callable[[Settings, Target, Profile], Iterable[str]]


def head(config: pytest.Config, chosen: Target, items: Sequence[pytest.Item]) -> list[str]:
    """Return the lines on the checks for the header of a run.

    Args:
        config: The configuration of pytest. Its stash keeps the forecast.
        chosen: The target.
        items: The selected tests.
    """
    tests = [item for item in items if LEVEL in item.stash]
    if chosen.profile is None or not tests:
        return []
    settings = config.stash[SETTINGS]
    expected = _forecast(config, chosen, settings.plan, tests)
    config.stash[FORECAST] = expected
    text = templates.rendered(
        "plan_head.txt.j2",
        plan=settings.plan,
        profile=chosen.profile,
        forecast=expected,
        reasons=reasons(tests),
        problem=timing.known(config, chosen, settings.plan).problem,
        gates=_gates(settings, chosen, chosen.profile),
    )
    return text.splitlines()


def plan_time(
    config: pytest.Config, chosen: Target, name: str, items: Sequence[pytest.Item]
) -> run_plan.PlanTime:
    """Return the number of checks of a plan, and how long they take.

    A check takes as long as in the last run on this machine. The suite ships a range for the other
    checks of its profiles.

    Args:
        config: The configuration of pytest.
        chosen: The target, with a profile.
        name: The name of the plan.
        items: The selected tests. They are used if the plan is that of the run; another plan
            selects from the collected tests.
    """
    if name == config.stash[SETTINGS].plan:
        tests = [item for item in items if LEVEL in item.stash]
    else:
        tests = _tests_of(config, chosen, name)
    expected = _forecast(config, chosen, name, tests)
    return run_plan.PlanTime(
        name=name,
        checks=len(expected.expected),
        timed=expected.timed,
        levels={level: _text(forecast.total(checks)) for level, checks in expected.levels.items()},
        time=_text(expected.time),
    )


def of_collected(config: pytest.Config, items: Sequence[pytest.Item]) -> RunPlan:
    """Return the plan of a run for the collected tests.

    Args:
        config: The configuration of pytest.
        items: The selected tests of levels.
    """
    checks: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("skip") is None:
            checks[item.stash[LEVEL]] += 1
    here: run_plan.Machine | None = None
    planned: run_plan.PlannedTarget | None = None
    chosen = config.stash.get(TARGET, None)
    if chosen is not None:
        here = _machine(chosen)
        planned = _planned_target(config, chosen, items)
    return RunPlan(
        checks=dict(checks),
        not_run=reasons(items),
        deselected=[*config.stash.get(selection.DESELECTED, dict[str, frozenset[str]]())],
        machine=here,
        target=planned,
    )


def refusal(config: pytest.Config) -> str | None:
    """Return why the run would be refused after its tests were collected; None: it would not.

    Args:
        config: The configuration of pytest.
    """
    settings = config.stash[SETTINGS]
    chosen = config.stash.get(TARGET, None)
    if chosen is None or chosen.profile is None:
        return None
    if chosen.obstacle is not None or settings.base_url is not None:
        return None
    return target.missing_model(settings, chosen.profile)


def _machine(chosen: Target) -> run_plan.Machine:
    identity = this_machine.identity()
    detected = architecture.detect()
    return run_plan.Machine(
        arch=detected.name,
        evidence=detected.evidence,
        processor=identity["gpu"] or identity["cpu_model"],
        cores=identity["cores_logical"],
        memory_gib=identity["memory_gib"],
        faults=this_machine.faults(chosen.arch),
    )


def _planned_target(
    config: pytest.Config, chosen: Target, items: Sequence[pytest.Item]
) -> run_plan.PlannedTarget | None:
    """Return the target, as far as it is known before a start; None without a profile."""
    settings = config.stash[SETTINGS]
    profile = chosen.profile
    if profile is None:
        return None
    plans = [FULL]
    if not settings.judging.certify:  # a certificate needs the full plan
        plans = [*profile.plans, FULL]
    facts: list[str] = []
    for fact in _FACTS:
        facts += fact(settings, chosen, profile)
    return run_plan.PlannedTarget(
        arch=chosen.arch,
        profile=profile.name,
        configuration=profile.under_test,
        attached_at=settings.base_url,
        engine=run_plan.StartedEngine(
            name=settings.engine.name,
            version=chosen.engine.version,
            python=settings.engine.python,
            model=settings.target.model or profile.model.id,
        ),
        nodes=_spanned_nodes(settings, profile),
        facts=facts,
        problem=timing.known(config, chosen, settings.plan).problem,
        plans=[plan_time(config, chosen, name, items) for name in plans],
        shipped=_shipped_times(profile, plans),
    )


def _spanned_nodes(settings: Settings, profile: Profile) -> run_plan.SpannedNodes | None:
    nodes = profile.nodes
    if nodes is None:
        return None
    launcher: str | None = None
    if settings.base_url is None:
        launcher = settings.engine.launcher or nodes.launcher
    return run_plan.SpannedNodes(
        count=nodes.count,
        tensor_parallel=nodes.tensor_parallel,
        launcher=launcher,
        transports=list(nodes.transports),
        commands=[shlex.join(command) for command in settings.engine.node_commands],
    )


def _tests_of(config: pytest.Config, chosen: Target, name: str) -> list[pytest.Item]:
    """Return the tests that a plan would select, with the options of the run."""
    assert chosen.profile is not None
    tests = []
    for item in config.stash.get(COLLECTED, ()):
        if LEVEL not in item.stash:
            continue
        if selection.left_out_as(config, item, chosen.profile, name) is None:
            tests.append(item)
    return tests


def _text(time: TimeRange | None) -> str | None:
    return str(time) if time is not None else None


def _shipped_times(profile: Profile, plans: Iterable[str]) -> run_plan.ShippedTimes | None:
    bounds = durations.shipped_durations(profile)
    if bounds is None:
        return None
    return run_plan.ShippedTimes(
        start=str(bounds.start.range),
        start_source=bounds.start.source,
        plans={name: bounds.plans[name].source for name in plans if name in bounds.plans},
    )


@contextlib.contextmanager
def telling_refusal() -> Iterator[None]:
    """Pass the reason to ``sm121 plan`` if pytest refuses the request."""
    try:
        yield
    except pytest.UsageError as error:
        run_plan.write_answer(run_plan.PlanAnswer(refusal=str(error)))
        raise


def reasons(items: Iterable[pytest.Item]) -> dict[str, list[str]]:
    """Return for each reason the ids of the tests that cannot run for that reason.

    Args:
        items: The selected tests.
    """
    by_reason: dict[str, list[str]] = {}
    for item in items:
        marker = item.get_closest_marker("skip")
        if marker is not None:
            why = item.stash.get(WHY_NOT, str(marker.kwargs.get("reason", "")))
            by_reason.setdefault(why, []).append(item.nodeid)
    return by_reason


def _forecast(
    config: pytest.Config, chosen: Target, name: str, tests: Iterable[pytest.Item]
) -> Forecast:
    assert chosen.profile is not None
    checks = [_check(config, chosen, chosen.profile, item) for item in tests]
    return forecast.forecast_run(
        chosen.profile, name, checks, timing.known(config, chosen, name).taken
    )


def _check(config: pytest.Config, chosen: Target, profile: Profile, item: pytest.Item) -> Check:
    """Return the planned check of a test: its level, its servers, and a duration set by an option.

    A test with the fixture ``servers`` may start any configuration. The first such test is expected
    to start the baseline.
    """
    used = getattr(item, "fixturenames", ())
    configurations = set()
    if config.stash[SETTINGS].base_url is None:
        if "server" in used:
            configurations.add(profile.under_test)
        if "servers" in used:
            configurations.add(profile.baseline)
    soak_option = config.getoption("--soak")
    lasts: TimeRange | None = None
    if soak_option is not None and item.stash[ID] == certification.SOAK:
        lasts = TimeRange.of(soak.parse_duration(soak_option))
    return Check(
        item.stash[ID],
        item.stash[LEVEL],
        frozenset(configurations),
        can_run=item.stash.get(WHY_NOT, None) in (None, chosen.obstacle),
        stops=item.stash[ID] == forecast.STOP,
        lasts=lasts,
    )


def _measured_gb_s(report: Path, profile: Profile) -> float | None:
    """Return the memory bandwidth of this machine that the newest run has measured.

    None if none of the newest runs with this profile on this machine has measured it.
    """
    files = [report / verdict_file.NAME, *(report / "earlier").glob(f"*/{verdict_file.NAME}")]
    newest = sorted(filter(Path.is_file, files), key=os.path.getmtime, reverse=True)
    for file in newest[:_NEWEST]:
        try:
            run = stored_run.file_of(file)
        except UsageError:
            continue  # the report cannot be read
        if run.fingerprint is None or run.fingerprint.machine != this_machine.identity():
            continue
        if run.profile != profile.name or run.box.before is None:
            continue
        device = run.box.before.device
        if device is not None and run.box.state != box.BoxState.DEGRADED:
            return device.bandwidth_best_gb_s
    return None


def _path(settings: Settings, _chosen: Target, profile: Profile) -> Iterable[str]:
    """Yield a line on the kernel path that the profile requires."""
    if settings.base_url is not None:
        return
    required = profile.path_of(profile.under_test)
    values = {
        "attention": required.attention,
        "moe": required.moe,
        "KV layout": required.kv_layout,
    }
    parts = [f"{name} {' or '.join(names)}" for name, names in values.items() if names]
    if parts:
        yield f"requested path: {', '.join(parts)}"


def _start(settings: Settings, chosen: Target, profile: Profile) -> Iterable[str]:
    """Yield the obstacles to a start of the configuration under test, and the state of caches."""
    if chosen.obstacle is not None or settings.base_url is not None:
        return
    under_test = profile.configurations[profile.under_test]
    environment = target.start_environment(settings, profile, under_test.environment)
    needs = profile.engine.needs
    modules = None
    if needs.jit_modules:
        try:
            modules = FlashInferModules.of(settings.engine.python, environment)
        except interpreter.NoAnswer as error:
            yield f"start: {error}"
            return
    engine = registry.engine(settings.engine.name)
    findings = preflight.Preflight(
        chosen.arch,
        (*profile.engine.arguments, *under_test.arguments, *settings.engine.arguments),
        environment,
        needs=needs,
        directory=settings.report_dir,
        modules=modules,
        cuda=CudaVersions.of(engine, settings.engine.python, environment),
        version=chosen.engine.identity,
        cold_ready_within_s=profile.engine.cold_ready_within_s.value,
    ).findings()
    for item in findings:
        yield f"start: {item.severity}: {item.message}. {item.remedy}"
    if modules is not None and not any(item.check == "jit_cache" for item in findings):
        yield f"start: the JIT cache in {modules.folder} is warm"


def _memory(settings: Settings, chosen: Target, profile: Profile) -> Iterable[str]:
    """Yield the memory that a start needs, computed from the checkpoint; say whether it fits."""
    if settings.base_url is not None or settings.engine.name != _FORECAST_ENGINE:
        return
    if chosen.arch != _ONE_MEMORY:
        return
    model = settings.target.model or profile.model.id
    under_test = profile.configurations[profile.under_test]
    arguments = (*profile.engine.arguments, *under_test.arguments, *settings.engine.arguments)
    revision = engine_arguments.parse_options(arguments).get("revision")
    try:
        checkpoint = inspection.inspect(model, revision=revision)
    except (Sm121Error, OSError) as error:
        yield f"memory: not forecast: {error}"
        return
    try:
        start = StartArguments.of(arguments, checkpoint)
    except Sm121Error as error:
        yield f"memory: not forecast: {error}"
        return
    required = profile.path_of(profile.under_test)
    formats = roofline.served(checkpoint.config, arguments, required, KernelPath())
    memory = start_memory.MachineMemory.of_a_gb10()
    if chosen.obstacle is None:
        memory = start_memory.MachineMemory.read()
    yield from start_memory.lines(start_memory.forecast(checkpoint, start, memory, formats))


def _gates(settings: Settings, _chosen: Target, profile: Profile) -> Iterable[str]:
    """Yield the gates that the memory bandwidth makes impossible for this configuration."""
    config = roofline.read_config(settings.target.model or profile.model.id)
    if config is None:
        return
    name = profile.under_test
    suffix = "" if profile.question else " (applies to every build)"
    gb_s = _measured_gb_s(settings.report_dir, profile)
    for gate in profile.performance.gates:
        depth = roofline.depth_of(gate.metric)
        if depth is None or depth not in settings.measuring_plan(profile).depths:
            continue
        try:
            read = roofline.cost(profile, name, depth, config, settings.engine.arguments)
        except Sm121Error as error:
            yield f"gates: not compared with the memory bandwidth: {error}"
            return
        why = roofline.out_of_reach(profile, gate, read, config, gb_s)
        if why:
            limit = gate.at_most if gate.minimum is None else gate.minimum
            label = f"gate {gate.metric}: {limit:g} {gate.unit}{suffix}"
            yield f"{label} is above the bound: configuration {name} reads {why}"


def _certificate(settings: Settings, chosen: Target, profile: Profile) -> Iterable[str]:
    """Yield the kernels of the expected path that a certificate needs and no provider can test."""
    if "kernel" not in profile.certify.levels or settings.base_url is not None:
        return
    configured = profile.configurations[profile.under_test]
    configuration = ServerConfiguration(
        name=profile.under_test,
        engine=settings.engine.name,
        python=settings.engine.python,
        model="",
        served_name="",
        arguments=(*profile.engine.arguments, *configured.arguments, *settings.engine.arguments),
        environment=environment_items(configured.environment, dict(settings.engine.environment)),
    )
    path = served.expected(profile.path_of(profile.under_test), configuration)
    for operation in serving.OPERATIONS:
        for choice in serving.choices(settings.engine.name, chosen.arch, path, operation):
            if choice.why and choice.backend is not None:
                kernel = f"{operation} of {serving.component(operation)} {choice.backend}"
                yield f"no certificate: {kernel} would not be judged: {choice.why}"


_FACTS: tuple[Fact, ...] = (_path, _gates, _start, _memory, _certificate)
