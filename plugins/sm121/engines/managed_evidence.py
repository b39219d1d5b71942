"""The evidence of a managed server's end, for a crash bundle."""

from collections.abc import Collection, Sequence

from sm121.core.redaction import redact_arguments, redact_environment
from sm121.engines.managed import ManagedServer
from sm121.evidence import cgroup, death, kernel_messages, remedies
from sm121.evidence.crash_bundle import CgroupCounters, EngineProcesses, EngineSetup, Evidence
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_messages import KernelBefore


def gather(
    managed: ManagedServer,
    cause: Cause,
    what: str,
    *,
    before: KernelBefore,
    starts: Sequence[tuple[float, float]] = (),
    secrets: Collection[str],
    version: str | None = None,
    is_refined: bool = True,
) -> Evidence:
    """Collect the evidence of a server's end, from its log, processes, configuration and nodes.

    Args:
        managed: The server.
        cause: The cause that its log shows.
        what: A description of the end, without the cause.
        before: When the run began, and the control group's memory counters at that time.
        starts: As in `KernelMessages`.
        secrets: Known secrets, which must not appear in the description of the configuration.
        version: The version of its engine; None if it is not known.
        is_refined: Whether exit statuses, kernel messages and the control group may show a more
            exact cause.
    """
    launch = managed.launch
    exits = launch.exits()
    tree = launch.look_at_tree()
    kernel = kernel_messages.since(launch.at or before.at, starts)
    if is_refined:
        kills = cgroup.kills(before.cgroup)
        cause = death.cause_of(
            cause, exits=exits, kernel=kernel, kills=kills, pids=launch.known_pids
        )
    return Evidence(
        cause=remedies.for_engine(cause, managed.engine.name),
        what=what,
        log=launch.log,
        processes=EngineProcesses(
            exit_status=launch.exit_status,
            exits=exits,
            tree=tree,
            stacks=launch.stacks,
            stacks_folder=launch.supervision.stacks_folder,
        ),
        kernel=kernel,
        cgroup=CgroupCounters(before.cgroup, cgroup.memory_events()),
        setup=_setup(managed, secrets, version),
        nodes=managed.described(),
        stacks_of_nodes=managed.other_nodes.stacks(),
    )


def _setup(managed: ManagedServer, secrets: Collection[str], version: str | None) -> EngineSetup:
    configuration = managed.configuration
    return EngineSetup(
        configuration={
            "name": configuration.name,
            "engine": configuration.engine,
            "version": version,
            "python": configuration.python,
            "model": configuration.model,
            "arguments": redact_arguments(configuration.arguments, secrets),
            "environment": redact_environment(dict(configuration.environment), secrets),
            "debug": configuration.debug,
        },
        environment=managed.engine.environment(configuration, api_key=""),
    )
