"""Suspend a test's timeout (pytest-timeout), for example while a server starts."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class _Limit:
    item: pytest.Item
    #: The settings object of pytest-timeout.
    settings: Any


class Timer:
    """Tracks the active timeout by the hooks of pytest-timeout."""

    def __init__(self) -> None:
        self._limit: _Limit | None = None

    @pytest.hookimpl(optionalhook=True, tryfirst=True)  # pytest-timeout's own hook ends the call
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """Record a timeout that begins."""
        self._limit = _Limit(item, settings)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> None:
        """Record that the timeout was cancelled."""
        del item
        self._limit = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspend the timeout during the block. Afterwards, the test has its full timeout again."""
        limit = self._limit
        if limit is None:
            yield
            return
        hook = limit.item.ihook
        hook.pytest_timeout_cancel_timer(item=limit.item)
        try:
            yield
        finally:
            hook.pytest_timeout_set_timer(item=limit.item, settings=limit.settings)
