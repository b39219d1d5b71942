"""Waivers: failures that are tolerated by name, with an issue and a last day."""

import datetime
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from sm121.core import data_file, errors, unmet


def _one_test(test: str) -> str:
    """Return the id of one test unchanged."""
    name = test.partition("[")[0]  # parameters may contain any character
    if "::" not in name or any(wild in name for wild in "*?"):
        raise ValueError(
            f"expected the id of one test, as tests/test_smoke.py::test_health, without wildcards; "
            f"got {test!r}"
        )
    return test


#: The longest time until a waiver must be renewed.
MOST_DAYS = 90


class Waiver(data_file.DataTable):
    """One tolerated failure."""

    #: The id of one test, with its parameters.
    test: Annotated[str, AfterValidator(_one_test)]
    #: The case of the test that it tolerates (`Fact.case`). None: the only case that fails.
    case: Annotated[str, Field(min_length=1)] | None = None
    #: The kind of the failure, as in `Fact.identity`. None: any kind.
    kind: Annotated[str, Field(min_length=1)] | None = None
    reason: str = Field(min_length=3)
    issue: str = Field(pattern=r"^https?://\S+$")
    expires: datetime.date

    def names(self, fact: unmet.Fact, facts: Sequence[unmet.Fact]) -> bool:
        """Check whether the waiver tolerates a fact of its test.

        Args:
            fact: The fact.
            facts: All facts of the test, with this one.
        """
        if self.case is None:
            is_named = len({any_fact.case for any_fact in facts}) == 1
        else:
            is_named = self.case == fact.case
        return is_named and self.kind in (None, fact.kind or fact.required)

    def expired(self, today: datetime.date) -> bool:
        """Check whether the waiver's last day is over."""
        return today > self.expires


class _WaiverFile(data_file.DataTable):
    waiver: tuple[Waiver, ...] = ()


def load(path: Path | None) -> tuple[Waiver, ...]:
    """Read waivers.

    Args:
        path: The file. None: the file that ships with the suite.

    Raises:
        UsageError: The file is wrong, or a waiver ends more than `MOST_DAYS` from today.
    """
    source = path if path is not None else files("sm121.fixtures") / "waivers.toml"
    text = data_file.read_text(source, f"--waivers {source}")
    waivers = data_file.parse(text, _WaiverFile, f"--waivers {source}").waiver
    latest = datetime.date.today() + datetime.timedelta(days=MOST_DAYS)
    for waiver in waivers:
        if waiver.expires > latest:
            raise errors.UsageError(
                f"--waivers {source}: {waiver.test}: expires {waiver.expires}: expected a day "
                f"within {MOST_DAYS} days, by {latest}"
            )
    return waivers
