"""Count the tokens of a stream in which some tokens have no text of their own.

A server that sends one chunk for each token, and usage only at the end, can have fewer chunks with
text than tokens. llama-server (``server-context.cpp``, ``process_token``) has three such cases:

1. The token is not text (a control token). Its chunk is empty.
2. The token ends within a UTF-8 character. It has no chunk, and the chunk of the token that
   completes the character contains the text of both. An invalid character is sent as U+FFFD.
3. The last token ends within a character. Its text is never sent, and the chunk with the
   finish_reason arrives one step after the last text.

A missing token that is none of these is not counted, because a chunk may then have any number of
tokens, or the usage may be wrong.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from sm121.client.timed_answer import Arrival, Chunk, TimedAnswer

#: The maximum number of tokens that a character can take in addition to its last one. A UTF-8
#: character has up to four bytes.
_MORE_OF_A_CHARACTER = 3
#: A chunk is late because of a withheld token only if it arrives this fraction of a step late.
_LATE = 0.25
#: An empty chunk before the first text has a token only if the time to the next chunk differs from
#: a step by at most this fraction.
_AS_LONG = 0.5


@dataclass(frozen=True)
class _Place:
    """A chunk with which withheld tokens may have arrived."""

    #: Its index among the chunks of the answer.
    index: int
    #: By how many steps it arrived later than a chunk without withheld tokens.
    late_steps: float
    #: The maximum number of withheld tokens.
    at_most: int


def arrivals(answer: TimedAnswer) -> list[Arrival] | None:
    """Return the chunks with tokens of an answer that has usage only at its end.

    Args:
        answer: The answer.

    Returns:
        One arrival for each chunk with tokens; None if the text does not explain why the usage
        differs from the number of chunks with text, or if there is no usage.
    """
    plain = answer.arrivals("chunks")
    if not plain or answer.completion_tokens is None:
        return None
    if answer.completion_tokens == len(plain):
        return plain
    counts = _one_for_each_chunk(answer.chunks)
    missing = answer.completion_tokens - sum(counts.values())
    if missing < 0:
        return None
    for place in _places(answer.chunks, list(counts)):
        count = min(missing, place.at_most)
        counts[place.index] = counts.get(place.index, 0) + count
        missing -= count
    return _counted(answer.chunks, counts) if missing == 0 else None


def _one_for_each_chunk(chunks: Sequence[Chunk]) -> dict[int, int]:
    """Return a count of 1 for the index of each chunk with text, and of each empty one after it.

    An empty chunk before the first text may have no token. It counts if it comes one step before
    the next chunk.
    """
    counted: list[int] = []
    for index, chunk in enumerate(chunks):
        if chunk.text or (counted and not chunk.finish):
            counted.append(index)
    step_ns = _step_ns(chunks, counted)
    for index in reversed(range(counted[0])):
        gap_ns = chunks[index + 1].at_ns - chunks[index].at_ns
        if abs(gap_ns - step_ns) > _AS_LONG * step_ns:
            break
        counted.insert(0, index)
    return dict.fromkeys(counted, 1)


def _step_ns(chunks: Sequence[Chunk], counted: Sequence[int]) -> float:
    """Return the median time between two of the counted chunks; 0 for a single one."""
    stamps = [chunks[index].at_ns for index in counted]
    gaps = [after - before for before, after in itertools.pairwise(stamps)]
    return median(gaps) if gaps else 0.0


def _places(chunks: Sequence[Chunk], counted: Sequence[int]) -> list[_Place]:
    """Return where withheld tokens may have arrived: the latest chunks first, the first one last.

    The time of the first chunk shows nothing. Tokens there do not count in a decode rate.
    """
    step_ns = _step_ns(chunks, counted)
    places: list[_Place] = []
    if step_ns:
        for before, index in itertools.pairwise(counted):
            gap_ns = chunks[index].at_ns - chunks[before].at_ns
            most = _MORE_OF_A_CHARACTER * chunks[index].wide
            places.append(_place(index, gap_ns / step_ns - 1.0, most))
        last = len(chunks) - 1
        if counted[-1] < last and chunks[last].finish:
            late_ns = chunks[last].at_ns - chunks[counted[-1]].at_ns
            places.append(_place(last, late_ns / step_ns, _MORE_OF_A_CHARACTER))
    places = [place for place in places if place.late_steps >= _LATE]
    places.sort(key=lambda place: place.late_steps, reverse=True)
    first = counted[0]
    return [*places, _Place(first, 0.0, _MORE_OF_A_CHARACTER * chunks[first].wide)]


def _place(index: int, late_steps: float, most: int) -> _Place:
    """Return a place with at most one token for each step by which it is late, and at least one."""
    return _Place(index, late_steps, min(most, max(1, round(late_steps))))


def _counted(chunks: Sequence[Chunk], counts: Mapping[int, int]) -> list[Arrival]:
    """Return an arrival for each chunk whose count is not 0."""
    made: list[Arrival] = []
    total = 0
    size = 0
    for index, chunk in enumerate(chunks):
        size += chunk.size
        count = counts.get(index, 0)
        if count:
            total += count
            made.append(Arrival(chunk.at_ns, total, size))
            size = 0
    return made
