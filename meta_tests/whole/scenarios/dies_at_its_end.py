"""A plugin for pytest: the first worker dies while it ends, after its last test."""

import os
import signal

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if getattr(session.config, "workerinput", {}).get("workerid") == "gw0":
        from sm121.session.session import Session  # imported after pytest's rewriting of assertions

        Session.close = end


def end(_run):
    """While the worker stops its server, end it with the method that `SM121_META_ENDS_BY` names."""
    how = os.environ["SM121_META_ENDS_BY"]
    if how == "an exception":
        raise PermissionError("a process of another user")
    os.kill(os.getpid(), getattr(signal, how))
