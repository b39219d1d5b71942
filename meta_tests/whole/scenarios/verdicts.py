"""One test for each way in which a test can end; meta_tests/unit/run/test_record.py starts it."""

import os
import signal

import pytest

from sm121.core.verdict import Inconclusive, Invalid, NotRun

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]


def test_pass(server):
    pass


def test_fail(server):
    assert server is None, f"expected nothing, got a secret {server.endpoint.api_key}"


def test_invalid():
    raise Invalid("prefix cache: expected 0 hits, got 2048")


def test_inconclusive():
    raise Inconclusive("the interval 51.4 to 52.6 contains the threshold 52")


def test_not_run():
    raise NotRun("no profiler: required --profiler-config, the engine has none")


def test_skipped():
    raise NotRun("the engine has no such endpoint")


@pytest.mark.applies_to("sm121")
def test_for_sm121_only():
    raise AssertionError("must not run here")


def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def test_never_reached():
    pass


@pytest.mark.parametrize("n", [7])
def test_parametrised(n):
    raise AssertionError(f"expected another number than {n}")
