"""A mistake in a profile gives one line with the file and the expected value."""

import pytest

from meta_tests.faults.data_mistakes import FIXTURES, assert_refused, with_mistake
from sm121.core.profile import Profile

RIGHT = (FIXTURES / "profiles" / "cpu-tiny-gpt-oss.toml").read_text("utf-8")
#: The levels of the profile's certificate.
LEVELS = 'levels = ["smoke", "kernel", "correctness", "stress", "performance"]'


def plan(line: str) -> str:
    """Return a plan that has this line before the table which the test replaces."""
    return f'\n[plans.nightly]\npurpose = "a try"\n{line}\n\n[certify]'


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("stalled_after_s = 90", "staled_after_s = 90", r"key engine\.staled_after_s: unknown key"),
        (
            "disk_gib = 2",
            "dsk_gib = 2",
            r"key engine\.needs\.dsk_gib: unknown key; expected one of",
        ),
        ("max_abs = 1e-3", "max_abs = 0", r"log_probability_tolerance\.float32\.max_abs"),
        (
            "max_answer_tokens = 200",
            'max_answer_tokens = "x"',
            "max_answer_tokens: Input should be",
        ),
        ('under_test = "float32"', 'under_test = "f32"', "under_test: expected one of"),
        ('arch = "cpu"', 'arch = "sm12"', "arch: expected one of cpu, sm80"),
        ("schema_version = 1", "schema_version = 2", "key schema_version: Input should be 1"),
        ("[certify]", "[certify", "expected TOML"),
        ('where = "log"', 'where = "logs"', r"rules\.0\.where"),
        ('when = { configuration = "float32" }', 'when = { configuration = "flaot32" }', "flaot32"),
        (
            'when = { configuration = "float32" }',
            'when = { config = "float32" }',
            r"rules\.0\.when",
        ),
        ('must_not_see = ["Cannot', 'must_not_see = ["(Cannot', "expected a regular expression"),
        ("tolerance.float32]", "tolerance.flaot32]", "flaot32"),
        ("max_abs = 1e-3", "max_abs = inf", "max_abs"),
        ("{ value = 300,", "{ value = nan,", r"ready_within_s\.value"),
        ("{ value = 300,", "{ value = -1,", r"ready_within_s\.value"),
        ("[configurations.bfloat16]", '[configurations."../x"]', "configurations"),
        ("matrix = 1800", "", "matrix is missing"),
        pytest.param(
            LEVELS,
            "levels = []",
            r"certify\.levels: expected smoke, which proves that a server",
            id="no level",
        ),
        pytest.param(
            LEVELS,
            'levels = ["smoke"]',
            r"one level that measures or compares \(kernel, ",
            id="smoke alone",
        ),
        pytest.param(LEVELS, 'levels = ["kernel", "matrix"]', "got kernel, matrix", id="no smoke"),
        pytest.param(
            LEVELS, 'levels = ["smoke", "smoke"]', "got smoke, smoke", id="one level twice"
        ),
        pytest.param(
            LEVELS,
            'levels = ["smoke", "kernel"]',
            (
                r"certify\.levels: expected performance, too: a certificate needs a number "
                r"for each of performance\.gates \(accepted_length\); got smoke, kernel"
            ),
            id="no performance, and a gate",
        ),
        pytest.param(
            "\n[certify]",
            plan("depths = [0, 4096]"),
            r"plans.nightly.depths: expected .*\(0, 512\), got 4096",
            id="a depth that is not measured",
        ),
        pytest.param(
            "\n[certify]",
            plan("generated_tokens = [64]"),
            "plans.nightly.generated_tokens: expected .*32, 128",
            id="a length that is not measured",
        ),
        pytest.param(
            "\n[certify]",
            plan("concurrency = [3]"),
            "plans.nightly.concurrency: expected .*2, 8",
            id="a concurrency that is not measured",
        ),
        pytest.param(
            "\n[certify]", plan('levels = ["smok"]'), "plans.nightly.levels", id="no such level"
        ),
        pytest.param(
            "\n[certify]",
            plan('levels = ["smoke"]\ntests.kernel = ["test_x"]'),
            "tests.kernel: expected a level of",
            id="tests of a level that is left out",
        ),
        pytest.param(
            "\n[certify]",
            plan("rouns = 3"),
            "plans.nightly.rouns: unknown key",
            id="an unknown key of a plan",
        ),
    ],
)
def test_a_mistake_in_a_profile_is_one_line(old, new, expected):
    assert_refused(Profile, with_mistake(Profile, RIGHT, old, new), expected)
