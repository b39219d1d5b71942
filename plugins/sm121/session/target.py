"""Chooses the target of a run from the settings and the machine, before a server starts."""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast, get_args

from sm121.checkpoint import canary, canary_tensors, identity
from sm121.core import architecture, configuration, profile
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.server import Node, Server
from sm121.engines import attached_log, protocol, registry
from sm121.engines.attached import attach, several_processes
from sm121.engines.detection import detect
from sm121.evidence import kernel_path, requirement, signatures
from sm121.evidence.kernel_path import KernelPath
from sm121.run.record import Target
from sm121.session import attached_model
from sm121.session.settings import Settings

#: The packages that are needed to build the canary.
_CANARY_NEEDS = ("torch", "safetensors", "openai_harmony")


def resolve(settings: Settings, asked_by_marker: tuple[str, ...]) -> Target:
    """Choose architecture and profile.

    Args:
        settings: The settings of the run.
        asked_by_marker: Architectures that ``-m`` names.

    Returns:
        The target. Its profile is None if the machine cannot run it and no option names a profile.

    Raises:
        UsageError: Settings contradict each other, or the target has no profile.
    """
    arch = _architecture(settings, asked_by_marker)
    obstacle = machine_obstacle(settings, asked_by_marker)
    if settings.attached is not None:
        obstacle = several_processes(settings.attached.base_url, settings.attached.api_key)
    chosen = _profile(settings, arch, has_obstacle=obstacle is not None)
    engine = registry.Installed()
    if chosen is not None and settings.base_url is None:
        if obstacle is None:
            with contextlib.suppress(UsageError):  # reported when the run is opened
                engine = installed_engine(settings, chosen)
        chosen = chosen.judging(settings.target.configuration, engine.identity, engine.options)
        obstacle = obstacle or _drafter_obstacle(settings, chosen)
    return Target(arch, chosen, obstacle, engine)


def _drafter_obstacle(settings: Settings, chosen: Profile) -> str | None:
    """Return why the configuration under test cannot start with its drafter model, or None."""
    configured = chosen.configurations[chosen.under_test]
    arguments = (*chosen.engine.arguments, *configured.arguments, *settings.engine.arguments)
    environment = start_environment(settings, chosen, configured.environment)
    return identity.drafter_obstacle(arguments, environment)


def _profile(settings: Settings, arch: str, *, has_obstacle: bool) -> Profile | None:
    """Return the named profile, or else that of the architecture, with the named exam."""
    chosen = settings.target.profile
    if chosen is None:
        if has_obstacle and settings.base_url is None:
            return None
        chosen = profile.load(profile.for_architecture(arch, settings.engine.name))
    chosen = settings.replaced.of(chosen)
    if settings.answers.exam is None:
        return chosen
    correctness = chosen.correctness.model_copy(update={"exam": str(settings.answers.exam)})
    return chosen.model_copy(update={"correctness": correctness})


def _architecture(settings: Settings, asked_by_marker: tuple[str, ...]) -> str:
    """Return the target's architecture; raise UsageError if this machine's is unknown."""
    if settings.target.arch:
        return settings.target.arch
    if settings.target.profile is not None:
        return settings.target.profile.arch
    detected = architecture.detect()
    if asked_by_marker and detected.name not in asked_by_marker:
        return asked_by_marker[0]
    if detected.name is None:
        raise UsageError(
            "the suite has no name for this GPU's architecture; give --arch "
            f"({', '.join(architecture.NAMES)}) and --profile"
        )
    return detected.name


def machine_obstacle(settings: Settings, asked_by_marker: tuple[str, ...]) -> str | None:
    """Return why this machine cannot run the target.

    Args:
        settings: The settings of the run.
        asked_by_marker: Architectures that ``-m`` names.

    Returns:
        The reason; None if it can run the target, or if the server is attached.

    Raises:
        UsageError: The suite does not know the architecture of this machine.
    """
    arch = _architecture(settings, asked_by_marker)
    detected = architecture.detect()
    if settings.base_url is not None or arch == detected.name:
        return None
    machine = detected.name or "a GPU that the suite has no name for"
    return (
        f"{arch} was requested, but this machine is {machine} ({detected.evidence}). Run on a "
        f"machine with {arch}, or attach to a server there: --base-url URL --arch {arch}"
    )


def judging_attached(settings: Settings, target: Target, attached: Server) -> Target:
    """Choose the configuration of the profile for an attached server.

    The first of these that exists is chosen: the configuration that an option names, the fastest
    one of the server's build, the one that matches the log best, the profile's under_test.

    Args:
        settings: The settings of the run.
        target: The target. It has a profile.
        attached: The server, after it was probed.

    Returns:
        The target with that configuration and the server's release.

    Raises:
        UsageError: The configuration does not exist, or not for this release.
    """
    chosen = target.profile
    assert chosen is not None
    path = None
    build = None
    if attached.log is not None and attached.reader is not None:
        path = kernel_path.read_log(attached.log, attached.reader)
        build = path.log.build
    engine = registry.Installed(attached.version, build=build)
    judging = chosen.judging(settings.target.configuration, engine.identity)
    is_decided = settings.target.configuration is not None or judging.under_test in judging.fastest
    if path is not None and attached.log is not None and not is_decided:
        likest = _likest(judging, path, attached.log)
        judging = judging.model_copy(update={"under_test": likest})
    return dataclasses.replace(target, profile=judging, engine=engine)


def _likest(judging: Profile, path: KernelPath, log: Path) -> str:
    """Return the configuration with the fewest contradictions to a path; under_test wins a tie."""
    likest = judging.under_test
    fewest: int | None = None
    for name in dict.fromkeys([judging.under_test, *judging.configurations]):
        count = len(requirement.contradictions(judging.path_of(name), path, log, name))
        if fewest is None or count < fewest:
            likest = name
            fewest = count
    return likest


def attached_server(settings: Settings, chosen: Profile) -> Server | None:
    """Probe the server of ``--base-url``.

    Args:
        settings: The settings of the run.
        chosen: The profile of the run.

    Returns:
        The server with its nodes; None if the suite is to start one itself.

    Raises:
        UsageError: The server does not answer, or is not the requested one.
    """
    given = settings.attached
    if given is None:
        return None
    server = attach_to(given.base_url, given.log, settings, chosen)
    if chosen.nodes is None:
        return server
    known_logs = [server.log, *given.node_logs]
    nodes = []
    for rank in range(chosen.nodes.count):
        log = known_logs[rank] if rank < len(known_logs) else None
        nodes.append(Node(rank, str(log or given.base_url), log))
    return dataclasses.replace(server, nodes=tuple(nodes))


def attach_to(url: str, log: Path | None, settings: Settings, chosen: Profile) -> Server:
    """Probe a running server.

    Args:
        url: Its URL.
        log: The file that the user has given as its log.
        settings: The settings of the run.
        chosen: The profile of the run.

    Returns:
        The server. It has the log only if the log is proven to belong to this server.

    Raises:
        UsageError: The server does not answer, or is not the requested one. Or the log is proven to
            be of another server.
    """
    given = settings.attached
    default_name = chosen.model.served_name
    required = settings.target.served_name
    if not required and settings.judging.certify:
        required = default_name
    server = attach(
        url,
        api_key=given.api_key if given is not None else None,
        served_name=required or None,
        default_name=default_name,
        log=log,
    )
    can = detect(server, given.engine if given is not None else None)
    if can.engine in signatures.known_engines():
        server = dataclasses.replace(server, reader=can.engine)
    if log is not None:
        doubt = attached_log.doubt(server, can, log, _log_name(log, settings))
        if doubt is not None and doubt.is_of_another:
            raise UsageError(
                f"{doubt.text}. Give the log that this server writes, or give none: the kernel "
                "path is then not proven"
            )
        if doubt is not None:
            server = dataclasses.replace(server, log=None, why_no_log=doubt.text)
    if settings.target.served_name is None:
        attached_model.refuse_another(server, url, chosen)
    return server


def _log_name(log: Path, settings: Settings) -> str:
    """Return the option with which the user named a log."""
    given = settings.attached
    if given is not None and given.log == log and given.log_name is not None:
        return given.log_name
    return f"--server-log {log}"


def configurations(
    settings: Settings, chosen: Profile, *, notify: Callable[[str], None]
) -> dict[str, configuration.ServerConfiguration]:
    """Return the profile's server configurations with the user's arguments added.

    The canary is built if the profile names it and it is missing.

    Args:
        settings: The settings of the run.
        chosen: The profile of the run.
        notify: A function that shows a line while the canary is built.

    Returns:
        The configurations by their names.

    Raises:
        UsageError: The model is not available.
    """
    model = settings.target.model or chosen.model.id
    twin = canary.twin_of(model)
    if twin is not None:
        model = str(_canary(twin, notify))
    elif Path(model).exists():
        model = str(Path(model).absolute())
    span = span_of(settings, chosen)
    traces = _traces(settings, chosen)
    by_name = {}
    for name, configured in chosen.configurations.items():
        by_name[name] = configuration.ServerConfiguration(
            name=name,
            engine=settings.engine.name,
            python=settings.engine.python,
            model=model,
            served_name=settings.target.served_name or chosen.model.served_name,
            arguments=(
                *chosen.engine.arguments,
                *configured.arguments,
                *parallel(settings, chosen),
                *settings.engine.arguments,
            ),
            environment=configuration.environment_items(
                chosen.engine.environment, configured.environment, dict(settings.engine.environment)
            ),
            debug=settings.engine.debug,
            speaking_worker=chosen.engine.speaking_worker,
            traces=traces if name == chosen.under_test else None,
            span=span,
        )
    return by_name


def span_of(settings: Settings, chosen: Profile) -> configuration.Span | None:
    """Return the machines on which a server of the profile is started.

    Args:
        settings: The settings of the run.
        chosen: The profile of the run.

    Returns:
        The machines; None: only this one.

    Raises:
        UsageError: No option says how to reach the other machines.
    """
    nodes = chosen.nodes
    if nodes is None:
        return None
    launcher = settings.engine.launcher or nodes.launcher
    commands = settings.engine.node_commands
    if launcher == "nnodes" and not commands:
        if chosen.arch != architecture.CPU:
            raise UsageError(
                f"profile {chosen.name}: its server spans {nodes.count} machines: expected "
                "--node-command 'ssh HOST PYTHON' for each other machine, or --launcher ray"
            )
        commands = ((settings.engine.python,),) * (nodes.count - 1)
    return configuration.Span(launcher, nodes.count, commands, settings.engine.master_address)


def parallel(settings: Settings, chosen: Profile) -> tuple[str, ...]:
    """Return the arguments that are common to all ranks of a server on several machines.

    Args:
        settings: The settings of the run.
        chosen: The profile of the run.

    Returns:
        The arguments; empty for a server on one machine.
    """
    nodes = chosen.nodes
    if nodes is None:
        return ()
    arguments = ("--tensor-parallel-size", str(nodes.tensor_parallel))
    if (settings.engine.launcher or nodes.launcher) != "ray":
        return arguments
    executor = "sm121_cpu_ray.CpuRayExecutor" if chosen.arch == architecture.CPU else "ray"
    return (*arguments, "--distributed-executor-backend", executor)


def profiler_mode(settings: Settings, chosen: Profile) -> str:
    """Return how the engine's profiler is used.

    Args:
        settings: The settings of the run.
        chosen: The profile of the run.

    Returns:
        ``keep``, ``restart`` or ``off``: the user's option, or else the profile's value.
    """
    mode = settings.measuring.kernel_trace
    if mode == "auto":
        return chosen.engine.profiler
    return mode


def _traces(settings: Settings, chosen: Profile) -> str | None:
    engine = registry.engine(settings.engine.name)
    if profiler_mode(settings, chosen) == "off" or not isinstance(engine, protocol.Profiling):
        return None
    if any(argument.startswith("--profiler-config") for argument in settings.engine.arguments):
        return None
    if not engine.can_profile(settings.engine.python, start_environment(settings, chosen)):
        return None
    return str(settings.report_dir / "traces")


def installed_engine(settings: Settings, chosen: Profile) -> registry.Installed:
    """Find the release and the options of the installed engine.

    Args:
        settings: The settings of the run.
        chosen: The profile of the run.

    Returns:
        The release and the options of the engine.

    Raises:
        UsageError: The engine is not installed, or its interpreter does not answer.
    """
    engine = registry.engine(settings.engine.name)
    return registry.installed(engine, settings.engine.python, start_environment(settings, chosen))


def start_environment(
    settings: Settings, chosen: Profile, configured: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment variables of a start. Later sources replace earlier ones.

    Args:
        settings: The settings of the run: the user's variables replace all others.
        chosen: The profile of the run: its variables replace those of this process.
        configured: The variables of a configuration, before the user's.
    """
    layers = (chosen.engine.environment, configured or {}, dict(settings.engine.environment))
    return {**os.environ, **dict(configuration.environment_items(*layers))}


def missing_model(settings: Settings, chosen: Profile) -> str | None:
    """Return why the run would be refused, if its model is a canary that cannot be built here.

    Args:
        settings: The settings of the run.
        chosen: The profile of the run.

    Returns:
        The message; None if the canary can be built, or if the model is not a canary.
    """
    twin = canary.twin_of(settings.target.model or chosen.model.id)
    return None if twin is None else _missing_canary(twin)


def _missing_canary(twin: str) -> str | None:
    """Return why a canary checkpoint is neither there nor can be built; None if one of them."""
    folder = canary.folder()
    if twin == "gguf":
        file = _gguf(folder)
        if file.is_file():
            return None
        return (
            f"the profile's model is the canary as GGUF: expected it at {file}, got no file. Build "
            "it in a checkout of the suite: `sm121 canary --gguf LLAMA_CPP`, where LLAMA_CPP is a "
            "checkout of llama.cpp"
        )
    if twin not in get_args(canary_tensors.Twin):
        return f"model canary:{twin}: expected canary:bf16 or canary:mxfp4"
    missing = _missing_packages()
    if missing and not (folder / twin / "config.json").is_file():
        return (
            "the profile's model is the canary, which is not built, and building it needs packages "
            f"that are missing: {', '.join(missing)}. Install them, or run `sm121 canary` where "
            "they are installed, or give --model"
        )
    return None


def _canary(twin: str, notify: Callable[[str], None]) -> Path:
    """Return the canary checkpoint. It is built if it is missing and its packages are installed."""
    refusal = _missing_canary(twin)
    if refusal is not None:
        raise UsageError(refusal)
    folder = canary.folder()
    if twin == "gguf":
        return _gguf(folder)
    if _missing_packages():
        return folder / twin
    return canary.build(folder / twin, cast("canary_tensors.Twin", twin), progress=notify)


def _missing_packages() -> list[str]:
    """Return the packages that building the canary needs and that are not installed."""
    return [name for name in _CANARY_NEEDS if not importlib.util.find_spec(name)]


def _gguf(folder: Path) -> Path:
    return folder / "canary.gguf"
