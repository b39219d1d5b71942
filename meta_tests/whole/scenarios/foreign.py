"""A test of no level that fails, beside the suite's own."""


def test_of_no_level():
    raise AssertionError("not a test of a level")
