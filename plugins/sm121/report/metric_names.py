"""Parsing the names of metrics: ``tg32@d4096``, ``tg32_c4@d0``, ``ttft_p99``."""

import re
from dataclasses import dataclass

from sm121.core import data_file
from sm121.measure.rate_name import IN_TURNS, STREAMS, RateName
from sm121.measure.rate_name import rate as rate  # one name for all parsers

#: ``_p99``: the 99th percentile of a time. A metric of a user's own test may have such a name, too.
_TIME = re.compile(r"(?P<base>[a-z]\w*)_p(?P<percent>\d{1,2}|100)")
_KERNEL = re.compile(r"(?P<operation>\w+)_us(?:@d(?P<depth>\d+))?")
_LONG = data_file.load_key("words.toml", "words", dict[str, dict[str, str]])["metrics"]


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
    match = re.search(STREAMS, base)
    if match is not None:
        name = base[: match.start()]
        streams = _streams_words(int(match["streams"]), in_turns=match["how"] == IN_TURNS)
    return _QuantityWords(_LONG.get(name, _LONG.get(base, base)), streams)


def _streams_words(streams: int, *, in_turns: bool) -> str:
    if in_turns:
        return f", {streams} streams in turns"
    return f", {streams} streams"
