"""Waivers: failures tolerated by name, with an issue to follow and a day on which they end."""

import datetime
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from sm121.core import data_file, errors, unmet


def _one_test(test: str) -> str:
    name = test.partition("[")[0]  # brackets are of parameters, where every character counts
    if "::" not in name or any(wild in name for wild in "*?"):
        raise ValueError(
            f"expected the id of one test, as tests/test_smoke.py::test_health, without wildcards; "
            f"got {test!r}"
        )
    return test


#: A waiver is renewed so often, or what it tolerates is mended.
MOST_DAYS = 90


class Waiver(data_file.DataTable):
    """One tolerated failure. ``test`` is the id of one test, with its parameters if it has some."""

    test: Annotated[str, AfterValidator(_one_test)]
    #: Of the test's cases the one that it tolerates (`Fact.case`); None: the only one that fails.
    case: Annotated[str, Field(min_length=1)] | None = None
    #: Of what kind its failure is, as in `Fact.identity`; None: of any.
    kind: Annotated[str, Field(min_length=1)] | None = None
    reason: str = Field(min_length=3)
    issue: str = Field(pattern=r"^https?://\S+$")
    expires: datetime.date

    def names(self, fact: unmet.Fact, facts: Sequence[unmet.Fact]) -> bool:
        """Whether it is about this fact of its test. `facts`: all that does not hold there."""
        only = len({each.case for each in facts}) == 1
        named = only if self.case is None else self.case == fact.case
        return named and self.kind in (None, fact.kind or fact.required)

    def expired(self, today: datetime.date) -> bool:
        """Whether its day has passed."""
        return today > self.expires


class _WaiverFile(data_file.DataTable):
    waiver: tuple[Waiver, ...] = ()


def load(path: Path | None) -> tuple[Waiver, ...]:
    """Waivers from a file, or the shipped ones. Raises UsageError: one line, with the file and what
    was expected; a waiver ends too late."""
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
