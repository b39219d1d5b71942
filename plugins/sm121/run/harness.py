"""What a level may use of the run that it is part of: a pytest run, or a script's `Session`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from sm121.core.arguments import at_once
from sm121.core.configuration import ServerConfiguration
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.engines import requested
from sm121.engines.life import Dead, Life
from sm121.engines.managed import ServerError, StopReport
from sm121.engines.pool import ServerPool
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import KernelPath
from sm121.run.ledger import Ledger
from sm121.run.verdict_file import VerdictFile


def shown_places(harness: Harness, server: Server) -> int | None:
    """Requests that a server was asked to run at the same time: by its arguments; where it is
    attached, by its log. None where neither says."""
    if server.configuration is not None:
        return at_once(server.configuration.arguments)
    logged = requested.in_log(harness.kernel_path(server), "max_num_seqs")
    return int(logged) if logged is not None and logged.isdecimal() else None


def places(harness: Harness, server: Server) -> int | None:
    """As `shown_places`; of an attached server whose log does not say, those of the profile."""
    if (logged := shown_places(harness, server)) is not None or server.configuration is not None:
        return logged
    profile = harness.profile
    arguments = profile.configurations[profile.under_test].arguments
    return at_once((*profile.engine.arguments, *arguments))


class Observer(Protocol):
    """Watches a server under load. A crash bundle has what it saw."""

    def under_way(self) -> list[dict[str, Any]]:
        """The requests that are running now."""

    def memory_record(self) -> dict[str, Any]:
        """The samples of memory so far."""

    @property
    def metrics(self) -> str | None:
        """The server's /metrics from the last read; None before the first."""


class Harness(Protocol):
    """Servers, the report directory, and output of progress and remarks."""

    #: Set while a server is under load, else None.
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
        """The verdict file so far. Metrics, memory and remarks are written into it."""

    @property
    def ledger(self) -> Ledger:
        """The decision on each test."""

    @property
    def configurations(self) -> Mapping[str, ServerConfiguration]:
        """The profile's server configurations, by name; empty where the server is attached."""

    @property
    def attached(self) -> Server | None:
        """The attached server; None where the suite starts its own."""

    @property
    def pool(self) -> ServerPool | None:
        """The servers that the suite starts; None when one is attached, or none can be started."""

    @property
    def aborted(self) -> tuple[str, str] | None:
        """Why no further test runs, as (class, text); None while all is well."""

    def server(self, configuration: str | None = None) -> Server:
        """The server of a configuration (default: the one under test), started if need be.

        Raises:
            NotRun: another configuration than the attached server's was asked for.
            StartError: it does not start.
        """

    def start(self, configuration: ServerConfiguration) -> Server:
        """The server of any configuration: one of the profile's, or a cell's.

        Raises:
            NotRun: nothing is started in this run.
            StartError: it does not start.
        """

    def stop(self) -> StopReport | None:
        """Stop the running server; None when none runs, or when it is attached."""

    def managed_configuration(self, name: str) -> ServerConfiguration:
        """A configuration that the suite starts itself.

        Raises:
            NotRun: the server is attached.
        """

    def kernel_path(self, server: Server) -> KernelPath:
        """What log and metrics prove so far, and what was asked for."""

    def contradictions(self, server: Server) -> list[str]:
        """What of a server's path is not as the profile requires, a line each; judged again by the
        run itself until the server is closed. The server's log must be known."""

    def obstacle(self) -> str | None:
        """Why no further server is started; None while all is well."""

    def start_anew(self, configuration: ServerConfiguration) -> None:
        """Let the next `start` of a configuration be one: a server of it that runs is stopped, and
        a start that failed is tried again."""

    @property
    def life(self) -> Life | None:
        """Of the engine that serves now; None where none does."""

    def check_alive(self, *, after_failure: bool = False) -> None:
        """Look whether the suite's own server lives, within a test.

        Args:
            after_failure: a request has failed; a server that dies of it gets the time to.

        Raises:
            ServerDied: it does not. Whoever catches it reports it (`crashed`).
        """

    def crashed(self, end: ServerError | Dead, test: str | None) -> Cause:
        """After an abnormal end: write a bundle, print one line, and check what the server left."""

    def abort(self, reason: str) -> None:
        """The machine is about to fail: kill the server at once, and run no further test."""

    def say(self, what: str, line: str) -> None:
        """Show progress of long work at once."""

    def remark(self, line: str, *, at_once: bool = True) -> None:
        """Keep a remark: worth knowing, and without effect on any verdict.

        Args:
            line: the remark, kept in the report.
            at_once: also show it now.
        """

    def redact(self, text: str) -> str:
        """Text without secrets."""

    def save(self) -> None:
        """Write verdict.json and summary.md as they stand."""
