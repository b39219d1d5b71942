"""The section of verdict.json on the shard of a divided run (``--shard``)."""

from sm121.core.data_file import Record


class ShardTest(Record):
    """A test of the whole run. It may belong to any shard."""

    id: str
    level: str


class ShardReport(Record):
    """Which part of the whole run this run is (``--shard``)."""

    index: int
    of: int
    tests: list[ShardTest]
    """All tests of the whole run, in the order in which they run."""
    compared: bool = False
    """Whether ``--benchmark-compare`` was given: it is then given to each shard of the run."""
