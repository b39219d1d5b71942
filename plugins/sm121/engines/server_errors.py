"""Errors of servers that the suite starts."""

from pathlib import Path

from sm121.core import errors
from sm121.evidence.failure import Cause

#: Limit of the lines of the log in a message.
_SHOWN_LINES = 8


class ServerError(errors.Sm121Error):
    """A managed server failed.

    Args:
        what: The event, without the cause.
        cause: The cause, by the server's log.
        log: The log.
    """

    def __init__(self, what: str, cause: Cause, log: Path) -> None:
        self.what = what
        self.cause = cause
        self.log = log
        lines = "".join(f"\n    {line}" for line in cause.lines[-_SHOWN_LINES:])
        remedy = f" Remedy: {cause.remedy}." if cause.remedy else ""
        super().__init__(
            f"{what}. Cause: {cause.kind}: {cause.summary} (ask: {cause.owner}).{remedy} "
            f"Log: {log}{lines}"
        )


class StartError(ServerError):
    """The server did not become ready."""


class ServerExited(StartError):
    """It ended during start-up, with whatever exit status (0 included)."""


class ServerTimedOut(StartError):
    """It was alive but not ready in time."""


class ServerStalled(StartError):
    """It neither logged nor used the processor for too long."""


class PortTaken(StartError):
    """Somebody else took the port before the server could bind it."""
