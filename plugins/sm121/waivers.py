"""Waivers: failures tolerated by name, with an issue to follow and a day on which they end."""

from __future__ import annotations

import datetime
import tomllib
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sm121.errors import UsageError


class Waiver(BaseModel):
    """One tolerated failure. ``test`` is a node id; ``*`` and ``?`` are wildcards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    test: str = Field(min_length=3)
    reason: str = Field(min_length=3)
    issue: str = Field(pattern=r"^https?://\S+$")
    expires: datetime.date

    def applies_to(self, node_id: str) -> bool:
        """Whether the waiver names that test."""
        return fnmatchcase(node_id, self.test)

    def expired(self, today: datetime.date) -> bool:
        """Whether its day has passed."""
        return today > self.expires


def load(path: Path | None) -> tuple[Waiver, ...]:
    """Waivers from a file, or the shipped ones.

    Raises:
        UsageError: one line, with the file and what was expected.
    """
    source = path if path is not None else files("sm121.fixtures") / "waivers.toml"
    try:
        data = tomllib.loads(source.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--waivers {source}: expected a readable TOML file ({error})") from error
    unknown = set(data) - {"waiver"}
    if unknown:
        raise UsageError(
            f"--waivers {source}: unknown key {sorted(unknown)[0]}; expected [[waiver]] tables"
        )
    waivers = []
    for number, entry in enumerate(data.get("waiver", []), start=1):
        try:
            waivers.append(Waiver.model_validate(entry))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise UsageError(
                f"--waivers {source}: waiver {number}, key {key}: {first['msg']} "
                "(expected test, reason, issue = an URL, expires = a date)"
            ) from error
    return tuple(waivers)
