"""``--shard I/N``: divides a run into parts."""

from collections.abc import Iterable
from dataclasses import dataclass

from sm121.core.errors import UsageError

#: The group of tests that judge all that ran. Each shard has them, for its own part.
EVERYWHERE = "everywhere"


@dataclass(frozen=True)
class Shard:
    """Part I of the N parts of a run."""

    index: int
    of: int

    def groups(self, every: Iterable[str]) -> set[str]:
        """The groups of this part. Parts take whole groups in turns, in the order of the tests."""
        divided = [group for group in dict.fromkeys(every) if group != EVERYWHERE]
        return {EVERYWHERE, *divided[self.index - 1 :: self.of]}


def parse(text: str | None) -> Shard | None:
    """Parse the value of ``--shard``. Raises UsageError: the value is not I/N with 1 <= I <= N."""
    if text is None:
        return None
    index, slash, of = text.partition("/")
    if not (slash and index.isdecimal() and of.isdecimal() and 1 <= int(index) <= int(of)):
        raise UsageError(f"--shard {text}: expected I/N with I from 1 to N, as in 1/2")
    return Shard(int(index), int(of))
