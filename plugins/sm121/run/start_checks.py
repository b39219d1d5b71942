"""The checks before a run starts its first server."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sm121.compilation.jit import FlashInferModules
from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_settings import EngineSettings
from sm121.core.server import Node
from sm121.engines import preflight, registry
from sm121.engines.cuda_versions import CudaVersions
from sm121.engines.preflight import PreflightFinding


def find_obstacles(
    arch: str,
    engine: EngineSettings,
    configurations: Iterable[ServerConfiguration],
    environment_of: Callable[[ServerConfiguration], Mapping[str, str]],
    *,
    directory: Path,
    version: str | None,
    node_facts: Mapping[Node, Mapping[str, Any]],
) -> list[PreflightFinding]:
    """Return the reasons why servers cannot start on this machine and its nodes, each once.

    Args:
        arch: The architecture.
        engine: The profile's settings of the engine.
        configurations: The configurations that the run may start.
        environment_of: A function that returns the environment of a configuration's engine.
        directory: The report directory. Its disk must have space for logs.
        version: The identity of the engine's build; None if it is not known.
        node_facts: The facts about each node, this machine first; empty without other nodes.
    """
    findings = list(preflight.of_nodes(engine.needs, node_facts))
    for configuration in configurations:
        environment = environment_of(configuration)
        modules = None
        if engine.needs.jit_modules:
            modules = FlashInferModules.of(configuration.python, environment)
        cuda = CudaVersions.of(
            registry.engine(configuration.engine), configuration.python, environment
        )
        checks = preflight.Preflight(
            arch,
            configuration.arguments,
            environment,
            needs=engine.needs,
            directory=directory,
            modules=modules,
            cuda=cuda,
            version=version,
            cold_ready_within_s=engine.cold_ready_within_s.value,
        )
        for finding in checks.findings():
            if finding not in findings:
                findings.append(finding)
    return findings
