"""The matrix of a run of several workers: each has the cells that it ran, and only together do they
say which values fail."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.verdict import Verdict
from sm121.matrix import report
from sm121.plugin.run import Run
from sm121.run.directory import WORKERS

_FOLDER = "matrix"
#: The test that is about all cells, which no worker has.
_ABOUT_ALL = "::test_smallest_failing_sets"


def conclude(run: Run, names: Iterable[str]) -> None:
    """Write ``matrix/`` of the whole run, and judge the smallest failing sets by all cells.

    Nothing is started for it: a set that was not seen alone is said to be not isolated.

    Args:
        run: the controller's.
        names: of the workers.
    """
    parts = []
    for name in names:
        file = run.directory / WORKERS / name / _FOLDER / "matrix.json"
        if file.is_file():
            try:
                parts.append(_of_the_whole(json.loads(file.read_text("utf-8")), name))
            except (OSError, ValueError, KeyError, TypeError) as error:
                run.remark(f"the matrix of worker {name} cannot be read: {type(error).__name__}")
    if not parts:
        return
    try:
        space, whole = report.merged(parts)
    except (UsageError, ValueError) as error:
        run.remark(f"the matrices of the workers make no whole: {error}")
        return
    folder = run.directory / _FOLDER
    folder.mkdir(exist_ok=True)
    text = json.dumps(report.as_json(space, whole), indent=2, ensure_ascii=False)
    write_text(text + "\n", folder / "matrix.json")
    write_text(report.markdown(space, whole), folder / "FEATURE_MATRIX.md")
    sets = "; ".join(one.text for one in whole.failing_sets)
    for test in [test for test in run.ledger if test.id.endswith(_ABOUT_ALL)]:
        run.ledger.decide(
            test.model_copy(
                update={
                    "verdict": Verdict.FAIL if sets else Verdict.PASS,
                    "message": f"{sets}. All of it: {folder / 'FEATURE_MATRIX.md'}" if sets else "",
                    "skipped": False,
                }
            )
        )


def _of_the_whole(matrix: dict[str, Any], name: str) -> dict[str, Any]:
    """A worker's matrix with its files as they are seen from the report directory."""

    def seen(file: str | None) -> str | None:
        return None if file is None else str(Path(WORKERS) / name / file)

    cells = [{**c, "log": seen(c["log"]), "bundle": seen(c["bundle"])} for c in matrix["cells"]]
    return {**matrix, "cells": cells}
