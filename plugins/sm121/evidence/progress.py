"""How far a start is, from the lines that the server prints meanwhile."""

from __future__ import annotations

from functools import cache

from sm121.evidence.log_lines import clean
from sm121.evidence.signatures import Signature, load_signatures


@cache
def _phases(engine: str) -> tuple[Signature, ...]:
    return load_signatures(engine).of("progress")


def startup_progress(line: str, engine: str = "vllm") -> str | None:
    """The phase that a start is in by this line, such as ``loading weights (33 %)``; None when it
    tells none.

    Percentages are the server's own. Raises DataFileError when nothing is known of `engine`.
    """
    message = clean(line)
    for phase in _phases(engine):
        match = phase.search(message)
        if match is None:
            continue
        groups = match.groupdict()
        name = str(phase.value)
        if groups.get("percent"):
            return f"{name} ({groups['percent']} %)"
        if groups.get("done") and groups.get("total"):
            return f"{name} ({groups['done']} of {groups['total']})"
        return name
    return None
