"""A run, as the tests of the levels use it, under pytest or in a script's `Session`."""

from dataclasses import dataclass

from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.run.configurations import Configurations
from sm121.run.log_errors import LogErrors
from sm121.run.paths import KernelPaths
from sm121.run.record import RunRecord, Target
from sm121.run.servers import CrashReports, NoCrashReports, Servers


@dataclass(kw_only=True)
class Run:
    """A run. Each of its parts has one task."""

    target: Target
    #: The events and the verdict file.
    record: RunRecord
    #: The profile's server configurations.
    configurations: Configurations
    #: The running server, and the servers before it.
    servers: Servers
    #: The servers' kernel paths, compared with the profile.
    paths: KernelPaths
    #: The errors in the servers' logs.
    log_errors: LogErrors

    @classmethod
    def of(
        cls,
        target: Target,
        record: RunRecord,
        attached: Server | None = None,
        crashes: CrashReports | None = None,
    ) -> "Run":
        """Create a run with its parts.

        Args:
            target: The architecture, profile and engine to judge.
            record: The record of the run.
            attached: The attached server; None if the suite starts servers itself.
            crashes: Reports abnormal ends of servers; None: no object reports them.
        """
        configurations = Configurations(target=target, record=record)
        servers = Servers(
            target=target,
            record=record,
            configurations=configurations,
            attached=attached,
            crashes=crashes or NoCrashReports(),
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
        """The profile of the run; raises NotRun if this machine cannot judge the target."""
        return self.target.require_profile()

    def server(self, configuration: str | None = None) -> Server:
        """Return the server of a configuration. If it is under test, report its kernel path.

        Args:
            configuration: The name of the configuration; None: the configuration under test.

        Raises:
            NotRun: The attached server has another configuration, or this one cannot start here.
            StartError: The server did not start.
        """
        server = self.servers.get(configuration)
        if configuration in (None, self.profile.under_test):
            self.paths.describe(server)
        return server
