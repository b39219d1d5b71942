"""xdist's scheduling by groups, with groups that the suite gives, and fixed for workers that die.

What xdist 3.8 does wrong:

- It gives a test that killed its worker to the next worker. When that one starts it before the
  crash is noted, the crash is lost.
- It hands out groups that have no test left.
- It gives work to a worker that has not collected yet, and to one that replaced a worker that died
  before the others had collected.
- A worker with a single test waits for a second one for ever.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def by_groups(config: Any, log: Any, groups: Callable[[], Mapping[str, str]]) -> Any:
    """A scheduler of xdist for the controller; ``groups``: by node id, once all have collected."""
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return str(groups().get(nodeid) or super()._split_scope(nodeid))

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            super().add_node_collection(node, collection)
            if node not in self.registered_collections:
                node.shutdown()  # it collected other tests: a file was changed

        def remove_node(self, node: Any) -> str | None:
            if self.collection is None:  # no work was given out yet: forget this worker
                self.registered_collections.pop(node, None)
            work = self.assigned_work[node]
            killer = next(
                (test for unit in work.values() for test, done in unit.items() if not done), None
            )
            if killer is not None:  # the test has its verdict already
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
            """Whether a worker would wait. It runs a test only when it knows what follows."""
            return (
                node in self.registered_collections
                and not node.shutting_down
                and self._pending_of(self.assigned_work[node]) < 2
            )

    return Scheduling(config, log)
