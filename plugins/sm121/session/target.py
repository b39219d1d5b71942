"""Chooses what will be judged, from the request and the machine, before anything starts."""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast, get_args

from sm121.core import architecture, configuration, profile
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.server import Node, Server
from sm121.engines import attached_log, protocol, registry, served_model
from sm121.engines.attached import another_model, attach, several_processes
from sm121.engines.detection import detect
from sm121.evidence import kernel_path, requirement, signatures
from sm121.measure import roofline
from sm121.run.record import Target
from sm121.session.settings import Settings

_CANARY = "canary:"


def resolve(settings: Settings, asked_by_marker: tuple[str, ...]) -> Target:
    """Choose architecture and profile. Raises UsageError: the choices contradict each other, or
    there is no profile for the target."""
    arch = _architecture(settings, asked_by_marker)
    obstacle = machine_obstacle(settings, asked_by_marker)
    if settings.base_url is not None:
        obstacle = several_processes(settings.base_url, settings.api_key)
    chosen = settings.profile
    if chosen is None and (obstacle is None or settings.base_url is not None):
        chosen = profile.load(profile.for_architecture(arch, settings.engine))
    if chosen is not None and settings.exam is not None:
        correctness = chosen.correctness.model_copy(update={"exam": str(settings.exam)})
        chosen = chosen.model_copy(update={"correctness": correctness})
    engine = registry.Installed()
    if chosen is not None and settings.base_url is None:
        if obstacle is None:
            with contextlib.suppress(UsageError):  # raised again when the run is opened
                engine = installed_engine(settings, chosen)
        chosen = chosen.judging(settings.configuration, engine.identity, engine.options)
    return Target(arch, chosen, obstacle, engine)


def _architecture(settings: Settings, asked_by_marker: tuple[str, ...]) -> str:
    """The architecture of the target. Raises UsageError: this machine's has no name."""
    detected = architecture.detect()
    arch = settings.arch or (settings.profile.arch if settings.profile else None)
    if arch is None and asked_by_marker and detected.name not in asked_by_marker:
        arch = asked_by_marker[0]
    arch = arch or detected.name
    if arch is None:
        raise UsageError(
            "the suite has no name for this GPU's architecture; give --arch "
            f"({', '.join(architecture.NAMES)}) and --profile"
        )
    return arch


def machine_obstacle(settings: Settings, asked_by_marker: tuple[str, ...]) -> str | None:
    """Why this machine cannot run the target; None: it can, or an attached server does. Raises
    UsageError: this machine's architecture has no name."""
    arch, detected = _architecture(settings, asked_by_marker), architecture.detect()
    if settings.base_url is not None or arch == detected.name:
        return None
    machine = detected.name or "a GPU that the suite has no name for"
    return (
        f"{arch} was asked for, this machine is {machine} ({detected.evidence}). Run on a "
        f"machine with {arch}, or attach to a server there: --base-url URL --arch {arch}"
    )


def judging_attached(settings: Settings, target: Target, attached: Server) -> Target:
    """The target as an attached server is judged: by the named configuration, else the fastest that
    its build has, else the one that its log shows most of, else the profile's own choice. Raises
    UsageError: there is no such configuration, or the release cannot have it."""
    chosen = target.profile
    assert chosen is not None
    path = None
    if attached.log is not None and attached.reader is not None:
        path = kernel_path.read_log(attached.log, attached.reader)
    engine = registry.Installed(attached.version, build=path.build if path is not None else None)
    judging = chosen.judging(settings.configuration, engine.identity)
    decided = settings.configuration is not None or judging.under_test in judging.fastest
    if path is not None and attached.log is not None and not decided:
        differing = {
            name: len(requirement.contradictions(judging.path_of(name), path, attached.log, name))
            for name in dict.fromkeys([judging.under_test, *judging.configurations])
        }
        likest = min(differing, key=lambda name: differing[name])
        judging = judging.model_copy(update={"under_test": likest})
    return dataclasses.replace(target, profile=judging, engine=engine)


def attached_server(settings: Settings, chosen: Profile) -> Server | None:
    """The server of ``--base-url``, probed; None when the suite is to start one itself. Raises
    UsageError: the server does not answer, or is not the one that was asked for."""
    if settings.base_url is None:
        return None
    server = attach_to(settings.base_url, settings.server_log, settings, chosen)
    if chosen.nodes is None:
        return server
    logs = (server.log, *settings.node_logs, *[None] * chosen.nodes.count)[: chosen.nodes.count]
    names = [str(log or settings.base_url) for log in logs]
    nodes = tuple(Node(rank, names[rank], log) for rank, log in enumerate(logs))
    return dataclasses.replace(server, nodes=nodes)


def attach_to(url: str, log: Path | None, settings: Settings, chosen: Profile) -> Server:
    """A running server, probed, and its log only where that is proven to be its own. Raises
    UsageError: the server does not answer, or is not the one that was asked for."""
    name = chosen.model.served_name
    required = settings.served_name or (name if settings.certify else None)
    server = attach(url, api_key=settings.api_key, served_name=required, default_name=name, log=log)
    can = detect(server, settings.attached_engine)
    if can.engine in signatures.known_engines():
        server = dataclasses.replace(server, reader=can.engine)
    name = f"--server-log {log}"
    if log == settings.server_log and settings.log_name is not None:
        name = settings.log_name
    if log is not None and (doubt := attached_log.doubt(server, can, log, name)) is not None:
        server = dataclasses.replace(server, log=None, why_no_log=doubt)
    if settings.served_name is None:
        _refuse_another_model(server, url, chosen)
    return server


def _names_of(server: Server) -> list[str]:
    """What an attached server calls its model: served name, root, the model of its proven log."""
    names = [server.endpoint.served_name, server.root]
    if server.log is not None and server.reader is not None:
        names.append(kernel_path.read_log(server.log, server.reader).model)
    return [name for name in names if name is not None]


def _refuse_another_model(server: Server, url: str, chosen: Profile) -> None:
    """Raise UsageError where a name of the server's model, or its files here, state another model
    than the profile's. Nobody has named the model on the command line."""
    names = _names_of(server)
    expected = chosen.model.served_name
    known = {each.model.served_name for each in map(profile.load, profile.shipped())}
    other = served_model.contradiction(names, expected, known)
    if other is None and not any(served_model.is_named(name, expected) for name in names):
        own = roofline.read_config(chosen.model.id)
        for name in names:
            config = roofline.read_config(name)
            if config is not None and own is not None and _shape(config) != _shape(own):
                other = name
    if other is not None:
        serves = server.endpoint.served_name
        raise another_model(url, expected, serves if other == serves else f"{serves} ({other})")


def _shape(config: Mapping[str, object]) -> list[object]:
    names = ("hidden_size", "num_hidden_layers", "num_local_experts", "vocab_size")
    return [config.get(name) for name in names]


def name_remark(server: Server, settings: Settings, chosen: Profile) -> str | None:
    """The remark on an attached server that serves its only model under a name that does not show
    the profile's model; None where a name shows it, or the user gave the name."""
    expected = chosen.model.served_name
    if settings.served_name is not None:
        return None
    if any(served_model.is_named(name, expected) for name in _names_of(server)):
        return None
    return (
        f"model: the server serves {server.endpoint.served_name!r} alone, and it is judged as "
        f"{expected}; its name does not show that it is. --served-model-name NAME requires a name"
    )


def configurations(
    settings: Settings, chosen: Profile, *, notify: Callable[[str], None]
) -> dict[str, configuration.ServerConfiguration]:
    """The profile's server configurations with the user's arguments added. Builds the canary where
    the profile names it and it is missing. Raises UsageError: the model is not available."""
    model = settings.model or chosen.model.id
    if model.startswith(_CANARY):
        model = str(_canary(model.removeprefix(_CANARY), notify))
    elif Path(model).exists():
        model = str(Path(model).absolute())
    span = span_of(settings, chosen)
    traces = _traces(settings, chosen)
    return {
        name: configuration.ServerConfiguration(
            name=name,
            engine=settings.engine,
            python=settings.engine_python,
            model=model,
            served_name=settings.served_name or chosen.model.served_name,
            arguments=(
                *chosen.engine.arguments,
                *configured.arguments,
                *parallel(settings, chosen),
                *settings.engine_arguments,
            ),
            environment=configuration.environment_items(
                chosen.engine.environment, configured.environment, dict(settings.engine_environment)
            ),
            debug=settings.engine_debug,
            speaking_worker=chosen.engine.speaking_worker,
            traces=traces if name == chosen.under_test else None,
            span=span,
        )
        for name, configured in chosen.configurations.items()
    }


def span_of(settings: Settings, chosen: Profile) -> configuration.Span | None:
    """The machines that a server of the profile is started on; None: this one alone. Raises
    UsageError: nobody says how the others are reached."""
    nodes = chosen.nodes
    if nodes is None:
        return None
    launcher = settings.launcher or nodes.launcher
    commands = settings.node_commands
    if launcher == "nnodes" and not commands:
        if chosen.arch != architecture.CPU:
            raise UsageError(
                f"profile {chosen.name}: its server spans {nodes.count} machines: expected "
                "--node-command 'ssh HOST PYTHON' for each other one, or --launcher ray"
            )
        commands = ((settings.engine_python,),) * (nodes.count - 1)
    return configuration.Span(launcher, nodes.count, commands, settings.master_address)


def parallel(settings: Settings, chosen: Profile) -> tuple[str, ...]:
    """The arguments of a server that spans machines, as far as all of its ranks have them."""
    nodes = chosen.nodes
    if nodes is None:
        return ()
    executor = "sm121_cpu_ray.CpuRayExecutor" if chosen.arch == architecture.CPU else "ray"
    by_ray = (settings.launcher or nodes.launcher) == "ray"
    backend = ("--distributed-executor-backend", executor) if by_ray else ()
    return ("--tensor-parallel-size", str(nodes.tensor_parallel), *backend)


def profiler_mode(settings: Settings, chosen: Profile) -> str:
    """``keep``, ``restart`` or ``off``: by the user's option, else by the profile."""
    mode = settings.kernel_trace
    if mode == "auto":
        return chosen.engine.profiler
    return mode


def _traces(settings: Settings, chosen: Profile) -> str | None:
    engine = registry.engine(settings.engine)
    if profiler_mode(settings, chosen) == "off" or not isinstance(engine, protocol.Profiling):
        return None
    if any(argument.startswith("--profiler-config") for argument in settings.engine_arguments):
        return None
    if not engine.can_profile(settings.engine_python, start_environment(settings, chosen)):
        return None
    return str(settings.report_dir / "traces")


def installed_engine(settings: Settings, chosen: Profile) -> registry.Installed:
    """The engine that will be started. Raises UsageError: there is none, or it does not answer."""
    engine = registry.engine(settings.engine)
    return registry.installed(engine, settings.engine_python, start_environment(settings, chosen))


def start_environment(
    settings: Settings, chosen: Profile, configured: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a start: this process's, the profile's, a configuration's, the user's."""
    layers = (chosen.engine.environment, configured or {}, dict(settings.engine_environment))
    return {**os.environ, **dict(configuration.environment_items(*layers))}


def _canary(twin: str, notify: Callable[[str], None]) -> Path:
    from sm121.checkpoint import canary, canary_tensors

    folder = canary.folder()
    if twin == "gguf":
        if not (file := folder / "canary.gguf").is_file():
            raise UsageError(
                f"the profile's model is the canary as GGUF, expected at {file}: `sm121 canary "
                "--gguf LLAMA_CPP` makes it, in a checkout of the suite, LLAMA_CPP being one of "
                "llama.cpp"
            )
        return file
    if twin not in get_args(canary_tensors.Twin):
        raise UsageError(f"model canary:{twin}: expected canary:bf16 or canary:mxfp4")
    needed = ("torch", "safetensors", "openai_harmony")
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if not missing:
        return canary.build(folder / twin, cast("canary_tensors.Twin", twin), progress=notify)
    if not (folder / twin / "config.json").is_file():
        raise UsageError(
            f"the profile's model is the canary, which {', '.join(missing)} would build: "
            "`sm121 canary` builds it where they are installed, or give --model"
        )
    return folder / twin
