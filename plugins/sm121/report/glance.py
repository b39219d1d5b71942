"""What ``sm121 path`` and ``sm121 box`` print for people: one row for each question."""

from collections.abc import Collection, Iterable

from sm121.core import templates
from sm121.core.level_settings import Box
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import KernelPath
from sm121.measure.box import Judgement, Reading
from sm121.run.engine_report import NodeReport

Rows = list[tuple[str, str]]


def table(rows: Rows) -> str:
    """Rows of a name and a text, in two columns."""
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:{width}}  {text}\n" for name, text in rows)


def of_path(
    path: KernelPath,
    contradictions: Collection[str] = (),
    cause: Cause | None = None,
    nodes: Iterable[NodeReport] = (),
    unequal: Iterable[str] = (),
) -> Rows:
    """What runs, beside what was requested. `contradictions`: between the log and the kernels of a
    trace; `cause`: of the failure that the log shows, if it shows one; `nodes`: each rank of a
    server that spans machines; `unequal`: each difference or gap between these."""
    values = {"path": path, "contradictions": contradictions, "cause": cause}
    return _rows("path.txt.j2", **values, nodes=nodes, unequal=unequal)


def of_box(reference: Box | None, reading: Reading, judgement: Judgement) -> Rows:
    """What the machine does now, beside the least that the profile requires, and the verdict."""
    return _rows("box.txt.j2", reference=reference, reading=reading, judgement=judgement)


def _rows(template: str, **values: object) -> Rows:
    lines = templates.rendered(template, templates.one_line, **values).splitlines()
    return [(name, text) for name, _, text in (line.partition("\t") for line in lines)]
