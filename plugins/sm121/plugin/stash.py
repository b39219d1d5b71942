"""The plugin's keys in the stashes of pytest's configuration and items."""

import pytest

from sm121.plugin.progress import Progress
from sm121.report.stored import StoredReport
from sm121.run import shard_report, verdict_file
from sm121.session import session, settings, signals

# The keys of the configuration's stash begin here.
SETTINGS = pytest.StashKey[settings.Settings]()
#: The run, from the end of the collection on; absent if no test of a level was collected.
SESSION = pytest.StashKey[session.Session]()
SIGNALS = pytest.StashKey[signals.Signals]()
REPORT = pytest.StashKey[StoredReport]()
SHARD = pytest.StashKey[shard_report.ShardReport]()
PROGRESS = pytest.StashKey[Progress]()

# The keys of an item's stash begin here.
LEVEL = pytest.StashKey[str]()
#: The test's id in reports. Before pytest 9.2, xdist appends a group's name to the node id.
ID = pytest.StashKey[str]()
APPLIES_TO = pytest.StashKey[frozenset[str]]()
FINDING = pytest.StashKey[verdict_file.TestReport]()
#: The number of measurements that had been recorded when the test began.
MEASURED = pytest.StashKey[int]()
#: The known deviations of the engine that the test has excused.
DEVIATIONS = pytest.StashKey[list[str]]()
#: One line for each deviation in `DEVIATIONS`, which describes how the deviation appeared.
SYMPTOMS = pytest.StashKey[list[str]]()
#: One line for each known bug and known deviation of the engine that did not occur in the test.
MENDED = pytest.StashKey[list[str]]()
#: The number of servers that had been started when the test began.
STARTS = pytest.StashKey[int]()
