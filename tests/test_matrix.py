"""Matrix: features work together, not only alone.

A cell has one value for each axis of the profile. Its id lists what differs from the baseline.
Every allowed pair of values is in some cell (--matrix N|full|none). In each cell the server starts,
runs what was asked for, knows the answers, and gives the same answers as the baseline, alone and
together. It is not slower than allowed. FEATURE_MATRIX.md and matrix.json have the results.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.matrix, pytest.mark.applies_to("cpu", "gpu")]


def test_every_allowed_combination_is_in_a_cell(matrix):
    """Every allowed pair of values is in a cell. The suite counts the pairs itself."""
    matrix.covered()


def test_cell(matrix, cell):
    """The cell passes, or its outcome (CRASH, FALLBACK, FAIL, SLOWER, INVALID) has reason and
    evidence."""
    matrix.judge(cell)


def test_smallest_failing_sets(matrix):
    """Every failure is narrowed down to the values that fail together and pass alone."""
    matrix.isolate()
