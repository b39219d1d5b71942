"""The processes of an attached server that are visible on this machine."""

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import psutil

from sm121.engines import listeners, process_tree

#: The suite reads the connections of the listening process while that process sends answers of
#: these lengths, in tokens.
_ANSWER_TOKENS = (16, 64, 256)
#: If the connections were read this many times during one answer, no longer answer is requested.
_ENOUGH_READINGS = 10


class AttachedProcesses:
    """The processes of an attached server.

    They are the processes that hold the listening socket, and all descendants of these processes,
    for example vLLM's engine core. Processes behind a proxy, in a container, or of another user are
    not found.

    Args:
        base_url: The address of the server.
    """

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        #: The address of the server behind the listener; None if no proxy was found.
        self.upstream: str | None = None
        self._listeners: list[psutil.Process] = []

    @functools.cached_property
    def here(self) -> bool:
        """Whether the server listens on this machine."""
        return listeners.is_here(self.host)

    def listening(self, *, again: bool = False) -> list[psutil.Process]:
        """Return the processes that listen on the server's port; empty if they are not visible.

        Args:
            again: Whether to search again although all processes found before still live.
        """
        ended = not self._listeners or any(map(process_tree.has_ended, self._listeners))
        if self.here and (again or ended):
            self._listeners = listeners.listeners(self.host, self.port)
        return self._listeners

    def find(self) -> list[psutil.Process]:
        """Return the server's living processes; empty if they are not visible."""
        return [] if self.upstream is not None else self._tree()

    def large(self, share: float) -> set[psutil.Process]:
        """Return the server's processes that hold at least a given share of its resident memory.

        The result is empty if the server runs inside this process, because other children of this
        process do not belong to the server.

        Args:
            share: The minimum share, between 0 and 1.
        """
        sizes: dict[psutil.Process, int] = {}
        for process in self.find():
            with contextlib.suppress(psutil.Error):
                sizes[process] = process.memory_info().rss
        if any(process.pid == os.getpid() for process in sizes):
            return set()
        least = share * sum(sizes.values())
        return {process for process, size in sizes.items() if size >= least}

    def look_behind(self, ask: Callable[[int], object]) -> None:
        """Set `upstream` if the listener has a connection to another server while it answers.

        Args:
            ask: A function that requests an answer of the given number of tokens. It is called
                again with more tokens if the answer was too short to read the connections often
                enough.
        """
        tree = self._tree()
        for tokens in _ANSWER_TOKENS:
            readings = 0
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(ask, tokens)
                while self.upstream is None and not answer.done():
                    self.upstream = listeners.find_upstream(tree, self.port)
                    readings += 1
            if self.upstream is not None or readings >= _ENOUGH_READINGS:
                return

    @staticmethod
    def below(process: psutil.Process) -> list[psutil.Process]:
        """Return all descendants of a process; empty if the process has ended.

        Args:
            process: The process.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.children(recursive=True)
        return []

    def _tree(self) -> list[psutil.Process]:
        processes: dict[psutil.Process, None] = {}
        for process in self.listening():
            processes[process] = None
            processes.update(dict.fromkeys(self.below(process)))
        return list(processes)
