"""Judges the errors that the log of a running server reports."""

from dataclasses import dataclass, field
from pathlib import Path

from sm121.engines.life import Dead
from sm121.evidence.silent_errors import ErrorReader
from sm121.run import server_decisions
from sm121.run.record import RunRecord
from sm121.run.servers import Servers


@dataclass(kw_only=True)
class LogErrors:
    """The errors in the servers' logs. Each error is judged once."""

    record: RunRecord
    servers: Servers
    _readers: dict[Path, ErrorReader] = field(init=False, default_factory=dict)

    def judge(self) -> None:
        """Judge the errors that the running server has logged since the last call.

        An error that killed no process is FAIL or INCONCLUSIVE. Three kinds of errors do not
        count: errors before the run, errors during a stop, and errors of a server that ended
        (these are in its crash bundle).
        """
        self.servers.follow_log()
        server = self.servers.attached
        running = self.servers.pool.current if self.servers.pool is not None else None
        if running is not None and running.running:
            server = self.servers.last(running.configuration.name)
        life = self.servers.life
        if server is None or life is None or life.accounted:
            return
        for log, name in server.logs.items():
            if log not in self._readers:
                self._readers[log] = server_decisions.error_reader(server, log)
            errors = self._readers[log].read(log)
            if errors and not isinstance(life.state(), Dead):
                server_decisions.decide_logged_errors(self.record, errors, name)
