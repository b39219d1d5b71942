"""What a level may ask of whoever runs it: the pytest run, or a script with a `Session`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from sm121.core.configuration import ServerConfiguration
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.engines.managed import ServerError, StopReport
from sm121.engines.pool import ServerPool
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import KernelPath
from sm121.run.ledger import Ledger
from sm121.run.verdict_file import VerdictFile


class Observer(Protocol):
    """Watches a server under load; a crash bundle has what it saw."""

    def under_way(self) -> list[dict[str, Any]]:
        """The requests that are under way at this moment."""

    def memory_record(self) -> dict[str, Any]:
        """The samples of memory so far."""

    @property
    def metrics(self) -> str | None:
        """The server's /metrics as they were last read; None before."""


class Harness(Protocol):
    """Servers, a folder, and a way to say something."""

    #: Set while a server is under load, None else.
    observer: Observer | None

    @property
    def profile(self) -> Profile:
        """The profile in force."""

    @property
    def arch(self) -> str:
        """The architecture of the target."""

    @property
    def directory(self) -> Path:
        """The report directory."""

    @property
    def file(self) -> VerdictFile:
        """What is known of the run so far; metrics, memory and remarks are written into it."""

    @property
    def ledger(self) -> Ledger:
        """What was decided of each test."""

    @property
    def configurations(self) -> Mapping[str, ServerConfiguration]:
        """The profile's server configurations, by name; empty where the server is attached."""

    @property
    def attached(self) -> Server | None:
        """The attached server; None where the suite starts its own."""

    @property
    def pool(self) -> ServerPool | None:
        """The servers that the suite starts; None where one is attached, or none can be started."""

    @property
    def aborted(self) -> tuple[str, str] | None:
        """Why nothing more is run, as (class, text); None while all is well."""

    def server(self, configuration: str | None = None) -> Server:
        """The server of a configuration (default: the one under test), started if need be.

        Raises:
            NotRun: another configuration than the attached server's was asked for.
            StartError: it does not start.
        """

    def start(self, configuration: ServerConfiguration) -> Server:
        """The server of any configuration, the profile's or one made of an axis.

        Raises:
            NotRun: nothing is started in this run.
            StartError: it does not start.
        """

    def stop(self) -> StopReport | None:
        """Stop the server that runs; None when none does, or it is attached."""

    def managed_configuration(self, name: str) -> ServerConfiguration:
        """A configuration that the suite starts itself.

        Raises:
            NotRun: the server is attached.
        """

    def kernel_path(self, server: Server) -> KernelPath:
        """What log and metrics prove at this moment, and what was asked for."""

    def obstacle(self) -> str | None:
        """Why no server is started any more; None while all is well."""

    def crashed(self, error: ServerError, test: str | None) -> Cause:
        """After an abnormal end: a bundle, one line, and a look at what is left of the server."""

    def abort(self, reason: str) -> None:
        """The machine is about to fail: end the server at once, and run nothing more."""

    def say(self, what: str, line: str) -> None:
        """Show progress of long work at once."""

    def remark(self, line: str, *, at_once: bool = True) -> None:
        """Keep what a person should know and what decides nothing.

        Args:
            line: kept in the report.
            at_once: it is also shown now.
        """

    def redact(self, text: str) -> str:
        """Text without secrets."""

    def save(self) -> None:
        """Write verdict.json and summary.md as they stand."""
