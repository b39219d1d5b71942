"""What `timed_server.py` sends: its events, and when they are held back."""

import re

VOCABULARY = 199_998
#: When an event is due (None: never), its bytes, the tokens in it.
Event = tuple[int | None, bytes, int]


def bundled(events: list[Event], burst: int) -> list[Event]:
    """Events held back and sent together: so many at a time after the first, or all of them."""
    if burst == 1:
        return events
    first, rest = (events[:1], events[1:]) if burst else ([], events)
    size = burst or len(rest)
    for start in range(0, len(rest), size):
        group = rest[start : start + size]
        first.extend((group[-1][0], payload, tokens) for _, payload, tokens in group)
    return first


def late(events: list[Event], first: int, leak: float) -> list[Event]:
    """The first event not before its time, and those behind it as soon as they may come: at once,
    or after steps that are only a share shorter than they should be."""
    made: list[Event] = []
    sent, before = first, events[0][0] or 0
    for due, payload, tokens in events:
        due = due or 0
        step = int((1.0 - leak) * (due - before)) if leak else 0
        sent, before = (max(due, sent + step) if made else max(due, first)), due
        made.append((sent, payload, tokens))
    return made


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def id_of(word: str) -> int:
    found = re.fullmatch(r"w(\d+)", word)
    return int(found.group(1)) if found else sum(word.encode()) % VOCABULARY
