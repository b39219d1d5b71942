"""Stand-ins of a run that events happen to, without a report directory."""

from types import SimpleNamespace
from typing import Any

from sm121.run.engine_report import EngineReport
from sm121.run.fold import Fold
from sm121.run.verdict_file import VerdictFile


def new_file(**fields: Any) -> VerdictFile:
    """The verdict file of a run of which nothing happened."""
    engine = EngineReport(name="vllm", model="m", managed=True)
    return VerdictFile(**{"arch": "cpu", "profile": "p", "started": "", "engine": engine, **fields})


def with_events(run: Any) -> Any:
    """Give a stand-in of a run `emit` and its ledger, on its ``file``."""
    if isinstance(run.file, SimpleNamespace) and not hasattr(run.file, "tests"):
        run.file.tests = []
    folded = Fold(run.file)
    run.emit = folded.apply
    run.ledger = folded.ledger
    return run
