"""While the baseline's server starts, what needs none is done: numerics, compiling for GB10.

Nothing runs beside what is timed: the start of the server under test and each test that measures
wait until it is done (`Session.nothing_beside`). On a GPU the numerics wait for their level: vLLM
sizes its KV cache by the memory that is free while it starts.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sm121.compilation import gb10
from sm121.core import architecture
from sm121.core.profile_fields import LEVELS
from sm121.core.verdict import NotRun, Verdict
from sm121.plugin import kernels, selection
from sm121.session.session import Session
from sm121.session.signals import own_time


@contextlib.contextmanager
def begun(tests: pytest.Session, session: Session | None) -> Iterator[None]:
    """Begin with what the chosen tests will ask for, one after the other, in the background."""
    if session is None or session.pool is None or session.settings.worker is not None:
        yield
        return
    tests_to_run = [
        item
        for item in tests.items
        if isinstance(item, pytest.Function) and selection.WHY_NOT not in item.stash
    ]
    worker = ThreadPoolExecutor(1, "meanwhile")
    with contextlib.ExitStack() as folders:
        with contextlib.suppress(NotRun):  # each of the tests says so
            _begin_numerics(tests_to_run, session, worker)
        with contextlib.suppress(NotRun):
            _begin_compiling(tests_to_run, session, worker, folders)

        def done() -> None:
            # Where the smoke level has failed, no other level runs.
            ended = any(t.level == LEVELS[0] and t.counted is Verdict.FAIL for t in session.ledger)
            with own_time():
                worker.shutdown(cancel_futures=ended)

        session.nothing_beside = done
        try:
            yield
        finally:
            worker.shutdown(wait=False, cancel_futures=True)
            kernels.end_processes(tests.config)  # what is being judged ends with its process
            worker.shutdown()


def _begin_numerics(
    asked: Iterable[pytest.Function], session: Session, worker: ThreadPoolExecutor
) -> None:
    using = [item for item in asked if item.get_closest_marker("kernel_cases") is not None]
    if using and session.arch == architecture.CPU:
        numerics = kernels.expected(using[0].config, session)
        using[0].config.stash[kernels.NUMERICS] = numerics
        numerics.begin(_parameters(using, "case"), worker)


def _begin_compiling(
    asked: Iterable[pytest.Function],
    session: Session,
    worker: ThreadPoolExecutor,
    folders: contextlib.ExitStack,
) -> None:
    using = [
        item
        for item in asked
        if "compilation" in item.fixturenames and "probe" in item.fixturenames
    ]
    if using:
        folder = folders.enter_context(tempfile.TemporaryDirectory(prefix="sm121-compilation-"))
        compilation = gb10.find(session.engine_interpreter, Path(folder))
        using[0].config.stash[kernels.COMPILATION] = compilation
        compilation.begin(_parameters(using, "probe"), worker)


def _parameters(items: Iterable[pytest.Function], name: str) -> list[Any]:
    return [item.callspec.params[name] for item in items]
