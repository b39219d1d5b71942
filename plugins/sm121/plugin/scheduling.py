"""xdist's scheduling by groups, for groups that are given, and for workers that die.

xdist 3.8 gives a test that killed its worker to the next one (and where that one takes it before
the crash is noted, the crash is forgotten); it hands out groups of which nothing is left, and work
to a worker that has not collected yet, or in the place of one that died before the others had; and
a worker with a single test waits for the next for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def by_groups(config: Any, log: Any, groups: Callable[[], Mapping[str, str]]) -> Any:
    """A scheduler of xdist.

    Args:
        config: pytest's, of the controller.
        groups: called once all workers have collected: the group of a node id, where it has one.
    """
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return str(groups().get(nodeid) or super()._split_scope(nodeid))

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            super().add_node_collection(node, collection)
            if node not in self.registered_collections:
                node.shutdown()  # it has collected something else: a file has changed meanwhile

        def remove_node(self, node: Any) -> str | None:
            if self.collection is None:  # nothing was handed out yet: it is not counted any more
                self.registered_collections.pop(node, None)
            work = self.assigned_work[node]
            killer = next(
                (test for unit in work.values() for test, done in unit.items() if not done), None
            )
            if killer is not None:  # it has its verdict
                work[self._split_scope(killer)][killer] = True
            self.assigned_work[node] = {
                scope: unit for scope, unit in work.items() if not all(unit.values())
            }
            super().remove_node(node)
            return killer

        def _reschedule(self, node: Any) -> None:
            if node in self.registered_collections:
                super()._reschedule(node)

        def schedule(self) -> None:
            super().schedule()
            for node in self.nodes:
                while self.workqueue and self._needs_more(node):
                    self._assign_work_unit(node)
            if not self.workqueue:
                for node in self.nodes:
                    node.shutdown()

        def _needs_more(self, node: Any) -> bool:
            """Whether a worker would wait: it runs a test when it knows the next, or its end."""
            return (
                node in self.registered_collections
                and not node.shutting_down
                and self._pending_of(self.assigned_work[node]) < 2
            )

    return Scheduling(config, log)
