"""A failing test of no level, and the suite's own tests."""


def test_of_no_level():
    raise AssertionError("not a test of a level")
