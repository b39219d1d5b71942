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

    Attributes:
        cause: The cause. A more exact cause, from exit codes or kernel messages, replaces it, and
            the message then contains that one.
    """

    def __init__(self, what: str, cause: Cause, log: Path) -> None:
        super().__init__(what)
        self.what = what
        self.cause = cause
        self.log = log

    def __str__(self) -> str:
        cause = self.cause
        lines = "".join(f"\n    {line}" for line in cause.lines[-_SHOWN_LINES:])
        remedy = f" Remedy: {cause.remedy}." if cause.remedy else ""
        return (
            f"{self.what}. Cause: {cause.kind}: {cause.summary} (ask: {cause.owner}).{remedy} "
            f"Log: {self.log}{lines}"
        )


class StartError(ServerError):
    """The server did not become ready."""


class ServerExited(StartError):
    """The server ended during start-up, with any exit status (0 included)."""


class ServerTimedOut(StartError):
    """The server was alive but not ready in time."""


class ServerStalled(StartError):
    """The server neither logged nor used the processor for too long."""


class PortTaken(StartError):
    """Another process took the port before the server could bind it."""
