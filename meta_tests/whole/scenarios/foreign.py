"""A failing test of no level, beside the suite's own tests."""


def test_of_no_level():
    raise AssertionError("not a test of a level")
