"""A run with every kind of decision, each after a moment; meta_tests/whole/test_resume.py starts
it.

Each test appends its name to the file of ``SM121_META_RAN``, so that the test knows which process
ran it.
"""

import os
import time
from pathlib import Path

import pytest

from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inconclusive, Invalid, NotRun

pytestmark = pytest.mark.applies_to("cpu", "gpu")
ENDINGS = ("pass", "pass", "fail", "pass", "invalid", "inconclusive", "not run", "pass")


def end(name: str, ending: str) -> None:
    """Record that a test ran, wait a moment, and end as requested."""
    with Path(os.environ["SM121_META_RAN"]).open("a") as ran:
        ran.write(f"{name}\n")
    time.sleep(0.05)
    if ending == "fail":
        raise Unmet(Fact("what no server does", f"it did, in {name}"))
    if ending == "invalid":
        raise Invalid("prefix cache: expected 0 hits, got 2048")
    if ending == "inconclusive":
        raise Inconclusive("the interval 51.4 to 52.6 contains the threshold 52")
    if ending == "not run":
        raise NotRun("the engine has no such endpoint")


@pytest.mark.smoke
def test_smoke(server):
    end("smoke", "pass")


@pytest.mark.kernel
@pytest.mark.parametrize("number", range(8))
def test_kernel(number):
    end(f"kernel-{number}", "pass" if number != 3 else "fail")


@pytest.mark.correctness
@pytest.mark.parametrize("number", range(8))
def test_correctness(server, number):
    end(f"correctness-{number}", ENDINGS[number])


@pytest.mark.stress
@pytest.mark.parametrize("number", range(2))
def test_stress(server, number):
    end(f"stress-{number}", "pass")
