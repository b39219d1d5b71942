"""Errors of servers that the suite starts."""

from pathlib import Path

from sm121.core import errors
from sm121.evidence import death
from sm121.evidence.failure import Cause

#: The maximum number of lines of the log in a message.
_SHOWN_LINES = 8


class ServerError(errors.Sm121Error):
    """A managed server failed.

    Args:
        what: What happened, without the cause.
        cause: The cause that the server's log shows.
        log: The log.

    Attributes:
        cause: The cause. If exit codes or kernel messages later show a more exact cause, it
            replaces this one, in the message, too.
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

    def cause_or_hang(self, *, owner: str, remedy: str) -> Cause:
        """Return the logged cause. If it is vague and the start took too long, the cause is a hang.

        Args:
            owner: The owner of a hang.
            remedy: The remedy for a hang.
        """
        hung = isinstance(self, ServerTimedOut | ServerStalled)
        if not hung or self.cause.kind not in death.VAGUE:
            return self.cause
        lines = self.cause.lines
        return Cause(kind="hang", summary=self.what, owner=owner, remedy=remedy, lines=lines)


class ServerExited(StartError):
    """The server ended during start-up, with any exit status (0 included)."""


class ServerTimedOut(StartError):
    """The server was still running at the time limit, but not ready."""


class ServerStalled(StartError):
    """For too long, the server neither logged anything nor used the processor."""


class PortTaken(StartError):
    """Another process took the port before the server could bind it."""
