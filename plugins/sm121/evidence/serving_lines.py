"""What a server's log says of its requests while it serves: the lines that vLLM prints every ten
seconds are all that ``docker logs --tail 200`` has of a server that runs for days."""

import itertools
from pathlib import Path

from sm121.core import data_file
from sm121.evidence import log_lines, signatures

_LOOKED_AT = 20_000  # lines in which a log shows that it is one


class ServingState(data_file.Record):
    """The requests of a log, as the server counts them. None: no line says it."""

    generation_tok_s: float | None = None
    """The most tokens a second that one line reports, over all of its requests."""
    running: int | None = None
    """Requests that ran then."""
    accepted_length: float | None = None
    """Tokens of a step with speculation, of the last line that has it."""


def read(log: Path, engine: str) -> ServingState | None:
    """The lines of a log about its requests.

    Args:
        log: The file.
        engine: Whose signatures find the lines (`signatures.known_engines`).

    Returns:
        What they say together; None where there is no such line.

    Raises:
        OSError: The file cannot be read.
    """
    entries = signatures.load_signatures(engine).of("generation_rate", "accepted_length")
    hints = [hint.encode() for entry in entries for hint in entry.hint]
    state = ServingState()
    for raw in log_lines.read_raw_lines(log):
        if not any(hint in raw for hint in hints):
            continue
        line = log_lines.clean(raw.decode("utf-8", errors="replace"))
        for entry in entries:
            match = entry.search(line)
            if match is None:
                continue
            value = float(match["value"])
            if entry.field == "accepted_length":
                state.accepted_length = value
                continue
            running = int(match["running"])
            if running == 0:
                continue  # the last request ended within these ten seconds
            if state.generation_tok_s is None or value > state.generation_tok_s:
                state.generation_tok_s = value
                state.running = running
    return state if state != ServingState() else None


def has_log_lines(log: Path) -> bool:
    """Whether a file has a line of a logger or a stack, as a log of any engine has."""
    for raw in itertools.islice(log_lines.read_raw_lines(log), _LOOKED_AT):
        line = log_lines.clean(raw.decode("utf-8", errors="replace"))
        if line.level is not None or line.process or log_lines.is_traceback_opening(line):
            return True
    return False
