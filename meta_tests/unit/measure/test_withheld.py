"""Tokens without a text of their own are counted, and a wrong usage is not. No time is measured."""

import itertools
import json

import pytest

from sm121.client.timed_answer import TimedAnswer, read_answer
from sm121.measure import timing, validity
from sm121.measure.validity import Findings


def _event(text: str, *, counted: int | None = None, finish: str | None = None) -> bytes:
    whole = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    if counted is not None:
        whole["usage"] = {"prompt_tokens": 4, "completion_tokens": counted}
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


def withheld(*chunks: tuple[float, str], usage: int) -> TimedAnswer:
    """Return an answer like llama-server's: one chunk a token, and usage with the finish_reason.

    The chunks are (steps of 10 ms since the previous one, text). The last one has the
    finish_reason."""
    made = TimedAnswer(0, status=200, asked_tokens=usage, asked_prompt=4)
    stamps = itertools.accumulate(int(steps * 1e7) for steps, _ in chunks)
    last = len(chunks) - 1
    events = [_event(text) for _, text in chunks[:last]]
    events.append(_event(chunks[last][1], counted=usage, finish="length"))
    read_answer(made, zip(stamps, events, strict=True))
    return made


WORD = (1, " a")
END = (0, "")


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        pytest.param([*[WORD] * 6, END], [1, 2, 3, 4, 5, 6], id="one chunk a token"),
        pytest.param(
            [*[WORD] * 4, (2, " é"), WORD, END], [1, 2, 3, 4, 6, 7], id="half a character"
        ),
        pytest.param(
            [*[WORD] * 4, (4, "😀"), WORD, END], [1, 2, 3, 4, 8, 9], id="a quarter of a character"
        ),
        pytest.param(
            [WORD, (1, "é"), WORD, (2, "� b"), (1.1, "é"), END], [1, 2, 3, 5, 6],
            id="an invalid character among others",
        ),
        pytest.param([*[WORD] * 3, (1, ""), WORD, END], [1, 2, 3, 4, 5], id="a control token"),
        pytest.param([(9, ""), *[WORD] * 3, END], [1, 2, 3, 4], id="a control token first"),
        pytest.param([*[WORD] * 5, (1, "")], [1, 2, 3, 4, 5, 6], id="half a character at the end"),
        pytest.param([(2, "é"), *[WORD] * 3, END], [2, 3, 4, 5], id="half a character first"),
    ],
)  # fmt: skip
def test_tokens_without_a_text_of_their_own_are_tokens(chunks, tokens):
    """llama-server withholds half of a character until the next token, and a control token's
    text."""
    made = withheld(*chunks, usage=tokens[-1])
    assert timing.clock_of([made]) == "usage"
    arrived = timing.arrivals(made, "usage")
    assert [arrival.tokens for arrival in arrived] == tokens
    assert timing.decode_rate(made, "usage") == pytest.approx(100, rel=0.02)
    findings = Findings()
    validity.check_answers([made], "usage", findings)
    assert not findings.invalid


@pytest.mark.parametrize(
    ("chunks", "usage"),
    [
        pytest.param([*[WORD] * 6, END], 7, id="one more"),
        pytest.param([*[WORD] * 6, END], 5, id="one less"),
        pytest.param([*[WORD] * 3, (2, " b"), WORD, END], 6, id="late, but no character"),
        pytest.param([*[WORD] * 3, (1, "é"), WORD, END], 6, id="a character, but in time"),
        pytest.param([*[WORD] * 3, (2, "é"), WORD, END], 7, id="one more than the late steps"),
        pytest.param([*[WORD] * 5, (1, "")], 9, id="more than a character has at the end"),
        pytest.param([(2, ""), (9, "a"), *[WORD] * 4, END], 6, id="an event before the prompt"),
        pytest.param([(2, ""), (0, "a"), *[WORD] * 4, END], 6, id="an event with the first text"),
        pytest.param([(2, " a" * 8), *[WORD] * 5, END], 13, id="several in the first chunk"),
    ],
)
def test_a_usage_that_the_text_does_not_explain_is_no_count(chunks, usage):
    made = withheld(*chunks, usage=usage)
    assert timing.clock_of([made]) == "chunks"
    findings = Findings()
    validity.check_answers([made], "chunks", findings)
    assert [item.reason for item in findings.invalid] == ["chunk_clock"]
    honest = withheld(*[WORD] * usage, END, usage=usage)
    findings = Findings()
    validity.check_answers([honest, made], "usage", findings)
    (item,) = findings.invalid
    chunks_with_text = sum(bool(text) for _, text in chunks)
    assert str(item).startswith(
        f"token_accounting: {chunks_with_text} chunks with text, usage reports {usage} tokens"
    )
