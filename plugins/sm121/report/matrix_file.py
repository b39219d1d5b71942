"""What the report shows of matrix.json."""

from __future__ import annotations

from sm121.matrix.feature_matrix import MatrixFile
from sm121.matrix.outcome import CellRecord

NAME = "matrix/matrix.json"


def coverage(file: MatrixFile) -> list[tuple[str, str]]:
    """What was covered: headings and their figures."""
    found = [
        ("axes", file.axes),
        ("engine", " ".join(filter(None, (file.engine, file.version)))),
        ("strength", str(file.strength)),
        ("all combinations", str(file.product)),
    ]
    found += [
        (f"combinations of {one.strength}",
         f"{one.ran} ran of {one.allowed}, {one.covered} planned")
        for one in file.coverage
    ]  # fmt: skip
    counted = {
        "cells not run yet": file.not_run,
        "known not to go together": file.incompatible,
        "values that this engine does not have": file.absent,
        "cells left out": file.left_out,
    }
    found += [(what, str(len(listed))) for what, listed in counted.items() if listed]
    if file.predicted is not None:
        found.append(("predicted", file.predicted))
    return found


def facts(record: CellRecord) -> dict[str, str]:
    """What is known of a cell beside its outcome and reason: class of the failure, time, rate."""
    known = {"class": record.kind} if record.kind is not None else {}
    known["took"] = f"{record.took_s:.0f} s"
    if record.rate is not None and record.rate.value is not None:
        against = f" ({record.rate.ratio:.0%} of the baseline)" if record.rate.ratio else ""
        known[record.rate.metric] = f"{record.rate.value:.4g}{against}"
    if record.isolating:
        known["run"] = "to find the smallest set"
    return known
