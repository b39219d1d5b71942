"""Values of a log that are not part of the kernel path, and where they are stored."""

from typing import get_args

import pytest

from sm121.evidence import ranks
from sm121.evidence.kernel_path import PATH_FIELDS, KernelPath, give, shown
from sm121.evidence.log_start import Draft, LogStart, RankLinks
from sm121.evidence.server_state import LISTS
from sm121.evidence.signatures import SignatureField
from sm121.regression import visit_checks
from sm121.report import path_outlook
from sm121.run import engine_report

#: Fields of signatures that are not values of a start.
NO_VALUES = {"progress", "generation_rate", "accepted_length", "compiled", "fact"}
VALUES = [LISTS.get(name, name) for name in get_args(SignatureField) if name not in NO_VALUES]


@pytest.mark.parametrize("field", VALUES)
def test_a_value_is_kept_in_one_part(field):
    parts = (
        PATH_FIELDS, LogStart.model_fields, RankLinks.model_fields, Draft.model_fields,
    )  # fmt: skip
    assert sum(field in part for part in parts) == 1
    path = KernelPath()
    give(path, field, "a value")
    assert shown(path, field) == "a value"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(visit_checks.EFFECTS, id="visits of A/B"),
        pytest.param(ranks._EQUAL, id="ranks"),
        pytest.param(engine_report._OF_A_RANK, id="rows of nodes"),
        pytest.param(path_outlook._MAIN, id="missing values"),
    ],
)
def test_a_value_that_is_compared_is_known_of_a_log(fields):
    assert [shown(KernelPath(), field) for field in fields] == [None] * len(fields)


def test_facts_outside_the_path_are_not_written():
    path = KernelPath(log=LogStart(version="0.33.0"))
    assert "log" not in path.model_dump() and tuple(path.model_dump()) == PATH_FIELDS
