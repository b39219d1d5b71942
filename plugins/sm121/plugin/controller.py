"""The controller of pytest-xdist: it runs no test, and makes one report of those of its workers."""

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from sm121.core import errors, unmet
from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.plugin import stash, terminal, workers
from sm121.plugin.selection import architectures_asked_for
from sm121.report import merging
from sm121.run import directory as report_directory
from sm121.run import merge, verdict_file
from sm121.run.verdict_file import BESIDE, TestReport, VerdictFile
from sm121.session import target
from sm121.session.session import Session

#: How xdist reports a worker that ended by Ctrl-C.
_INTERRUPTED = "keyboard-interrupt"


@dataclass
class Controller:
    """The controller's state: the session, and what is known of the workers."""

    config: pytest.Config
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    session: Session | None = None
    #: Workers that died while they ran no test, each with the error.
    _died: dict[str, str] = field(default_factory=dict)
    _outputs: list[dict[str, Any]] = field(default_factory=list)
    _groups: dict[str, str] | None = None

    def opened_by_a_worker(self) -> Session | None:
        """Open the controller's session in the run that a worker has opened. Returns: None when no
        worker has a test of a level, or when the session is open already. Raises UsageError: the
        choices contradict each other."""
        settings = self.config.stash[stash.SETTINGS]
        shared = report_directory.is_shared(settings.report_dir, self.name)
        if self.session is not None or not shared:
            return None
        architectures = architectures_asked_for(self.config.getoption("markexpr", "") or "")
        chosen = target.resolve(settings, architectures)
        directory = report_directory.take(settings.report_dir, self.name)
        parts = _parts(settings.report_dir)
        if not parts:
            directory.lock.close()
            return None
        if self.config.option.dist != "loadgroup":
            raise errors.UsageError(
                f"--dist {self.config.option.dist}: expected -n N alone: what needs a server is "
                "for one worker, and a test that kills its worker is not tried again"
            )
        say = functools.partial(terminal.say, self.config)
        begun = psutil.Process().create_time()
        for earlier in (settings.report_dir / "earlier").glob("*"):
            if earlier.stat().st_ctime > begun:  # the first of these workers moved it
                say("report", f"the earlier one is kept in {earlier}")
        self.session = Session(
            settings=settings,
            target=chosen,
            directory=settings.report_dir,
            lock=directory.lock,
            file=next(iter(parts.values())).model_copy(deep=True),
            run_id=self.name,
            say=say,
            verbose=self.config.option.verbose > 0,
        )
        self.session.save()
        return self.session

    def groups(self) -> dict[str, str]:
        """The group of each node id. Tests of one group run in one worker; all workers agree."""
        if self._groups is None:
            self._groups = {}
            for folder in _folders(self.session.directory) if self.session is not None else []:
                try:
                    self._groups = workers.read_groups(folder)
                    break
                except (OSError, ValueError):
                    continue  # this worker died before it wrote them; try the next
        return self._groups

    def begun(self, nodeid: str) -> None:
        """A worker begins a test."""
        if (progress := self.config.stash.get(stash.PROGRESS, None)) is not None:
            progress.begin("", nodeid)

    def take(self, report: pytest.TestReport) -> None:
        """Take a worker's result, or xdist's report that a worker died in the middle of a test."""
        if (session := self.session) is None:
            return
        content = getattr(report, "sm121", None)
        if content is not None:
            decision = TestReport.model_validate(content)
            self._decide(session, decision)
            if (progress := self.config.stash.get(stash.PROGRESS, None)) is not None:
                progress.end(decision, name=report.nodeid)
        elif report.failed and report.when not in ("setup", "call", "teardown"):
            if (node := getattr(report, "node", None)) is not None:
                self._died.pop(node.gateway.id, None)  # the test's own failure says so
            # xdist appends the name of a group to the id.
            tests = [t for t in session.ledger if f"{report.nodeid}@".startswith(f"{t.id}@")]
            for name, level in ((test.id, test.level) for test in tests):
                why = f"the worker died: {str(report.longrepr).splitlines()[0]}"[:600]
                failed = TestReport(id=name, level=level, verdict=Verdict.FAIL, message=why)
                self._decide(session, failed)

    def _decide(self, session: Session, decision: TestReport) -> None:
        if decision.id in session.ledger:
            session.ledger.decide(decision)
            session.save()

    def worker_ended(self, node: Any, error: object | None) -> None:
        """Keep what a worker reported at its end, and whether it died.

        Args:
            node: The worker, as xdist knows it.
            error: Why it died; None where it ended by itself.

        Raises:
            pytest.UsageError: The worker refused the run; the message is the worker's.
        """
        reported = getattr(node, "workeroutput", None) or {}
        if (refusal := reported.get(workers.REFUSED)) is not None:
            raise pytest.UsageError(*refusal)
        output = reported.get("sm121")
        if error is None and self.session is not None and not (output or {}).get("closed"):
            error = "it could not end its part, see its output"
        if error not in (None, _INTERRUPTED):
            self._died[node.gateway.id] = str(error)
        if output is not None:
            self._outputs.append(output)

    def conclude(self) -> None:
        """Merge the workers' parts into one run."""
        if (session := self.session) is None:
            return
        parts = _parts(session.directory)
        folders = {f"{report_directory.WORKERS}/{name}": part for name, part in parts.items()}
        merge.merge(session.file, session.ledger, folders)
        for name, error in self._died.items():
            first = printable(session.redact((error.splitlines() or [""])[0]))[:600]
            fact = unmet.Fact("each worker ends its part", f"outside of its tests: {first}", name)
            session.ledger.decide(TestReport.of(f"{BESIDE}worker {name}", "smoke", fact))
        merging.judge_matrix(session.directory, session.ledger, folders, session.remark)
        deselected = (name for part in self._outputs for name in part["deselected"])
        session.deselected = list(dict.fromkeys(deselected))
        session.collected = {name for part in self._outputs for name in part["collected"]}
        session.inapplicable = {name for part in self._outputs for name in part["inapplicable"]}


def handed_over(session: Session, *, closed: bool) -> dict[str, Any]:
    """What a worker reports to its controller when it ends."""
    return {
        "deselected": session.deselected,
        "collected": sorted(session.collected),
        "inapplicable": sorted(session.inapplicable),
        "closed": closed,
    }


def _folders(directory: Path) -> list[Path]:
    return sorted((directory / report_directory.WORKERS).glob("*"))


def _parts(directory: Path) -> dict[str, VerdictFile]:
    parts = {}
    for folder in _folders(directory):
        try:
            parts[folder.name] = verdict_file.read(folder / "verdict.json")
        except (OSError, ValueError):
            continue  # this worker died before it wrote its file
    return parts


def by_groups(config: Any, log: Any, groups: Callable[[], Mapping[str, str]]) -> Any:
    """A scheduler of xdist for the controller; ``groups``: by node id, once all have collected.
    What xdist 3.8 does wrong: it gives a test that killed its worker to the next worker, and when
    that one starts it before the crash is noted, the crash is lost. It hands out groups that have
    no test left. It gives work to a worker that has not collected yet, and to one that replaced a
    worker that died before the others had collected. A worker with a single test waits for a second
    one for ever."""
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return str(groups().get(nodeid) or super()._split_scope(nodeid))

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            super().add_node_collection(node, collection)
            if node not in self.registered_collections:
                node.shutdown()  # it collected other tests: a file was changed

        def remove_node(self, node: Any) -> str | None:
            if self.collection is None:  # no work was given out yet: forget this worker
                self.registered_collections.pop(node, None)
            work = self.assigned_work[node]
            killer = next(
                (test for unit in work.values() for test, done in unit.items() if not done), None
            )
            if killer is not None:  # the test has its verdict already
                work[self._split_scope(killer)][killer] = True
            self.assigned_work[node] = {
                scope: unit for scope, unit in work.items() if not all(unit.values())
            }
            super().remove_node(node)
            return killer

        def _reschedule(self, node: Any) -> None:
            if node in self.registered_collections:
                super()._reschedule(node)

        def schedule(self) -> None:
            super().schedule()
            for node in self.nodes:
                while self.workqueue and self._needs_more(node):
                    self._assign_work_unit(node)
            if not self.workqueue:
                for node in self.nodes:
                    node.shutdown()

        def _needs_more(self, node: Any) -> bool:
            """Whether a worker would wait. It runs a test only when it knows what follows."""
            return (
                node in self.registered_collections
                and not node.shutting_down
                and self._pending_of(self.assigned_work[node]) < 2
            )

    return Scheduling(config, log)
