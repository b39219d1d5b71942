"""One report of the parts that several workers of one run have written."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sm121.run.directory import WORKERS
from sm121.run.ledger import Ledger
from sm121.run.verdict_file import BESIDE, BoxReport, VerdictFile


def merge(whole: VerdictFile, ledger: Ledger, parts: Mapping[str, VerdictFile]) -> None:
    """Take into the whole what only the workers know: their engines, starts, metrics, crashes.

    The tests of the whole stand; those beside them (``end of the run::...``) are added.
    """
    for name, part in parts.items():
        prefix = f"{WORKERS}/{name}"
        if part.engine.base_url is not None and whole.engine.base_url is None:
            whole.engine = part.engine
        whole.metrics.update(part.metrics)
        moved = prefixed(part, prefix)
        whole.starts += moved.starts
        whole.crashes += moved.crashes
        whole.memory = moved.memory or whole.memory
        whole.box = _worse(whole.box, part.box)
        for line in part.unproven:
            if line not in whole.unproven:
                whole.unproven.append(line)
        for line in part.remarks:
            if line not in whole.remarks:
                whole.remarks.append(line)
        used = part.environment.get("resources") or {}
        if used.get("samples"):
            whole.environment["resources"] = used
        for test in part.tests:
            if test.id.startswith(BESIDE):
                ledger.decide(test)


def prefixed(part: VerdictFile, prefix: str) -> VerdictFile:
    """A copy whose files are named as they are seen from a report directory in which the part's
    own is ``prefix``."""
    moved = part.model_copy(deep=True)
    for start in moved.starts:
        start.log = f"{prefix}/{start.log}"
    for crash in moved.crashes:
        crash.bundle = f"{prefix}/{crash.bundle}" if crash.bundle else None
    if moved.memory is not None:
        moved.memory.file = f"{prefix}/{moved.memory.file}"
    return moved


def plain_id(nodeid: str, known: Collection[str]) -> str:
    """A node id without the name of the group that xdist appends."""
    if nodeid in known:
        return nodeid
    return next((name for name in known if nodeid.startswith(f"{name}@")), nodeid)


def _worse(one: BoxReport, other: BoxReport) -> BoxReport:
    order = ("DEGRADED", "QUALIFIED", "UNKNOWN")
    return min(one, other, key=lambda box: order.index(box.state) if box.state in order else 3)
