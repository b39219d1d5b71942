"""A run as its levels use it. It is pytest's, or of the `Session` of a script."""

from dataclasses import dataclass

from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.run.configurations import Configurations
from sm121.run.log_errors import LogErrors
from sm121.run.paths import KernelPaths
from sm121.run.record import RunRecord, Target
from sm121.run.servers import Servers


@dataclass(kw_only=True)
class Run:
    """The parts of a run, each with its own task."""

    target: Target
    #: Its events, and the verdict file that they make.
    record: RunRecord
    #: The profile's server configurations.
    configurations: Configurations
    #: The server that lives now, and those before it.
    servers: Servers
    #: Their kernel paths, and whether these are the profile's.
    paths: KernelPaths
    #: The errors of their logs.
    log_errors: LogErrors

    @classmethod
    def of(cls, target: Target, record: RunRecord, attached: Server | None = None) -> "Run":
        """Put the parts of a run together.

        Args:
            target: What it judges.
            record: What it writes.
            attached: The attached server; None if the suite starts servers, or there is none.
        """
        configurations = Configurations(target=target, record=record)
        servers = Servers(
            target=target, record=record, configurations=configurations, attached=attached
        )
        return cls(
            target=target,
            record=record,
            configurations=configurations,
            servers=servers,
            paths=KernelPaths(
                target=target, record=record, configurations=configurations, servers=servers
            ),
            log_errors=LogErrors(record=record, servers=servers),
        )

    @property
    def profile(self) -> Profile:
        """The profile in force; NotRun if the target cannot be judged here."""
        return self.target.require_profile()

    def server(self, configuration: str | None = None) -> Server:
        """Return the server of a configuration, and show the path of the one under test.

        Args:
            configuration: Its name; None for the one under test.

        Raises:
            NotRun: It is not the attached server's, or cannot be started here.
            StartError: It does not start.
        """
        server = self.servers.get(configuration)
        if configuration in (None, self.profile.under_test):
            self.paths.describe(server)
        return server
