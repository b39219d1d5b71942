"""Reports on a server that did not start, died or hangs: a crash bundle and an error."""

import functools
from collections.abc import Collection, Sequence

from pytest_llm_server import ServerFailed
from sm121.core import redaction
from sm121.core.waiting import until
from sm121.engines import life, managed_evidence
from sm121.engines.managed import ManagedServer
from sm121.engines.server_errors import ServerError, StartError
from sm121.evidence import crash_bundle
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_messages import KernelBefore


def of_start(error: StartError) -> Cause:
    """Return the cause of a failed start.

    If the log shows no cause and the start exceeded its time limit, the cause is a hang.

    Args:
        error: The error of the start.
    """
    return error.cause_or_hang(
        owner="the engine; or the limit of the start is too low for this model",
        remedy="read the end of the server's log, and the stacks in the crash bundle",
    )


def of_death(managed: ManagedServer) -> Cause:
    """Return the cause of a server's death, from its log.

    Args:
        managed: The server. Its process may exit some seconds after its engine. The function waits
            for this exit, because only then is the log complete.
    """
    until(lambda: managed.launch.exit_status is not None, life.DYING_S)
    return life.logged_cause(managed)


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
    before: KernelBefore,
    starts: Sequence[tuple[float, float]],
    secrets: Collection[str],
) -> ServerFailed:
    """Write a crash bundle, and return the error for the test.

    Args:
        managed: The server that did not start, died or hangs.
        what: What happened, without the cause.
        cause: The cause that the log shows.
        test: The id of the running test; None between two tests.
        before: The beginning of the run.
        starts: When each successful start of the run began and ended (``time.monotonic``).
        secrets: The secrets to remove, in addition to those that are found by their shape.
    """
    evidence = managed_evidence.gather(
        managed, cause, what, before=before, starts=starts, secrets=secrets
    )
    evidence.test = test
    redact = functools.partial(redaction.redact, secrets=secrets)
    folder = managed.directory / crash_bundle.FOLDER
    try:
        bundle, _ = crash_bundle.write_somewhere(evidence, folder, redact)
        where = f"Crash bundle: {bundle}"
    except OSError as error:
        where = f"No crash bundle could be written: {error}"
    failed = ServerError(what, evidence.cause, managed.launch.log)
    return ServerFailed(redact(f"{failed}\n    {where}"))
