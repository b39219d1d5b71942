"""Where the clock of a decode rate starts and ends. A first chunk that is late, by a payload or
since it waited for others, makes the tokens behind it look fast: they come in a bunch, or too soon
after it. What comes in a bunch is one moment, and the clock starts at the first moment that is on
time. A pause after the first chunk stays in the rate."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from sm121.client.timed_answer import Arrival

#: Chunks nearer to each other than this share of a token's time were sent together.
_TOGETHER = 0.25
#: A chunk carries a payload when it is larger than others by so many times, bytes, bytes a token.
_PAYLOAD_TIMES, _PAYLOAD_BYTES, _PAYLOAD_TOKEN_BYTES = 4.0, 1024, 64
#: A start is late when it is so by more than so many deviations of a gap (more where several gaps
#: are looked at: one of them is short by chance), and by more than a share of a gap for each.
_LATE, _LATE_OF_SEVERAL, _LATE_SHARE = 3.0, 4.0, 0.01
#: A gap of so many typical ones after a payload is a pause of the server, which the rate has in it.
_PAUSE = 1.5
#: The gaps that say how long one is: so many at least, to judge by; so many at most.
_GAPS_NEEDED, _GAPS_AT_MOST = 4, 32


@dataclass(frozen=True, slots=True)
class Moment:
    """Chunks that came together."""

    #: Of the last of them, in nanoseconds.
    at_ns: int
    #: Tokens so far, theirs included; and chunks.
    tokens: int
    chunks: int
    payload: bool


@dataclass(frozen=True, slots=True)
class Window:
    """The part of an answer that a rate is taken from."""

    start: Moment
    end: Moment
    requested: int
    #: How late the moments before the start were, in nanoseconds; 0 where it is the first one.
    late_ns: float = 0.0
    #: Moments after the start.
    steps: int = 0

    @property
    def tokens(self) -> int:
        """Tokens after the start."""
        return self.end.tokens - self.start.tokens

    @property
    def ns(self) -> int:
        """From the start to the end."""
        return self.end.at_ns - self.start.at_ns

    @property
    def rate(self) -> float:
        """Tokens a second; 0 where nothing is left."""
        return self.tokens / self.ns * 1e9 if self.ns > 0 else 0.0

    @property
    def enough(self) -> bool:
        """Whether half of the tokens are left, or more."""
        return self.ns > 0 and 2 * self.tokens >= self.requested - 1


def moments(arrivals: Sequence[Arrival]) -> list[Moment]:
    """The chunks of an answer, those that came together being one."""
    made: list[Moment] = []
    typical = median(arrival.size for arrival in arrivals) if arrivals else 0.0
    together, before = _TOGETHER * _token_ns(arrivals), 0
    for chunks, (at_ns, tokens, size) in enumerate(arrivals, 1):
        fresh = tokens - before
        most = _PAYLOAD_TIMES * typical + _PAYLOAD_BYTES + _PAYLOAD_TOKEN_BYTES * fresh
        moment = Moment(at_ns, tokens, chunks, size > most)
        if made and at_ns - made[-1].at_ns <= together:
            moment = Moment(at_ns, tokens, chunks, moment.payload or made[-1].payload)
            made.pop()
        made.append(moment)
        before = tokens
    return made


def window(
    arrivals: Sequence[Arrival], tokens: int | None = None, *, drafts: bool = False
) -> Window | None:
    """Where the clock of a rate starts and ends; None for an answer without a token. An answer has
    one start, whatever part of it is asked for: tokens that came with a late first chunk leave no
    fewer for the rate, as long as the answer goes on. `tokens`: look at as many tokens, from the
    start on. `drafts`: it starts at its first moment, since steps with a draft and without one take
    another time each and give other numbers of tokens: short gaps do not show a late start."""
    if not (made := moments(arrivals)):
        return None
    last = len(made) - 1
    start, late_ns = (0, 0.0) if drafts else _start(made, last)
    requested = made[last].tokens if tokens is None else tokens
    until = made[start].tokens + requested - 1
    end = next((i for i, moment in enumerate(made) if moment.tokens >= until), last)
    if made[end].payload and end > start + 1:
        end -= 1
    return Window(made[start], made[end], requested, late_ns, end - start)


def common(answers: Sequence[Sequence[Arrival]], *, drafts: bool = False) -> list[Window] | None:
    """The part of each of several streams in which all of them decode; None where there is none. It
    begins when the last of them has its first token, and ends with the first that ends."""
    streams = [moments(arrivals) for arrivals in answers]
    windows = [window(arrivals, drafts=drafts) for arrivals in answers]
    parts: list[Window] = []
    begin_ns = max((w.start.at_ns for w in windows if w is not None), default=0)
    end_ns = min((made[-1].at_ns for made in streams if made), default=0)
    for made in streams:
        inside = [moment for moment in made if begin_ns <= moment.at_ns <= end_ns]
        if len(inside) < 2:
            return None
        parts.append(Window(inside[0], inside[-1], inside[-1].tokens - inside[0].tokens))
    return parts


def _token_ns(arrivals: Sequence[Arrival]) -> float:
    """The time of a token, from the second half of the answer."""
    if len(arrivals) < 2:
        return 0.0
    last = arrivals[-1]
    half = next(a for a in arrivals if 2 * a.tokens >= last.tokens)
    if half.tokens == last.tokens:
        half = arrivals[0]
    fresh = last.tokens - half.tokens
    return (last.at_ns - half.at_ns) / fresh if fresh else 0.0


def _start(made: Sequence[Moment], end: int) -> tuple[int, float]:
    """The first moment that is on time, and how late the first of all was, in nanoseconds. Within
    the first half of the tokens after it: where the gaps so far are short of as many typical gaps
    by the most."""
    gaps = [0.0, *(float(b.at_ns - a.at_ns) for a, b in itertools.pairwise(made))]
    tokens = [0, *(b.tokens - a.tokens for a, b in itertools.pairwise(made))]
    middle = (made[0].tokens + made[end].tokens) / 2
    candidates = [i for i in range(1, end) if made[i].tokens <= middle]
    first = len(candidates) + 1
    later = range(first, min(len(made), first + _GAPS_AT_MOST))
    if not candidates or len(later) < _GAPS_NEEDED:
        return 0, 0.0
    # An engine's steps take equally long, however many tokens each gives; chunks that are sent when
    # they are full take as long as they have tokens. What varies less is what it does.
    step_ns, step_deviation = _level([gaps[i] for i in later])
    token_ns, token_deviation = _level([gaps[i] / tokens[i] for i in later])
    by_step = step_deviation / step_ns <= token_deviation / token_ns
    typical, deviation = (step_ns, step_deviation) if by_step else (token_ns, token_deviation)

    def expected_gap(i: int) -> float:
        return typical if by_step else typical * tokens[i]

    # Never from a payload on, however late it is.
    earliest = 1 if made[0].payload and gaps[1] < _PAUSE * expected_gap(1) else 0
    late = tolerated = 0.0
    best = (0.0, earliest, expected_gap(1) - gaps[1] if earliest else 0.0)
    for count, i in enumerate(candidates[earliest:], 1):
        late += expected_gap(i) - gaps[i]
        tolerated += _LATE_SHARE * expected_gap(i)
        deviations = _LATE if count == 1 else _LATE_OF_SEVERAL
        excess = late - tolerated - deviations * deviation * math.sqrt(count)
        best = max(best, (excess, i, late))
    return best[1], max(best[2], 0.0)


def _level(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of what is left without the tenth at either end. (A median is
    not the mean where gaps alternate, as the ticks of a timer make them.)"""
    cut = len(values) // 10
    inner = sorted(values)[cut : len(values) - cut]
    middle = fmean(inner)
    return middle, 1.2533 * fmean(abs(value - middle) for value in inner)
