"""The keys of the plugin in the stashes of pytest's config and items."""

import pytest

from sm121.plugin.progress import Progress
from sm121.report.stored import StoredReport
from sm121.run import verdict_file
from sm121.session import crashes, session, settings, signals

# With the config.
SETTINGS = pytest.StashKey[settings.Settings]()
#: The session, from the end of the collection on. Absent without tests of a level.
SESSION = pytest.StashKey[session.Session]()
CRASHES = pytest.StashKey[crashes.CrashDesk]()
SIGNALS = pytest.StashKey[signals.Signals]()
REPORT = pytest.StashKey[StoredReport]()
SHARD = pytest.StashKey[verdict_file.ShardReport]()
PROGRESS = pytest.StashKey[Progress]()

# With an item.
LEVEL = pytest.StashKey[str]()
#: The test's id as reports show it: before pytest 9.2 xdist appends a group's name to node ids.
ID = pytest.StashKey[str]()
APPLIES_TO = pytest.StashKey[frozenset[str]]()
FINDING = pytest.StashKey[verdict_file.TestReport]()
#: How many measurements had been recorded when a test began.
MEASURED = pytest.StashKey[int]()
#: Known deviations of the engine that the test has excused.
DEVIATIONS = pytest.StashKey[list[str]]()
#: How each of them showed, one line.
SYMPTOMS = pytest.StashKey[list[str]]()
#: How many servers had been started when a test began.
STARTS = pytest.StashKey[int]()
