"""Two kernel tests; the second one ends the process when it is told to."""

import os
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.applies_to("cpu")]


def note(name: str) -> None:
    with Path(os.environ["NOTES"]).open("a") as stream:
        stream.write(f"{name}\n")


@pytest.mark.parametrize("wrong", [False, True])
def test_first(wrong):
    note("first")
    assert not wrong, "required: right, seen: wrong"


@pytest.fixture
def server():
    """In the place of the suite's: whoever uses it says something of a running server."""


@pytest.mark.never_waived("the kernel path")
def test_path():
    note("path")


def test_on_a_server(server):
    note("server")


def test_second():
    note("second")
    if os.environ.get("END"):
        os.kill(os.getpid(), signal.SIGKILL)
