"""The fingerprint of a run: what was asked, of what, on which machine. Only runs with one
fingerprint are shards of one run, or can be gone on with."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field

from sm121.core import data_file, profile
from sm121.core.data_file import Record
from sm121.core.profile import FULL


class Difference(NamedTuple):
    """A value that differs between two runs, so that their verdicts judge different things."""

    name: str
    one: str | None
    other: str | None
    #: The field of `Fingerprint`, and the key in it where it is a table; empty for other values.
    field: str = ""
    key: str = ""


class Fingerprint(Record):
    """What a run asked, of what, and on which machine. Null where it is not known."""

    profile: str | None = None
    """Digest of the profile in force."""
    profile_shipped: bool | None = None
    """Whether the profile is the one of its name that comes with the suite."""
    extends: str | None = None
    """The profile that it extends; ``profile`` is the digest of what resolved."""
    plan: str = FULL
    """The plan of the profile (``--plan``): what it leaves out was not asked."""
    axes: str | None = None
    """Digest of the axes of the matrix; null without a matrix."""
    waivers: str | None = None
    """Digest of the waivers; null where there is none."""
    against: str | None = None
    """Digest of the verdict.json of the trusted run; null without ``--against``."""
    provider: str | None = None
    """The kernel provider; of a user's own also the digest of its module."""
    options: dict[str, str] = Field(default_factory=dict)
    """The options given that change or add to what is measured, by name."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Version and git commit of the suite, the engine and FlashInfer, and of what computes."""
    engine: str | None = None
    configuration: str | None = None
    arguments: list[str] | None = None
    """The engine's; null where the server is attached."""
    environment: dict[str, str] | None = None
    """The variables that bear on what the engine runs; null where the server is attached."""
    model: str | None = None
    """Digest of the checkpoint's files, or the name of what is not here."""
    machine: dict[str, Any] = Field(default_factory=dict)

    def differences(self, other: "Fingerprint") -> list[Difference]:
        """In what the other one differs; empty where both asked the same of the same."""
        one, two = self._values(), other._values()
        return [
            Difference(_name(field, key), one.get((field, key)), two.get((field, key)), field, key)
            for field, key in dict.fromkeys([*one, *two])
            if one.get((field, key)) != two.get((field, key))
        ]

    def values(self) -> dict[str, str | None]:
        """Every value by its name in reports, those of tables one by one."""
        return {_name(field, key): value for (field, key), value in self._values().items()}

    def _values(self) -> dict[tuple[str, str], str | None]:
        """Every value by its field, those of tables one by one by field and key."""
        values: dict[tuple[str, str], str | None] = {}
        for field, value in self.model_dump(mode="json").items():
            if isinstance(value, Mapping):
                values.update({(field, key): _text(item) for key, item in value.items()})
            else:
                values[field, ""] = _text(value)
        return values


_NAMES = data_file.load_key("words.toml", "words", dict[str, dict[str, str]])["fingerprint"]


def _name(field: str, key: str) -> str:
    """A value as reports name it."""
    return f"{_NAMES.get(field, field)} {key}".rstrip()


def _text(value: object) -> str | None:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return None if value is None else str(value)


def profile_label(name: str, fingerprint: Fingerprint | None) -> str:
    """The profile as reports name it: one that only has the name of a shipped one shows as that."""
    if fingerprint is None or fingerprint.profile is None:
        return name
    article = "the" if name in profile.shipped() else "a"
    origin = "" if fingerprint.profile_shipped else f" (not {article} shipped one)"
    base = f", extends {fingerprint.extends}" if fingerprint.extends else ""
    plan = "" if fingerprint.plan == FULL else f", plan {fingerprint.plan}"
    return f"{name}{origin}{base}{plan}, digest {fingerprint.profile}"
