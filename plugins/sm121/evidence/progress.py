"""How far a start is, from the lines that the server prints meanwhile."""

from sm121.evidence.log_lines import clean
from sm121.evidence.signatures import known_engines, load_signatures


def startup_progress(line: str, engine: str = "vllm") -> str | None:
    """The phase of a start by this line, such as ``loading weights (33 %)``, or None. An engine
    without signatures of its own is read as vLLM is."""
    message = clean(line)
    for phase in load_signatures(engine if engine in known_engines() else "vllm").of("progress"):
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
