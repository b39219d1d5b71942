"""A sample of the faults under load; all of them: `make catalogues`, docs/stress-faults.md."""

from __future__ import annotations

import pytest
import stress_faults

#: One of each way of being noticed that takes only seconds.
SAMPLE = ("corrupted-answer", "exit-0", "stuck-request", "pytest-killed")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SAMPLE)
def test_the_fault_is_noticed_classified_and_cleaned_up(name):
    outcome = stress_faults.run(stress_faults.CASES[name])
    assert not outcome.wrong, outcome
