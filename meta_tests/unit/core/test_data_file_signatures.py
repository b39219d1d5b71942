"""A mistake in the signatures of logs or failures gives one line with the expected value."""

import pytest

from meta_tests.faults.data_mistakes import assert_refused
from sm121.evidence.failure_tables import FailureSet
from sm121.evidence.signatures import SignatureSet


def signature(*, field: str = "attention", regex: str = "x", more: str = "") -> str:
    """Return a file that has one signature."""
    return f"""engine = "vllm"
[[signature]]
id = "one"
field = "{field}"
hint = ["Using"]
regex = '{regex}'
source = "here, log"
{more}
"""


def failure(*, kind: str = "oom", regex: str = "x", more: str = "") -> str:
    """Return a file that has one cause of failures."""
    return f"""[markers]
ready = ['ready']
stopped = ['stopped']
fatal = ['fatal']
quiet = ['x']
engine_process = ['core']
engine_frame = ['core']
[[failure]]
id = "one"
kind = "{kind}"
rank = 10
hint = ["x"]
regex = '{regex}'
owner = "me"
source = "here, log"
{more}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            signature(regex="(unclosed"), "one.*regular expression", id="no regular expression"
        ),
        pytest.param(
            signature(field="atention", more="value = 'y'"), "one.*field", id="no such field"
        ),
        pytest.param(signature(), "one.*exactly one of value and a group", id="no value"),
        pytest.param(
            signature(more="value = true"), "one.*takes text", id="a value of another type"
        ),
        pytest.param(
            signature(field="cuda_graphs", more="value = 'yes'"),
            "one.*takes true or false",
            id="text for a flag",
        ),
        pytest.param(
            signature(field="cuda_graphs", regex="(?P<value>x)"),
            "one.*needs mapping",
            id="a flag without a mapping",
        ),
        pytest.param(signature(more="value = 'y'\ncolour = 1"), "one.*colour", id="an unknown key"),
        pytest.param(
            signature(more="value = 'y'\nneeds = ['nothing']"),
            "one.*no signature of field fact",
            id="needs no such fact",
        ),
        pytest.param(
            signature(more="value = 'y'\nfile_required = true"),
            "one.*file_required needs file",
            id="a file required, and none named",
        ),
        pytest.param(
            signature(field="progress"), "one.*name of the phase", id="no name of the phase"
        ),
        pytest.param(
            signature(more="value = 'y'\nstrength = 99"),
            "one.*strength",
            id="a strength out of range",
        ),
    ],
)
def test_a_mistake_in_a_signature_is_one_line(text, expected):
    assert_refused(SignatureSet, text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(failure(kind="oops"), "key failure.one.*kind", id="no such kind"),
        pytest.param(
            failure(regex="(x"), "key failure.one.*regular expression", id="no regular expression"
        ),
        pytest.param(
            failure(more="summary = '{nothing}'"),
            "key failure.one.*summary may name",
            id="a summary of no such group",
        ),
        pytest.param(failure(more="colour = 1"), "key failure.one.*colour", id="an unknown key"),
    ],
)
def test_a_mistake_in_a_failure_is_one_line(text, expected):
    assert_refused(FailureSet, text, expected)
