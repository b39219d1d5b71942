"""Each way to a PASS that is none is not green, and its clean twin is (`false_greens/`)."""

import catalogue_rows
import pytest
from false_greens import Case, Place, cases

#: Some seconds each, and another case of the same item stays.
LONG = {
    "--depths 0", "SIGSEGV after the last look of a script", "it crashes while it is stopped",
    "an ERROR that nobody knows", "two servers write into one log",
    "three events when the third token is there",
    "a stream that is faster than the engine from its first token to its last",
    "a log of another version, which grows with our requests",
    "other attention, which its answers name, behind a proxy without metrics",
    "counters of drafts that are there after the first request alone",
    "between two rounds of a measurement, where its metrics are withheld",
    "an Eagle3 drafter that never drafts", "an MTP drafter that never drafts",
    "SIGSEGV after a test of the smoke level; a later test gets a fresh server",
    "an illegal memory access that is survived", "a fallback after the log was cut",
    "a fallback is logged after the path was judged", "-o python_functions=test_health",
    "log-probabilities drift with each token that is decoded", "the text of another request",
    "the ids and the text of another request",
    "after a fork the answer of another request, and no prompt ids to ask again from",
}  # fmt: skip


def _case(case: Case) -> object:
    slow = case.slow or case.name in LONG
    name = f"{case.item.split()[0]}-{case.name}"
    return pytest.param(case, id=name, marks=[pytest.mark.slow] * slow)


CASES = [_case(case) for case in cases()]


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
