"""What the names of metrics say: ``tg32@d4096``, ``pp2048@d0``, ``tg32_c4@d0``, ``ttft_p99``."""

import re
from dataclasses import dataclass

from sm121.core import data_file

_STREAMS = r"_(?P<how>[cq])(?P<streams>\d+)"
_RATE = re.compile(rf"(?P<kind>pp|tg)(?P<tokens>\d+)(?:{_STREAMS})?@d(?P<depth>\d+)")
_TIME = re.compile(r"(?P<base>(?:ttft|tpot|itl|e2e)(?:_\w+?)??)_p(?P<percent>\d+)")
_KERNEL = re.compile(r"(?P<what>\w+)_us(?:@d(?P<depth>\d+))?")
_LONG = data_file.load_key("words.toml", "words", dict[str, dict[str, str]])["metrics"]


@dataclass(frozen=True)
class RateName:
    """A rate of one or several streams at a depth."""

    kind: str
    depth: int
    streams: int
    #: More streams than the server runs at once.
    in_turns: bool = False

    @property
    def decoding(self) -> bool:
        """Whether it is of generated tokens."""
        return self.kind.startswith("tg")

    @property
    def plain(self) -> bool:
        """Whether it is of one stream in an empty context: the rate that everybody quotes."""
        return self.depth == 0 and self.streams == 1


def rate(name: str) -> RateName | None:
    """What a rate's name says; None for the name of something else."""
    match = _RATE.fullmatch(name)
    if match is None:
        return None
    kind = f"{match['kind']}{match['tokens']}"
    return RateName(kind, int(match["depth"]), int(match["streams"] or 1), match["how"] == "q")


def quantity(name: str) -> str | None:
    """The time that a percentile is of: ``ttft`` of ``ttft_p99``; None for something else."""
    match = _TIME.fullmatch(name)
    return match["base"] if match is not None else None


def fraction(name: str) -> float | None:
    """Which quantile a time is: 0.99 of ``ttft_p99``; None for something else."""
    match = _TIME.fullmatch(name)
    return float(match["percent"]) / 100 if match is not None else None


def words(name: str) -> str:
    """A metric's name for people."""
    if (named := rate(name)) is not None:
        kind = "decode" if named.decoding else "prefill"
        streams = _several(named.streams, in_turns=named.in_turns) if named.streams > 1 else ""
        depth = f" at depth {named.depth}" if named.depth else ""
        return f"{kind} {named.kind}{depth}{streams}"
    if (match := _TIME.fullmatch(name)) is not None:
        base, several = match["base"], ""
        if (beside := re.search(_STREAMS, base)) is not None:
            base = base[: beside.start()]
            several = _several(int(beside["streams"]), in_turns=beside["how"] == "q")
        long = _LONG.get(base, _LONG.get(match["base"], match["base"]))
        return f"{long}, p{match['percent']}{several}"
    if (kernel := _KERNEL.fullmatch(name)) is not None:
        depth = f" at depth {kernel['depth']}" if kernel["depth"] else ""
        return f"kernel {kernel['what'].replace('_', ' ')}{depth}"
    return _LONG.get(name, name)


def _several(streams: int, *, in_turns: bool) -> str:
    return f", {streams} streams{' in turns' if in_turns else ''}"
