"""Check rules that each greedy completion must satisfy, without comparing it with another run."""

import math
import re
from collections.abc import Sequence

from sm121.client.completion_json import Completion, Prompt, ids_of
from sm121.core.unmet import Fact

#: Two evaluations of one log-softmax in float32 differ by less than this.
_ROUNDING = 1e-3
#: A control token in a text.
SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>")
#: The character that replaces invalid UTF-8, which occurs if a token ends in the middle of a
#: character.
_REPLACEMENT = "\ufffd"


def malformed(
    answer: Completion,
    tokens: int,
    prompt: Prompt = "",
    *,
    may_end: bool = False,
    banned: bool = False,
    end_banned: bool = False,
) -> Fact | None:
    """Check that a greedy answer fits its request, and that its fields are consistent.

    The checks cover the numbers of ids, of log-probabilities and of completion tokens in usage, the
    finish_reason, the prompt's ids and their number in usage, and the log-probabilities.

    Args:
        answer: The answer.
        tokens: The number of tokens that the request sets.
        prompt: The prompt of the request. If it is a text, the prompt's ids are not compared.
        may_end: Whether the answer may end before the limit, with the finish_reason stop.
        banned: Whether the request forbids the end-of-text token (``min_tokens``). If so, that
            token may be likelier than the generated one.
        end_banned: Whether the engine may ban the end token for ``ignore_eos``; see
            `wrong_positions`.

    Returns:
        The first error, or None.
    """
    fault = _wrong_length(answer, tokens, may_end=may_end)
    if fault is not None:
        return fault
    prompt_ids = answer.prompt_ids
    if prompt_ids is not None:
        if not isinstance(prompt, str) and prompt_ids != prompt:
            return Fact("the ids of the prompt", _first_difference(prompt, prompt_ids))
        if answer.prompt_tokens not in (None, len(prompt_ids)):
            return Fact(f"usage of {len(prompt_ids)} prompt tokens", f"{answer.prompt_tokens}")
    return wrong_positions(answer, banned=banned, end_banned=end_banned)


def wrong_positions(
    answer: Completion, *, banned: bool = False, end_banned: bool = False
) -> Fact | None:
    """Check that the log-probabilities of a greedy answer belong to its tokens and are the highest.

    Args:
        answer: The answer.
        banned: Whether a token may be more likely than the generated one.
        end_banned: Whether one token, the same throughout the answer, may be more likely.

    Returns:
        The first error; None if there is none, or if the answer has no log-probabilities.
    """
    if answer.positions is None:
        return None
    fault = _wrong_names(answer)
    if fault is not None:
        return fault
    likelier: set[str] = set()
    for index, position in enumerate(answer.positions):
        value = position.log_probability
        best = max(position.top.values(), default=-math.inf)
        if not value <= _ROUNDING or math.isinf(value):
            return Fact("a log-probability", f"{value}", f"token {index}")
        if best > value + _ROUNDING and not banned:
            likelier |= {name for name, log in position.top.items() if log > value + _ROUNDING}
            if end_banned and len(likelier) == 1:
                continue
            evidence = f"{value:.6g}, and another has {best:.6g}"
            return Fact("the likeliest token", position.token, f"token {index}", evidence=evidence)
    return None


def _wrong_length(answer: Completion, tokens: int, *, may_end: bool) -> Fact | None:
    """Compare the numbers of tokens and finish_reason."""
    lengths: dict[str, int] = {}
    if answer.ids is not None:
        lengths["ids"] = len(answer.ids)
    if answer.positions is not None:
        lengths["log-probabilities"] = len(answer.positions)
    if answer.completion_tokens is not None:
        lengths["usage"] = answer.completion_tokens
    fits = all(count <= tokens for count in lengths.values())
    counts = set(lengths.values())
    if not (may_end and answer.finish_reason == "stop" and fits):
        counts.add(tokens)
    if len(counts) > 1:
        observed = ", ".join(f"{count} {name}" for name, count in lengths.items())
        return Fact(f"{tokens} tokens", f"{observed}, finish_reason {answer.finish_reason}")
    if answer.finish_reason != "length" and not may_end:
        return Fact("finish_reason length", f"{answer.finish_reason}")
    return None


def _wrong_names(answer: Completion) -> Fact | None:
    """Compare the tokens in the log-probabilities with the answer's ids, or else with its text."""
    positions = answer.positions or ()
    named = ids_of(positions)
    if named is not None:
        if answer.ids is not None and named != answer.ids:
            difference = _first_difference(answer.ids, named)
            return Fact("log-probabilities of the tokens that were generated", difference)
        return None
    text = "".join(position.token for position in positions)
    if _REPLACEMENT in text + answer.text:
        return None
    if SPECIAL_TOKEN.sub("", text) != SPECIAL_TOKEN.sub("", answer.text):
        return Fact(f"log-probabilities of the text {answer.text!r}", f"{text!r}")
    return None


def _first_difference(required: Sequence[int], observed: Sequence[int]) -> str:
    index = 0
    while index < min(len(required), len(observed)) and required[index] == observed[index]:
        index += 1
    return f"{_item(observed, index)} in place of {_item(required, index)} at {index}"


def _item(ids: Sequence[int], index: int) -> str:
    return str(ids[index]) if index < len(ids) else "the end"
