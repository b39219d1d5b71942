"""Waivers: known failures that are tolerated until a date. Each names its test and an issue."""

import datetime
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from sm121.core import data_file, errors, unmet


def _one_test(test: str) -> str:
    """Return the id of a test unchanged, or raise an error if it is not the id of one test."""
    name = test.partition("[")[0]  # parameters may contain any character
    if "::" not in name or any(wild in name for wild in "*?"):
        raise ValueError(
            f"expected the id of one test, as tests/test_smoke.py::test_health, without wildcards; "
            f"got {test!r}"
        )
    return test


#: The maximum duration of a waiver, in days.
MOST_DAYS = 90


class Waiver(data_file.DataTable):
    """One tolerated failure."""

    #: The id of one test, with its parameters.
    test: Annotated[str, AfterValidator(_one_test)]
    #: The case of the test whose failure is tolerated (`Fact.case`). If None, the waiver applies if
    #: only one case fails.
    case: Annotated[str, Field(min_length=1)] | None = None
    #: The kind of the tolerated failure, as in `Fact.identity`. If None, any kind is tolerated.
    kind: Annotated[str, Field(min_length=1)] | None = None
    reason: str = Field(min_length=3)
    issue: str = Field(pattern=r"^https?://\S+$")
    expires: datetime.date

    @property
    def name(self) -> str:
        """The test with the case and the kind, if they are given."""
        parts = [self.test]
        if self.case is not None:
            parts.append(f"case {self.case!r}")
        if self.kind is not None:
            parts.append(f"kind {self.kind!r}")
        return ", ".join(parts)

    def names(self, fact: unmet.Fact, facts: Sequence[unmet.Fact]) -> bool:
        """Check whether the waiver tolerates a fact of its test.

        Args:
            fact: The fact.
            facts: All facts of the test, including this one.
        """
        if self.case is None:
            is_named = len({any_fact.case for any_fact in facts}) == 1
        else:
            is_named = self.case == fact.case
        return is_named and self.kind in (None, fact.kind or fact.required)

    def expired(self, today: datetime.date) -> bool:
        """Check whether the waiver's last day has passed.

        Args:
            today: The date of the run. On the day `expires`, the waiver still applies.
        """
        return today > self.expires


class _WaiverFile(data_file.DataTable):
    waiver: tuple[Waiver, ...] = ()


def list_cases(facts: Sequence[unmet.Fact], waivers: Sequence[Waiver]) -> str:
    """Return the cases of a failed test as one line, for a message.

    Args:
        facts: The facts of the test.
        waivers: The waivers of the test. If one of them has a kind, the line contains the kinds.
    """
    has_kind = any(waiver.kind is not None for waiver in waivers)
    cases = []
    for fact in facts:
        case = repr(fact.case)
        if has_kind:
            case += f" of the kind {fact.kind or fact.required!r}"
        cases.append(case)
    return ", ".join(dict.fromkeys(cases))


def load(path: Path | None) -> tuple[Waiver, ...]:
    """Read waivers.

    Args:
        path: The file. If None, the file that ships with the suite is read.

    Raises:
        UsageError: The file is wrong, or a waiver ends more than `MOST_DAYS` days from today.
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
