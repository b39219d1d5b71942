"""Parsing the names of rates: ``tg32@d4096``, ``tg32_c4@d0``, ``pp2048@d0``."""

import re
from dataclasses import dataclass

#: ``_c4``: four concurrent streams; ``_q4``: four streams, more than the server runs at a time.
STREAMS = r"_(?P<how>[cq])(?P<streams>\d+)"
#: The letter of streams that take turns.
IN_TURNS = "q"
_DECODING = "tg"
_RATE = re.compile(rf"(?P<kind>pp|tg)(?P<tokens>\d+)(?:{STREAMS})?@d(?P<depth>\d+)")


@dataclass(frozen=True)
class RateName:
    """The parts of the name of a rate."""

    #: ``tg32`` or ``pp2048``.
    kind: str
    #: The number of generated tokens, or of prompt tokens.
    tokens: int
    #: ``tg`` for generated tokens, ``pp`` for prompt tokens.
    direction: str
    #: The number of context tokens before the prompt.
    depth: int
    streams: int
    #: Whether there are more streams than the server runs at a time.
    in_turns: bool = False

    @property
    def decoding(self) -> bool:
        """Whether the rate is one of generated tokens."""
        return self.direction == _DECODING

    @property
    def plain(self) -> bool:
        """Whether the rate is the usual one: of a single stream in an empty context."""
        return self.depth == 0 and self.streams == 1


def rate(name: str) -> RateName | None:
    """Return the parts of a rate's name.

    Args:
        name: The name of a metric.

    Returns:
        The parts; None for a metric that is no rate.
    """
    match = _RATE.fullmatch(name)
    if match is None:
        return None
    return RateName(
        kind=f"{match['kind']}{match['tokens']}",
        tokens=int(match["tokens"]),
        direction=match["kind"],
        depth=int(match["depth"]),
        streams=int(match["streams"] or 1),
        in_turns=match["how"] == IN_TURNS,
    )
