"""ab.json: every start of an A/B comparison and what followed, as a report reads it again."""

from typing import Any

from pydantic import Field

from sm121.core.data_file import Record
from sm121.regression.ab import Visit
from sm121.regression.change import Change

NAME = "ab.json"


class AbFile(Record):
    """The whole file."""

    sides: tuple[str, str]
    """What was given for A and for B; empty for the configuration under test as it is."""
    void: str | None = None
    """Why nothing of it counts; null while it does."""
    visits: list[Visit] = Field(default_factory=list)
    outcomes: list[Change] = Field(default_factory=list)

    def path(self, side: str) -> dict[str, Any]:
        return next((v.path for v in reversed(self.visits) if v.side == side and v.path), {})

    def requested(self, side: str) -> list[str]:
        lines = (line for visit in self.visits if visit.side == side for line in visit.requested)
        return [*dict.fromkeys(lines)]

    def failures(self, side: str) -> list[str]:
        return [v.failure for v in self.visits if v.side == side and v.failure]

    def logs(self, side: str) -> list[str]:
        return [*dict.fromkeys(v.log for v in self.visits if v.side == side and v.log)]
