"""The time limit that pytest-timeout sets for a test: it does not run while a server starts."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class _Limit:
    item: pytest.Item
    #: pytest-timeout's own.
    settings: Any


class Timer:
    """Knows the time limit that runs, by the hooks of pytest-timeout."""

    def __init__(self) -> None:
        self._limit: _Limit | None = None

    @pytest.hookimpl(optionalhook=True, tryfirst=True)  # pytest-timeout's own ends the call
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """Note a limit that begins."""
        self._limit = _Limit(item, settings)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> None:
        """Note its end."""
        del item
        self._limit = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the limit while the block lasts. The test has its whole time after it."""
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
