"""Each way to a PASS that is none is not green, and its clean twin is (`false_greens/`)."""

from __future__ import annotations

import catalogue_rows
import pytest
from false_greens import Place, cases

CASES = [
    pytest.param(
        case, id=f"{case.item.split()[0]}-{case.name}", marks=[pytest.mark.slow] * case.slow
    )
    for case in cases()
]


@pytest.fixture
def place(run_pytest, start_pytest, fault_server, timed_server, tmp_path, canary_bf16) -> Place:
    """Where a case happens."""
    return Place(run_pytest, start_pytest, fault_server, timed_server, tmp_path, canary_bf16)


@pytest.mark.parametrize("case", CASES)
def test_it_is_not_green_and_its_clean_twin_is(case, place):
    found, clean = case.fault(place), case.clean(place)
    catalogue_rows.keep({
        "item": case.item, "name": case.name, "green": found.green, "verdict": found.verdict,
        "said": found.said, "clean": clean.green,
    })  # fmt: skip
    assert not found.green, f"required: not green, seen: {found}"
    assert case.expected in found.said, f"required: it says {case.expected!r}, seen: {found}"
    assert clean.green, f"required: the clean twin passes, seen: {clean}"
