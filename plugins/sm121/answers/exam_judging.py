"""Judge the answers of an exam.

An answer is broken if no capable model would give it (empty, truncated, `!!!!`). It is a miss if it
is complete but not correct. A section may allow some misses, because a pattern may not cover all
correct phrases. Broken answers are never allowed.
"""

import re
from collections.abc import Sequence
from typing import Any

from sm121.answers import sanity
from sm121.answers.exam import ExamCall, Turn
from sm121.answers.exam_text import agrees, parsed, plain
from sm121.core.unmet import Fact


def broken(content: str | None, finish_reason: str) -> str | None:
    """Return why an answer is broken.

    Args:
        content: The content of the final message; None if there is none.
        finish_reason: The finish_reason of the answer.

    Returns:
        The reason; None if the answer is not broken.
    """
    if finish_reason != "stop":
        return str(Fact("finish_reason stop", f"{finish_reason} after {content!r:.200}"))
    if content is None or not content.strip():
        return str(Fact("a final message"))
    signs = sanity.signs(content)
    if signs:
        return str(Fact("an answer", f"{'; '.join(signs)} in {content!r:.200}"))
    return None


def miss(turn: Turn, content: str, unsure: re.Pattern[str] | None) -> str | None:
    """Return why an answer is a miss. The answer is known not to be broken.

    Args:
        turn: The conditions of a correct answer.
        content: The answer.
        unsure: The section's pattern of unsure answers; None if it has none.

    Returns:
        The reason; None if the answer is correct.
    """
    text = plain(content)
    observed = f"{content!r:.300}"
    if turn.right and not turn.right.search(text):
        return str(Fact(turn.right.pattern, observed))
    forbidden = [turn.wrong]
    if turn.is_judged:
        forbidden.append(unsure)
    for pattern in forbidden:
        if pattern is not None and pattern.search(text):
            return str(Fact(f"no match of {pattern.pattern}", observed))
    if turn.content is not None and not agrees(turn.content, parsed(content)):
        return str(Fact(f"{turn.content}", observed))
    return None


def met(waiting: Sequence[ExamCall], function: str, arguments: Any) -> ExamCall | None:
    """Return the expected call that matches an actual call; None if none matches.

    Args:
        waiting: The expected calls that have not been made yet.
        function: The name of the called function.
        arguments: The arguments of the call, parsed.
    """
    for call in waiting:
        if call.function == function and agrees(call.arguments, arguments):
            return call
    return None
