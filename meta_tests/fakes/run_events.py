"""Replacements for a run in unit tests: they receive events, and write no report directory."""

from types import SimpleNamespace
from typing import Any

from sm121.run.configurations import Configurations
from sm121.run.engine_report import EngineReport
from sm121.run.fold import Fold
from sm121.run.log_errors import LogErrors
from sm121.run.paths import KernelPaths
from sm121.run.record import RunRecord
from sm121.run.run import Run
from sm121.run.servers import Servers
from sm121.run.verdict_file import VerdictFile


def new_file(**fields: Any) -> VerdictFile:
    """Return the verdict file of a run without events."""
    engine = EngineReport(name="vllm", model="m", managed=True)
    return VerdictFile(**{"arch": "cpu", "profile": "p", "started": "", "engine": engine, **fields})


def stand_in(**members: Any) -> Any:
    """Return a replacement for a run.

    Each member is set on the part of `Run` that has a field of this name."""
    run = SimpleNamespace(**{part: SimpleNamespace() for part in _PARTS})
    run.servers.crashed = 0
    give(run, **members)
    return run


def give(run: Any, **members: Any) -> None:
    """Set members of a replaced run, each on the part of `Run` that has a field of this name."""
    for name, member in members.items():
        owner = run
        for part, names in _PARTS.items():
            if name in names - _OWN:
                owner = getattr(run, part)
        setattr(owner, name, member)


def with_events(run: Any) -> Any:
    """Add `emit` and a ledger for its ``file`` to a replaced run."""
    record = run.record
    if isinstance(record.file, SimpleNamespace) and not hasattr(record.file, "tests"):
        record.file.tests = []
    folded = Fold(record.file)
    record.emit = folded.apply
    record.ledger = folded.ledger
    record.cells = folded.cells
    record.references = folded.references
    return run


def _names(kind: type) -> frozenset[str]:
    return frozenset(vars(kind)) | frozenset(kind.__annotations__)


_OWN = frozenset(Run.__annotations__) | {"profile", "server"}
_PARTS = {
    "record": _names(RunRecord),
    "configurations": _names(Configurations),
    "servers": _names(Servers),
    "paths": _names(KernelPaths),
    "log_errors": _names(LogErrors),
}
