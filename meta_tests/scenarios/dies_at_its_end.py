"""A plugin for pytest: the first worker is killed when it has no test left."""

import os
import signal

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if getattr(session.config, "workerinput", {}).get("workerid") == "gw0":
        os.kill(os.getpid(), signal.SIGKILL)
