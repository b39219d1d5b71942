"""Parsing the names of metrics: ``tg32@d4096``, ``tg32_c4@d0``, ``ttft_p99``."""

import re
from dataclasses import dataclass

from sm121.core import data_file

#: ``_c4``: four concurrent streams; ``_q4``: four streams, more than the server runs at a time.
_STREAMS = r"_(?P<how>[cq])(?P<streams>\d+)"
_IN_TURNS = "q"
_DECODING = "tg"
_RATE = re.compile(rf"(?P<kind>pp|tg)(?P<tokens>\d+)(?:{_STREAMS})?@d(?P<depth>\d+)")
#: ``_p99``: the 99th percentile of a time. A metric of a user's own test may have such a name, too.
_TIME = re.compile(r"(?P<base>[a-z]\w*)_p(?P<percent>\d{1,2}|100)")
_KERNEL = re.compile(r"(?P<operation>\w+)_us(?:@d(?P<depth>\d+))?")
_LONG = data_file.load_key("words.toml", "words", dict[str, dict[str, str]])["metrics"]


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
        in_turns=match["how"] == _IN_TURNS,
    )


def quantity(name: str) -> str | None:
    """Return the quantity of a time's quantile, for example ``ttft`` for ``ttft_p99``.

    Args:
        name: The name of a metric.

    Returns:
        The quantity; None for a metric that is no quantile of a time.
    """
    match = _TIME.fullmatch(name)
    if match is not None:
        return match["base"]
    return None


def fraction(name: str) -> float | None:
    """Return which quantile a time is, for example 0.99 for ``ttft_p99``.

    Args:
        name: The name of a metric.

    Returns:
        The fraction; None for a metric that is no quantile of a time.
    """
    match = _TIME.fullmatch(name)
    if match is not None:
        return float(match["percent"]) / 100
    return None


def words(name: str) -> str:
    """Return a readable name of a metric.

    Args:
        name: The name of a metric. An unknown name is returned unchanged.
    """
    named = rate(name)
    if named is not None:
        return _rate_words(named)
    time = _TIME.fullmatch(name)
    if time is not None:
        return _time_words(time["base"], time["percent"])
    kernel = _KERNEL.fullmatch(name)
    if kernel is not None:
        depth = f" at depth {kernel['depth']}" if kernel["depth"] else ""
        return f"kernel {kernel['operation'].replace('_', ' ')}{depth}"
    return _LONG.get(name, name)


def quantity_words(quantity: str) -> str:
    """Return a readable name of a quantity. The name of a time omits its quantile.

    Args:
        quantity: A result of `quantity`.
    """
    words = _quantity_words(quantity)
    return f"{words.quantity}{words.streams}"


def _rate_words(named: RateName) -> str:
    text = "decode" if named.decoding else "prefill"
    text += f" {named.kind}"
    if named.depth:
        text += f" at depth {named.depth}"
    if named.streams > 1:
        text += _streams_words(named.streams, in_turns=named.in_turns)
    return text


def _time_words(base: str, percent: str) -> str:
    words = _quantity_words(base)
    return f"{words.quantity}, p{percent}{words.streams}"


@dataclass(frozen=True)
class _QuantityWords:
    quantity: str
    #: The number of streams as text; empty for one stream.
    streams: str


def _quantity_words(base: str) -> _QuantityWords:
    name = base
    streams = ""
    match = re.search(_STREAMS, base)
    if match is not None:
        name = base[: match.start()]
        streams = _streams_words(int(match["streams"]), in_turns=match["how"] == _IN_TURNS)
    return _QuantityWords(_LONG.get(name, _LONG.get(base, base)), streams)


def _streams_words(streams: int, *, in_turns: bool) -> str:
    if in_turns:
        return f", {streams} streams in turns"
    return f", {streams} streams"
