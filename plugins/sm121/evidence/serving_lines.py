"""The lines of a server's log about its requests while it serves.

vLLM prints such lines every ten seconds. Of a server that runs for days, ``docker logs --tail 200``
has no other lines.
"""

import itertools
import re
from pathlib import Path

from sm121.core import data_file
from sm121.evidence import log_lines, log_message, signatures

#: Lines of a file that are searched for one of a logger.
_SEARCHED_LINES = 20_000
#: A line of llama-server, whose logger writes no level: the part of the server and a function.
_OF_LLAMA_SERVER = re.compile(r"(?:slot|srv|que|main) +[a-z_]+: ")


class ServingState(data_file.Record):
    """The requests of a log, as the server counts them. None: no line has the number."""

    generation_tok_s: float | None = None
    """The most tokens a second that one line reports, over all of its requests."""
    running: int | None = None
    """Requests that ran then."""
    accepted_length: float | None = None
    """Tokens of a step with speculation, of the last line that has it."""


def read(log: Path, engine: str) -> ServingState | None:
    """Read the lines of a log about its requests.

    Args:
        log: The file.
        engine: The engine whose signatures find the lines (`signatures.known_engines`).

    Returns:
        The numbers of all lines; None if the log has no such line.

    Raises:
        OSError: The file cannot be read.
        DataFileError: The engine has no signatures.
    """
    entries = signatures.load_signatures(engine).of("generation_rate", "accepted_length")
    hints: list[bytes] = []
    for entry in entries:
        hints += [hint.encode() for hint in entry.hint]
    state = ServingState()
    for raw in log_lines.read_raw_lines(log):
        if not any(hint in raw for hint in hints):
            continue
        line = log_message.clean(raw.decode("utf-8", errors="replace"))
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
    if state == ServingState():
        return None
    return state


def has_log_lines(log: Path) -> bool:
    """Return whether a file has a line of a logger or a stack, as a log of any engine has.

    Args:
        log: The file. Its first 20,000 lines are searched.

    Raises:
        OSError: The file cannot be read.
    """
    for raw in itertools.islice(log_lines.read_raw_lines(log), _SEARCHED_LINES):
        line = log_message.clean(raw.decode("utf-8", errors="replace"))
        if line.level is not None or line.process or log_message.is_traceback_opening(line):
            return True
        if _OF_LLAMA_SERVER.match(line.text):
            return True
    return False
