"""The fingerprint of a run: its profile, options, sources, configuration and machine.

Two runs can be shards of one run only if their fingerprints are equal.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field

from sm121.core import data_file, profile
from sm121.core.data_file import Record
from sm121.core.profile_fields import FULL


class FingerprintDifference(NamedTuple):
    """A value that differs between two runs, so that their verdicts are not about the same target.

    Attributes:
        name: Its name in reports.
        one: The value of the first run.
        other: The value of the second run.
        field: The field of `Fingerprint`; empty if the value is not a field of it.
        key: The key, if the field is a table; otherwise empty.
    """

    name: str
    one: str | None
    other: str | None
    field: str = ""
    key: str = ""


class Fingerprint(Record):
    """The properties of a run on which its verdicts depend. An unknown value is null."""

    profile: str | None = None
    """Digest of the profile in force."""
    profile_shipped: bool | None = None
    """Whether the profile is the one of this name that ships with the suite."""
    extends: str | None = None
    """The profile that the run's profile extends; null if there is none."""
    plan: str = FULL
    """The plan of the profile (``--plan``), which selects the checks."""
    axes: str | None = None
    """Digest of the axes of the matrix; null without a matrix."""
    waivers: str | None = None
    """Digest of the waivers; null without waivers."""
    against: str | None = None
    """Digest of the verdict.json of the trusted run; null without ``--against``."""
    provider: str | None = None
    """The kernel provider, with the digest of its module if it is the user's own."""
    options: dict[str, str] = Field(default_factory=dict)
    """The given options that change the measurements, by name."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Versions and git commits of the suite, the engine and the packages that compute results."""
    engine: str | None = None
    configuration: str | None = None
    arguments: list[str] | None = None
    """The engine's arguments; null if the server is attached."""
    environment: dict[str, str] | None = None
    """The variables that change the engine's behaviour; null if the server is attached."""
    model: str | None = None
    """Digest of the checkpoint's files, or the model's name if they are not here."""
    machine: dict[str, Any] = Field(default_factory=dict)

    def differences(self, other: "Fingerprint") -> list[FingerprintDifference]:
        """Return the differences of two fingerprints.

        Args:
            other: The other fingerprint.
        """
        values_here = self._values()
        values_there = other._values()
        differences = []
        for place in dict.fromkeys([*values_here, *values_there]):
            here = values_here.get(place)
            there = values_there.get(place)
            if here != there:
                field, key = place
                differences.append(
                    FingerprintDifference(_name(field, key), here, there, field, key)
                )
        return differences

    def values(self) -> dict[str, str | None]:
        """Return all values by their names in reports, with one entry for each key of a table."""
        return {_name(field, key): value for (field, key), value in self._values().items()}

    def _values(self) -> dict[tuple[str, str], str | None]:
        """Return all values by field and key. The key is empty if the field is not a table."""
        values: dict[tuple[str, str], str | None] = {}
        for field, value in self.model_dump(mode="json").items():
            if isinstance(value, Mapping):
                for key, item in value.items():
                    values[field, key] = _text(item)
            else:
                values[field, ""] = _text(value)
        return values


_NAMES = data_file.load_key("words.toml", "words", dict[str, dict[str, str]])["fingerprint"]


def _name(field: str, key: str) -> str:
    """Return the name of a value in reports."""
    return f"{_NAMES.get(field, field)} {key}".rstrip()


def _text(value: object) -> str | None:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return None if value is None else str(value)


def profile_label(name: str, fingerprint: Fingerprint | None) -> str:
    """Return the name of a profile in reports.

    A profile that has the name of a shipped profile, but other content, is marked.

    Args:
        name: The name of the profile.
        fingerprint: The run's fingerprint; None in files of earlier versions.
    """
    if fingerprint is None or fingerprint.profile is None:
        return name
    label = name
    if not fingerprint.profile_shipped:
        article = "the" if name in profile.shipped() else "a"
        label += f" (not {article} shipped one)"
    if fingerprint.extends:
        label += f", extends {fingerprint.extends}"
    if fingerprint.plan != FULL:
        label += f", plan {fingerprint.plan}"
    return f"{label}, digest {fingerprint.profile}"
