"""Something that A and B both may have, as a row of a table with a column for each."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from sm121.core import data_file
from sm121.run.verdict_file import LevelReport

#: Characters of a value or a message that stands beside another.
_MOST_TEXT = 500
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
    """Return a part of the kernel paths of A and B as a row."""
    proven = [side for side, value in (("A", one), ("B", two)) if value is not None]
    note = f"proven in {proven[0]} only" if len(proven) == 1 else ""
    return Row(words(part), shown(one), shown(two), note=note)


def words(part: str) -> str:
    """A part of a kernel path for people."""
    return _WORDS.get(part, part.replace("_", " "))


def shown(value: object, also: Iterable[object] = ()) -> str:
    """A value of a path for people; what the evidence does not show is not proven."""
    if value is None:
        return "not proven"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value if isinstance(value, list) else [value, *also])) or "none"


def shortened(text: str) -> str:
    """At most 500 characters, cut between words where there is room for one."""
    if len(text) <= _MOST_TEXT:
        return text
    cut = textwrap.shorten(text, _MOST_TEXT, placeholder="")
    return f"{cut or text[:_MOST_TEXT]} [...]"


def counts_shown(levels: Iterable[LevelReport]) -> list[str]:
    """The counts that tables of levels have: the first two, and those that are not 0 everywhere."""
    names = [name for name in LevelReport.model_fields if name != "verdict"]
    every = [*levels]
    return [
        name
        for position, name in enumerate(names)
        if position < 2 or any(getattr(level, name) for level in every)
    ]
