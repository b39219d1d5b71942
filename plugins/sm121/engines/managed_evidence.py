"""The part of a crash bundle that describes a managed server."""

from collections.abc import Collection

from sm121.core.redaction import redact_arguments, redact_environment
from sm121.engines.managed import ManagedServer
from sm121.evidence.crash_bundle import EngineProcesses, Evidence


def processes_of(managed: ManagedServer | None) -> EngineProcesses:
    """Return the processes of a server that the suite started; none for an attached server.

    Args:
        managed: The server; None for an attached server.
    """
    if managed is None:
        return EngineProcesses()
    exits = managed.launch.exits()
    tree = managed.launch.look_at_tree()
    return EngineProcesses(
        exits=exits,
        tree=tree,
        pids=managed.launch.known_pids,
        stacks=managed.launch.stacks,
        stacks_folder=managed.launch.supervision.stacks_folder,
    )


def add(
    evidence: Evidence, managed: ManagedServer, *, version: str | None, secrets: Collection[str]
) -> None:
    """Add the log, the exit status, the configuration, the nodes and the environment of a server.

    Args:
        evidence: The evidence of the server's end, which is modified in place.
        managed: The server.
        version: The version of its engine; None if it is not known.
        secrets: Known secrets, which must not appear in the description of the configuration.
    """
    configuration = managed.configuration
    evidence.log = managed.launch.log
    evidence.processes.exit_status = managed.launch.exit_status
    evidence.setup.configuration = {
        "name": configuration.name,
        "engine": configuration.engine,
        "version": version,
        "python": configuration.python,
        "model": configuration.model,
        "arguments": redact_arguments(configuration.arguments, secrets),
        "environment": redact_environment(dict(configuration.environment), secrets),
        "debug": configuration.debug,
    }
    evidence.nodes = managed.described()
    evidence.stacks_of_nodes = managed.other_nodes.stacks()
    evidence.setup.environment = managed.engine.environment(configuration, api_key="")
