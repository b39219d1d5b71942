"""Each way to a PASS that is none is not green, and its clean twin is (`false_greens/`)."""

import catalogue_rows
import pytest
from data_rows import table
from false_greens import Case, Kit, cases

#: Some seconds each, and another case of the same item stays.
LONG = table(__name__, "LONG")


def _case(case: Case) -> object:
    slow = case.slow or case.name in LONG
    name = f"{case.item.split()[0]}-{case.name}"
    return pytest.param(case, id=name, marks=[pytest.mark.slow] * slow)


CASES = [_case(case) for case in cases()]


@pytest.fixture
def kit(run_pytest, start_pytest, fault_server, timed_server, tmp_path, canary_bf16) -> Kit:
    """Where a case happens."""
    return Kit(run_pytest, start_pytest, fault_server, timed_server, tmp_path, canary_bf16)


@pytest.mark.parametrize("case", CASES)
def test_it_is_not_green_and_its_clean_twin_is(case, kit):
    fault, clean = case.fault(kit), case.clean(kit)
    catalogue_rows.keep({
        "item": case.item, "name": case.name, "green": fault.green, "verdict": fault.verdict,
        "said": fault.text, "clean": clean.green,
    })  # fmt: skip
    assert not fault.green, f"required: not green, seen: {fault}"
    assert case.expected in fault.text, f"required: it says {case.expected!r}, seen: {fault}"
    assert clean.green, f"required: the clean twin passes, seen: {clean}"
