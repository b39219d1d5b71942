"""What a run asks and how long it takes: at its head, and whole for ``sm121 plan``. ``sm121 plan``
is ``pytest --collect-only``: nothing is started. Its page has the facts of `_FACTS`, what would not
run with the reason, and each plan of the profile with its minutes."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import pytest

from sm121.compilation.jit import FlashInferModules
from sm121.core import architecture, interpreter, profile_fields, templates
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.core.profile import FULL, Profile
from sm121.engines import choices, preflight
from sm121.kernels import serving
from sm121.matrix import cost
from sm121.matrix.cost import duration
from sm121.measure import machine, roofline
from sm121.measure.plan import Plan
from sm121.plugin import matrix, selection
from sm121.plugin.selection import WHY_NOT
from sm121.plugin.stash import ID, LEVEL, SETTINGS
from sm121.run import served
from sm121.run.record import Target
from sm121.session import forecast, target
from sm121.session.forecast import Check, Forecast, Timed
from sm121.session.settings import Settings

TARGET = pytest.StashKey[Target]()
#: What each level of a run will ask, from its head on.
COSTS = pytest.StashKey[dict[str, Forecast]]()
Fact: TypeAlias = Callable[[Settings, Target, Profile], Iterable[str]]


def head(config: pytest.Config, chosen: Target, items: Sequence[pytest.Item]) -> list[str]:
    """What a run asks, in two lines."""
    tests = [item for item in items if LEVEL in item.stash]
    if chosen.profile is None or not tests:
        return []
    settings = config.stash[SETTINGS]
    timings = forecast.timed(settings.report_dir, chosen.profile, settings.plan)
    costs = config.stash[COSTS] = _costs(config, chosen.profile, settings.plan, tests, timings)
    text = templates.rendered(
        "plan_head.txt.j2",
        plan=settings.plan,
        number=len(tests),
        profile=chosen.profile,
        costs=costs,
        duration=duration,
        reasons=reasons(tests),
        gates=_gates(settings, chosen, chosen.profile),
    )
    return text.splitlines()


def whole(config: pytest.Config, items: Sequence[pytest.Item]) -> dict[str, Any]:
    """All that is known before a start: facts, plans, minutes."""
    chosen, settings = config.stash.get(TARGET, None), config.stash[SETTINGS]
    if chosen is None:
        return {"chosen": None}
    profile, facts, plans, source = chosen.profile, [], {}, None
    if profile is not None:
        facts = [line for fact in _FACTS for line in fact(settings, chosen, profile)]
        for name in [*profile.plans, FULL] if settings.plan == FULL else [settings.plan]:
            selected = [item for item in items if selection.is_asked(item, profile, name, settings)]
            timings = forecast.timed(settings.report_dir, profile, name)
            plans[name] = _costs(config, profile, name, selected, timings, chosen.obstacle)
            source = source or timings.source
    return {
        "chosen": chosen,
        "settings": settings,
        "identity": machine.identity(),
        "detected": architecture.detect(),
        "faults": [*machine.faults(chosen.arch)],
        "facts": facts,
        "profile": profile,
        "plans": plans,
        "levels": profile_fields.LEVELS,
        "source": source,
        "shell": shlex.join,
    }


def reasons(items: Iterable[pytest.Item]) -> dict[str, list[str]]:
    """The tests that cannot run, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for item in items:
        marker = item.get_closest_marker("skip")
        if marker is not None:
            why = item.stash.get(WHY_NOT, str(marker.kwargs.get("reason", "")))
            by_reason.setdefault(why, []).append(item.nodeid)
    return by_reason


def _costs(
    config: pytest.Config,
    profile: Profile,
    name: str,
    items: Iterable[pytest.Item],
    timings: Timed,
    obstacle: str | None = None,
) -> dict[str, Forecast]:
    settings = config.stash[SETTINGS]
    plan = Plan.of(profile, plan=name, sizes=settings.sizes)
    cells = config.stash.get(matrix.PLAN, None)
    matrix_s = cost.seconds(cells) if cells is not None and cells.cells else 0.0
    starting = {"server", "servers"}
    if profile.engine.profiler == "restart":
        starting.add("decode_profile")
    if settings.base_url is not None:
        starting.clear()
    checks = [
        Check(
            item.stash[ID],
            item.stash[LEVEL],
            frozenset(starting.intersection(getattr(item, "fixturenames", ()))),
            item.stash.get(WHY_NOT, None) in (None, obstacle),
            *(selection.parameters(item).get(name) for name in ("depth", "tokens", "streams")),
        )
        for item in items
    ]
    return forecast.of(profile, plan, checks, timings, matrix_s)


def _path(settings: Settings, chosen: Target, profile: Profile) -> Iterable[str]:
    """What the release will choose, as far as the profile knows it."""
    if settings.base_url is not None:
        return
    required = profile.path_of(profile.under_test)
    kernels = (("attention", required.attention), ("moe", required.moe))
    fields = (*kernels, ("KV layout", required.kv_layout))
    if parts := [f"{name} {' or '.join(values)}" for name, values in fields if values]:
        yield f"path that is asked for: {', '.join(parts)}"
    known_releases = choices.load(settings.engine, chosen.arch)
    release = known_releases.at(chosen.engine.identity) if known_releases is not None else None
    if release is None:
        return
    under_test = profile.configurations[profile.under_test]
    environment = target.start_environment(settings, profile, under_test.environment)
    arguments = (*under_test.arguments, *settings.engine_arguments)
    by_choice = choices.chosen(release, arguments, environment)
    for choice, machines in by_choice.items():
        yield f"vLLM {release.version} was seen to choose: {choice} ({'; '.join(machines)})"


def _start(settings: Settings, chosen: Target, profile: Profile) -> Iterable[str]:
    """What stands against a start of the configuration under test; whether caches are warm."""
    if chosen.obstacle is not None or settings.base_url is not None:
        return
    under_test = profile.configurations[profile.under_test]
    environment = target.start_environment(settings, profile, under_test.environment)
    needs, modules = profile.engine.needs, None
    if needs.jit_modules:
        try:
            modules = FlashInferModules.of(settings.engine_python, environment)
        except interpreter.NoAnswer as error:
            yield f"start: {error}"
            return
    findings = preflight.Preflight(
        chosen.arch,
        (*profile.engine.arguments, *under_test.arguments, *settings.engine_arguments),
        environment,
        needs=needs,
        directory=settings.report_dir,
        modules=modules,
        engine=profile.engine.name,
        version=chosen.engine.identity,
        cold_ready_within_s=profile.engine.cold_ready_within_s.value,
    ).findings()
    yield from (f"start: {item.severity}: {item.message}. {item.remedy}" for item in findings)
    if modules is not None and not any(item.check == "jit_cache" for item in findings):
        yield f"start: the JIT cache in {modules.folder} is warm"


def _gates(settings: Settings, _chosen: Target, profile: Profile) -> Iterable[str]:
    """Gates above what the memory allows the configuration under test, by what it will read."""
    if (config := roofline.read_config(settings.model or profile.model.id)) is None:
        return
    name, suffix = profile.under_test, "" if profile.question else " (asked of every build)"
    gb_s = forecast.timed(settings.report_dir, profile, settings.plan).gb_s
    for gate in profile.performance.gates:
        if (depth := roofline.depth_of(gate.metric)) in settings.measuring_plan(profile).depths:
            read = roofline.cost(profile, name, depth or 0, config, settings.engine_arguments)
            if why := roofline.out_of_reach(profile, gate, read, config, gb_s):
                label = f"gate {gate.metric}: {gate.minimum:g} {gate.unit}{suffix}"
                yield f"{label} is above the bound: configuration {name} reads {why}"


def _certificate(settings: Settings, chosen: Target, profile: Profile) -> Iterable[str]:
    """Kernels of the expected path that no provider judges, so that nothing can be certified."""
    if "kernel" not in profile.certify.levels or settings.base_url is not None:
        return
    configured = profile.configurations[profile.under_test]
    configuration = ServerConfiguration(
        *(profile.under_test, settings.engine, settings.engine_python, "", ""),
        (*profile.engine.arguments, *configured.arguments, *settings.engine_arguments),
        environment_items(configured.environment, dict(settings.engine_environment)),
    )
    path = served.expected(profile.path_of(profile.under_test), configuration)
    for operation in serving.OPERATIONS:
        for choice in serving.choices(settings.engine, chosen.arch, path, operation):
            if choice.why and choice.backend is not None:
                kernel = f"{operation} of {serving.component(operation)} {choice.backend}"
                yield f"no certificate: {kernel} would not be judged: {choice.why}"


_FACTS: tuple[Fact, ...] = (_path, _gates, _start, _certificate)
