"""Determine from which part of an answer a decode rate is computed.

The first chunk of an answer can be late, because it carries a payload, or because it waited for
other requests. The following tokens then arrive together or too soon, and the rate would be too
high. Tokens that arrived together therefore count as one `Moment`, and the measured part begins at
the first moment that is on time. A pause of the server after the first chunk is part of the rate.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from sm121.client.timed_answer import Arrival

#: If chunks arrive within this fraction of a token's time, they count as sent together.
_TOGETHER = 0.25
#: A chunk carries a payload if it is larger than the sum of this many typical chunks,
#: `_PAYLOAD_BYTES`, and `_PAYLOAD_TOKEN_BYTES` for each of its tokens.
_PAYLOAD_TIMES = 4.0
#: A term of the sum in `_PAYLOAD_TIMES`, in bytes.
_PAYLOAD_BYTES = 1024
#: A term of the sum in `_PAYLOAD_TIMES`, in bytes per token.
_PAYLOAD_TOKEN_BYTES = 64
#: One gap proves that the first moment was late if the gap is shorter than a typical one by more
#: than this many standard deviations.
_LATE = 3.0
#: The sum of several gaps proves that the first moment was late if the sum is shorter than typical
#: by more than this many standard deviations. The number is larger than `_LATE`, because one of
#: several gaps may be short by chance.
_LATE_OF_SEVERAL = 4.0
#: This fraction of each gap is tolerated as lateness of the first moment.
_LATE_SHARE = 0.01
#: After a payload, a gap of at least this many typical gaps counts as a pause of the server, which
#: is part of the rate.
_PAUSE = 1.5
#: The minimum number of gaps for estimating the typical gap.
_GAPS_NEEDED = 4
#: The maximum number of gaps for this estimate.
_GAPS_AT_MOST = 32
#: Standard deviation of a normal distribution divided by its mean absolute deviation.
_DEVIATION = 1.2533


@dataclass(frozen=True, slots=True)
class Moment:
    """Chunks that arrived together, counted as one arrival."""

    #: When the last of the chunks arrived, in nanoseconds.
    at_ns: int
    #: The number of tokens of the answer up to and including the chunks.
    tokens: int
    #: The number of chunks of the answer up to and including these chunks.
    chunks: int
    #: Whether one of these chunks carries a payload.
    payload: bool


@dataclass(frozen=True, slots=True)
class Window:
    """The part of an answer from which a rate is computed."""

    start: Moment
    end: Moment
    #: The number of tokens for which the rate was requested.
    requested: int
    #: By how much the excluded moments before the start were late, in nanoseconds; 0 if there are
    #: none.
    late_ns: float = 0.0
    #: The number of moments after the start.
    steps: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens after the start."""
        return self.end.tokens - self.start.tokens

    @property
    def ns(self) -> int:
        """The time from the start to the end, in nanoseconds."""
        return self.end.at_ns - self.start.at_ns

    @property
    def rate(self) -> float:
        """The rate in tokens per second; 0 for an empty window."""
        if self.ns <= 0:
            return 0.0
        return self.tokens / self.ns * 1e9

    @property
    def enough(self) -> bool:
        """Whether the window has at least half of the requested tokens."""
        return self.ns > 0 and 2 * self.tokens >= self.requested - 1


def moments(arrivals: Sequence[Arrival]) -> list[Moment]:
    """Group the chunks of an answer into moments. Chunks that arrived together form one moment.

    Args:
        arrivals: The chunks with tokens, in their order.
    """
    made: list[Moment] = []
    typical = median(arrival.size for arrival in arrivals) if arrivals else 0.0
    together = _TOGETHER * _token_ns(arrivals)
    before = 0
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
    """Return the part of an answer from which a rate is computed.

    The start does not depend on `tokens`. If first tokens are excluded because they came with a
    late first chunk, the part ends later by as many tokens, if the answer has them.

    Args:
        arrivals: The chunks with tokens, in their order.
        tokens: The number of tokens of the part; None for the whole answer.
        drafts: Whether the server uses speculative decoding. If so, the part starts at the first
            moment. Steps with and without a draft differ in time and tokens, so that a short gap
            does not prove a late start.

    Returns:
        The part; None if the answer has no token.
    """
    made = moments(arrivals)
    if not made:
        return None
    last = len(made) - 1
    start = _ON_TIME if drafts else _start(made, last)
    requested = made[last].tokens if tokens is None else tokens
    until = made[start.place].tokens + requested - 1
    end = last
    for index, moment in enumerate(made):
        if moment.tokens >= until:
            end = index
            break
    if made[end].payload and end > start.place + 1:
        end -= 1
    return Window(made[start.place], made[end], requested, start.late_ns, end - start.place)


def common(answers: Sequence[Sequence[Arrival]], *, drafts: bool = False) -> list[Window] | None:
    """Return the part of each stream in which all streams decode.

    It begins when the last stream has its first token, and ends when the first stream ends.

    Args:
        answers: For each stream, its chunks with tokens.
        drafts: As in `window`.

    Returns:
        One window for each stream; None if the streams never decode together.
    """
    streams = []
    begins_ns = []
    ends_ns = []
    for arrivals in answers:
        made = moments(arrivals)
        streams.append(made)
        if made:
            ends_ns.append(made[-1].at_ns)
        part = window(arrivals, drafts=drafts)
        if part is not None:
            begins_ns.append(part.start.at_ns)
    begin_ns = max(begins_ns, default=0)
    end_ns = min(ends_ns, default=0)
    parts: list[Window] = []
    for made in streams:
        inside = [moment for moment in made if begin_ns <= moment.at_ns <= end_ns]
        if len(inside) < 2:
            return None
        parts.append(Window(inside[0], inside[-1], inside[-1].tokens - inside[0].tokens))
    return parts


def _token_ns(arrivals: Sequence[Arrival]) -> float:
    """Return the mean time per token in the second half of the answer, in nanoseconds."""
    if len(arrivals) < 2:
        return 0.0
    last = arrivals[-1]
    half = next(arrival for arrival in arrivals if 2 * arrival.tokens >= last.tokens)
    if half.tokens == last.tokens:
        half = arrivals[0]
    fresh = last.tokens - half.tokens
    if not fresh:
        return 0.0
    return (last.at_ns - half.at_ns) / fresh


class _Start(NamedTuple):
    """The index of the first moment that is on time, and the delays in ns of those before it."""

    place: int
    late_ns: float


#: An answer whose first moment is on time.
_ON_TIME = _Start(0, 0.0)


class _Level(NamedTuple):
    """The trimmed mean and the standard deviation of some gaps."""

    mean: float
    deviation: float

    @property
    def spread(self) -> float:
        """The standard deviation as a fraction of the mean."""
        return self.deviation / self.mean


def _start(made: Sequence[Moment], end: int) -> _Start:
    """Return the first moment that is on time, within the first half of the tokens.

    It is the moment at which the sum of the gaps so far is most below the sum of as many typical
    gaps, if this difference exceeds the noise.
    """
    gaps = [0.0]
    tokens = [0]
    for before, after in itertools.pairwise(made):
        gaps.append(float(after.at_ns - before.at_ns))
        tokens.append(after.tokens - before.tokens)
    middle = (made[0].tokens + made[end].tokens) / 2
    candidates = [index for index in range(1, end) if made[index].tokens <= middle]
    first = len(candidates) + 1
    later = range(first, min(len(made), first + _GAPS_AT_MOST))
    if not candidates or len(later) < _GAPS_NEEDED:
        return _ON_TIME
    # If a chunk is one step of the engine, its time does not depend on its number of tokens. If a
    # chunk is sent when it is full, its time is proportional to that number. Assume the case in
    # which the gaps vary less.
    by_step = _level([gaps[index] for index in later])
    by_token = _level([gaps[index] / tokens[index] for index in later])
    is_by_step = by_step.spread <= by_token.spread
    typical = by_step if is_by_step else by_token

    def expected_gap(index: int) -> float:
        return typical.mean if is_by_step else typical.mean * tokens[index]

    best_excess = 0.0
    best = _ON_TIME
    # Never start at a payload, even if it is not late.
    if made[0].payload and gaps[1] < _PAUSE * expected_gap(1):
        best = _Start(1, expected_gap(1) - gaps[1])
    late_ns = 0.0
    tolerated_ns = 0.0
    for count, index in enumerate(candidates[best.place :], 1):
        late_ns += expected_gap(index) - gaps[index]
        tolerated_ns += _LATE_SHARE * expected_gap(index)
        deviations = _LATE if count == 1 else _LATE_OF_SEVERAL
        noise_ns = deviations * typical.deviation * math.sqrt(count)
        excess = late_ns - tolerated_ns - noise_ns
        if excess >= best_excess:
            best_excess = excess
            best = _Start(index, late_ns)
    return _Start(best.place, max(best.late_ns, 0.0))


def _level(values: Sequence[float]) -> _Level:
    """Return mean and standard deviation without the lowest and highest tenth of the values.

    The median is not used, because it is far from the mean if gaps alternate between two values, as
    with the ticks of a timer.
    """
    cut = len(values) // 10
    inner = sorted(values)[cut : len(values) - cut]
    middle = fmean(inner)
    return _Level(middle, _DEVIATION * fmean(abs(value - middle) for value in inner))
