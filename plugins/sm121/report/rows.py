"""Rows of a table that compares A and B in two columns."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from sm121.core import data_file
from sm121.run.verdict_file import LevelReport

#: Maximum number of characters in a cell of a table.
_MOST_TEXT = 500
#: The number of columns that a table of levels always shows, beginning with the first one. Another
#: column is shown only if one of the levels has such tests.
_ALWAYS = 2
#: Readable names of a kernel path's parts, if they differ from the field names.
_WORDS = data_file.load_key("words.toml", "words", dict[str, dict[str, str]])["path"]


@dataclass(frozen=True)
class Row:
    """One row: a test, a part of the kernel path, or an entry of the environment record."""

    name: str
    a: str
    b: str
    note: str = ""

    @property
    def differs(self) -> bool:
        """Whether the two values differ."""
        return self.a != self.b


def of_path(part: str, one: object, two: object) -> Row:
    """Return a part of the kernel paths of A and B as a row.

    Args:
        part: The part's name.
        one: The part's value in A; None if the log does not prove it.
        two: The part's value in B, likewise.
    """
    note = ""
    if one is not None and two is None:
        note = "proven in A only"
    elif one is None and two is not None:
        note = "proven in B only"
    return Row(words(part), shown(one), shown(two), note=note)


def words(part: str) -> str:
    """Return the readable name of a part of a kernel path.

    Args:
        part: The name of the part's field.
    """
    return _WORDS.get(part, part.replace("_", " "))


def shown(value: object, also: Iterable[object] = ()) -> str:
    """Return a value of a kernel path as readable text.

    Args:
        value: The value; None becomes ``not proven``.
        also: Further values of the same part.
    """
    if value is None:
        return "not proven"
    if isinstance(value, bool):
        return "yes" if value else "no"
    values = value if isinstance(value, list) else [value, *also]
    return ", ".join(str(item) for item in values) or "none"


def shortened(text: str) -> str:
    """Truncate a text to 500 characters, between two words if possible.

    Args:
        text: The text.
    """
    if len(text) <= _MOST_TEXT:
        return text
    cut = textwrap.shorten(text, _MOST_TEXT, placeholder="")
    return f"{cut or text[:_MOST_TEXT]} [...]"


def counts_shown(levels: Iterable[LevelReport]) -> list[str]:
    """Return the columns of a table of levels: two always, others if a level has such tests.

    Args:
        levels: The levels of a run.

    Returns:
        Names of fields of `LevelReport`.
    """
    reports = list(levels)
    counts = [name for name in LevelReport.model_fields if name != "verdict"]
    names = counts[:_ALWAYS]
    for name in counts[_ALWAYS:]:
        if any(getattr(level, name) for level in reports):
            names.append(name)
    return names
