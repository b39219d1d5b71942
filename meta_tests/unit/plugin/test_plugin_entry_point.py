"""pytest takes a path after a space for a path of tests."""

from types import SimpleNamespace

import pytest

from sm121 import entry_point
from sm121.core import own_tests


@pytest.fixture
def config(tmp_path):
    """pytest's configuration, started in a folder with a pytest.ini that it does not read."""
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "tests").mkdir()
    return SimpleNamespace(invocation_params=SimpleNamespace(dir=tmp_path), inipath=None)


def test_the_value_of_an_option_is_refused_with_the_equals_sign(config):
    with pytest.raises(pytest.UsageError, match="expected --report-dir=tests, got a space"):
        entry_point._refuse_a_space(config, ["--report-dir", "tests"])


@pytest.mark.parametrize("words", [["--certify", "tests"], ["--slow", "tests"], ["-x", "tests"]])
def test_a_path_of_tests_behind_an_option_without_a_value_is_none(config, words):
    entry_point._refuse_a_space(config, words)


def test_sm121_run_takes_a_path_behind_a_space(config):
    """`sm121 run` accepts a path after a space, because it names its pytest.ini, so that pytest
    searches no folder for it."""
    config.inipath = own_tests.settings()
    entry_point._refuse_a_space(config, ["--report-dir", "tests"])
