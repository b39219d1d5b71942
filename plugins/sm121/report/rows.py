"""Rows of a table that compares A and B, with a column for each."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from sm121.core import data_file
from sm121.run.verdict_file import LevelReport

#: Characters of a value or a message that stands beside another.
_MOST_TEXT = 500
#: The first counts of a level are always shown.
_ALWAYS = 2
#: Parts of a kernel path whose names are not words.
_WORDS = data_file.load_key("words.toml", "words", dict[str, dict[str, str]])["path"]


@dataclass(frozen=True)
class Row:
    """A test, a value of the path, a part of the record."""

    name: str
    a: str
    b: str
    note: str = ""

    @property
    def differs(self) -> bool:
        """Whether the two values are not the same."""
        return self.a != self.b


def of_path(part: str, one: object, two: object) -> Row:
    """Return a part of the kernel paths of A and B as a row.

    Args:
        part: The part's name.
        one: Its value in A; None where the log does not prove it.
        two: Its value in B.
    """
    note = ""
    if one is not None and two is None:
        note = "proven in A only"
    elif one is None and two is not None:
        note = "proven in B only"
    return Row(words(part), shown(one), shown(two), note=note)


def words(part: str) -> str:
    """Return the name of a part of a kernel path for people.

    Args:
        part: The name of its field.
    """
    return _WORDS.get(part, part.replace("_", " "))


def shown(value: object, also: Iterable[object] = ()) -> str:
    """Return a value of a kernel path for people.

    Args:
        value: The value; None is ``not proven``.
        also: Further values of the same part.
    """
    if value is None:
        return "not proven"
    if isinstance(value, bool):
        return "yes" if value else "no"
    values = value if isinstance(value, list) else [value, *also]
    return ", ".join(str(item) for item in values) or "none"


def shortened(text: str) -> str:
    """Return at most 500 characters of a text, cut between words if possible.

    Args:
        text: Any text.
    """
    if len(text) <= _MOST_TEXT:
        return text
    cut = textwrap.shorten(text, _MOST_TEXT, placeholder="")
    return f"{cut or text[:_MOST_TEXT]} [...]"


def counts_shown(levels: Iterable[LevelReport]) -> list[str]:
    """Return the counts that tables of levels have: two always, others if one level has them.

    Args:
        levels: The levels of a run.

    Returns:
        Names of fields of a level.
    """
    reports = list(levels)
    counts = [name for name in LevelReport.model_fields if name != "verdict"]
    names = counts[:_ALWAYS]
    for name in counts[_ALWAYS:]:
        if any(getattr(level, name) for level in reports):
            names.append(name)
    return names
