"""Reports on a server that did not start, died or hangs: a crash bundle and an error."""

from collections.abc import Mapping

from pytest_llm_server import ServerFailed
from sm121.core.waiting import until
from sm121.engines import managed_evidence
from sm121.engines.life import DYING_S
from sm121.engines.managed import ManagedServer
from sm121.engines.server_errors import ServerError, ServerStalled, ServerTimedOut, StartError
from sm121.evidence import cgroup, crash_bundle, death, failure, kernel_messages, remedies
from sm121.evidence.crash_bundle import Redact
from sm121.evidence.failure import Cause


def of_start(error: StartError) -> Cause:
    """Return the cause of a failed start. If the log shows no cause, it is a hang.

    Args:
        error: The error of the start.
    """
    hangs = isinstance(error, ServerTimedOut | ServerStalled)
    if not hangs or error.cause.kind not in death.VAGUE:
        return error.cause
    return Cause(
        kind="hang",
        summary=error.what,
        owner="the engine; or the limit of the start is too low for this model",
        remedy="read the end of its log, and the stacks in the crash bundle",
        lines=error.cause.lines,
    )


def of_death(managed: ManagedServer) -> Cause:
    """Return the cause of a server's death, from its log.

    Args:
        managed: The server. Its process may exit some seconds after its engine. The function waits
            for this exit, because only then is the log complete.
    """
    until(lambda: managed.launch.exit_status is not None, DYING_S)
    logged = failure.classify(managed.launch.log, managed.launch.exit_status)
    return remedies.for_engine(logged, managed.engine.name)


def of_hang(summary: str) -> Cause:
    """Return the cause for a server that runs, but does not answer.

    Args:
        summary: A description of the symptom.
    """
    return Cause(
        kind="hang",
        summary=summary,
        owner="the engine",
        remedy="read the stacks in the crash bundle, and the end of the log",
    )


def report(
    managed: ManagedServer,
    what: str,
    cause: Cause,
    *,
    test: str | None,
    cgroup_before: Mapping[str, int] | str,
    redact: Redact,
) -> ServerFailed:
    """Write a crash bundle, and return the error for the test.

    Args:
        managed: The server that did not start, died or hangs.
        what: What happened, without the cause.
        cause: The cause that the log shows.
        test: The id of the running test; None between two tests.
        cgroup_before: The memory counters of the cgroup before the start.
        redact: Removes secrets from a text.
    """
    exits = managed.launch.exits()
    kernel = kernel_messages.since(managed.launch.at)
    cause = death.cause_of(
        cause,
        exits=exits,
        kernel=kernel,
        kills=cgroup.kills(cgroup_before),
        pids=managed.launch.known_pids,
    )
    cause = remedies.for_engine(cause, managed.engine.name)
    evidence = crash_bundle.Evidence(
        cause=cause,
        what=what,
        test=test,
        processes=managed_evidence.processes_of(managed),
        kernel=kernel,
        cgroup=crash_bundle.CgroupCounters(cgroup_before, cgroup.memory_events()),
    )
    managed_evidence.add(evidence, managed, version=None, secrets=managed.secrets)
    folder = managed.directory / crash_bundle.FOLDER
    try:
        bundle, _ = crash_bundle.write_somewhere(evidence, folder, redact)
        where = f"Crash bundle: {bundle}"
    except OSError as error:
        where = f"No crash bundle could be written: {error}"
    return ServerFailed(redact(f"{ServerError(what, cause, managed.launch.log)}\n    {where}"))
