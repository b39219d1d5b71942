"""Waivers: failures tolerated by name, with an issue to follow and a day on which they end."""

from __future__ import annotations

import datetime
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path

from pydantic import Field

from sm121.core import data_file
from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError


class Waiver(DataTable):
    """One tolerated failure. ``test`` is a node id; ``*`` and ``?`` are wildcards."""

    test: str = Field(min_length=3)
    reason: str = Field(min_length=3)
    issue: str = Field(pattern=r"^https?://\S+$")
    expires: datetime.date

    def applies_to(self, node_id: str) -> bool:
        """Whether the waiver names that test."""
        # Brackets are of the node id (parameters), not a set of characters.
        return fnmatchcase(node_id, self.test.replace("[", "[[]"))

    def expired(self, today: datetime.date) -> bool:
        """Whether its day has passed."""
        return today > self.expires


class _WaiverFile(DataTable):
    waiver: tuple[Waiver, ...] = ()


def load(path: Path | None) -> tuple[Waiver, ...]:
    """Waivers from a file, or the shipped ones.

    Raises:
        UsageError: one line, with the file and what was expected.
    """
    source = path if path is not None else files("sm121.fixtures") / "waivers.toml"
    try:
        text = source.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--waivers {source}: expected a readable TOML file ({error})") from error
    return data_file.parse(text, _WaiverFile, f"--waivers {source}").waiver
