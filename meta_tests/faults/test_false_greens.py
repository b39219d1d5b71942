"""No false-green scenario is green, and each scenario without its fault is green
(`false_greens/`)."""

import pytest

from meta_tests.faults import catalogue_rows
from meta_tests.faults.false_greens import Case, Kit, cases

#: Cases that take some seconds each. `make test` leaves them out, and runs another case of the same
#: item.
LONG = (
    "--depths 0",
    "-o python_functions=test_health",
    "SIGSEGV after a test of the smoke level; a later test gets a fresh server",
    "SIGSEGV after the last look of a script",
    "a fallback after the log was cut",
    "a fallback is logged after the path was judged",
    "a stream that is faster than the engine from its first token to its last",
    ("after a fork the answer of another request, and no prompt ids to ask again from"),
    "an ERROR that nobody knows",
    "another answer to whoever ignores the end of a text",
    "an Eagle3 drafter that never drafts",
    "an MTP drafter that never drafts",
    "one behind a worker's end",
    "two streams one after another",
    "an illegal memory access that is survived",
    "between two rounds of a measurement, where its metrics are withheld",
    "log-probabilities drift with each token that is decoded",
    "two servers write into one log",
)
#: If all cases of an item take seconds, `make test` runs this one.
ONE_OF_ITS_ITEM = (
    "a log of another version, which grows with our requests",
    "counters of drafts that are there after the first request alone",
    "it crashes while it is stopped",
    "one more is accepted in each step by the counters",
    "other attention, which its answers name, behind a proxy without metrics",
    "the untimed twin fails",
    "three events when the third token is there",
)


def _is_slow(case: Case) -> bool:
    return (case.slow or case.name in LONG) and case.name not in ONE_OF_ITS_ITEM


def _case(case: Case) -> object:
    slow = _is_slow(case)
    name = f"{case.module}-{case.item.split()[0]}-{case.name}"
    return pytest.param(case, id=name, marks=[pytest.mark.slow] * slow)


CASES = [_case(case) for case in cases()]


@pytest.fixture
def kit(run_pytest, start_pytest, fault_server, timed_server, tmp_path, canary_bf16) -> Kit:
    """Return the fixtures that a case may use."""
    return Kit(run_pytest, start_pytest, fault_server, timed_server, tmp_path, canary_bf16)


def test_each_mechanism_has_a_case_in_make_test():
    assert {case.item for case in cases() if not _is_slow(case)} == {case.item for case in cases()}


@pytest.mark.parametrize("case", CASES)
def test_it_is_not_green_and_its_clean_twin_is(case, kit):
    fault = case.fault(kit)
    clean = case.clean(kit)
    catalogue_rows.keep({
        "item": case.item, "name": case.name, "green": fault.green, "verdict": fault.verdict,
        "said": fault.text, "clean": clean.green,
    })  # fmt: skip
    assert not fault.green, f"expected a run that is not green, got {fault}"
    assert case.expected in fault.text, f"expected {case.expected!r} in the text, got {fault}"
    assert clean.green, f"expected a green clean twin, got {clean}"
