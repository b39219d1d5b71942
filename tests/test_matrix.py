"""Matrix: features work in combination, not only alone.

A cell has one value for each axis of the profile. Its id lists the values that differ from the
baseline. Each allowed pair of values is in at least one cell (--matrix N|full|none). In each cell
the server starts on the requested kernels, gives the known answers, and gives the same answers as
the baseline, alone and in a batch. Its rate may be lower only by the allowed amount.
FEATURE_MATRIX.md and matrix.json contain the results.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.matrix, pytest.mark.applies_to("cpu", "gpu")]


def test_every_allowed_combination_is_in_a_cell(matrix):
    """Each allowed pair of values is in at least one cell. This test counts the pairs from the
    cells, independently of the package that chose the cells."""
    matrix.covered()


def test_cell(matrix, cell):
    """The cell passes. Any other outcome (CRASH, FALLBACK, FAIL, SLOWER, INVALID) has a reason and
    evidence."""
    matrix.judge(cell)


def test_smallest_failing_sets(matrix):
    """For each failure, the suite finds the smallest set of values that fail together and pass
    alone."""
    matrix.isolate()
