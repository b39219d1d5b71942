"""Matrix: features work together, not each alone only.

A cell is a value for each axis of the profile, and its id is what differs from the baseline. Every
allowed pair of values is in some cell (--matrix N|full|none). In each cell the server starts, runs
what was asked for, knows its answers, gives the baseline's, alone and together, and is not slower
than it may be. FEATURE_MATRIX.md and matrix.json in the report say what became of each.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.matrix, pytest.mark.applies_to("cpu", "gpu")]


def test_every_allowed_combination_is_in_a_cell(matrix):
    """All pairs of values that may go together, by a count of their own."""
    matrix.covered()


def test_cell(matrix, cell):
    """PASS, else the outcome (CRASH, FALLBACK, FAIL, SLOWER, INVALID) with reason and evidence."""
    matrix.judge(cell)


def test_smallest_failing_sets(matrix):
    """What fails is named down to the values that fail together, each of which passes alone."""
    matrix.isolate()
