"""Read the lines in which a server regularly reports its rates and its number of requests.

vLLM prints such lines every ten seconds. If a server has run for days, ``docker logs --tail 200``
shows no other lines.
"""

import itertools
import re
from pathlib import Path

from sm121.core import data_file
from sm121.evidence import log_lines, log_message, signatures

#: The number of lines at the beginning of a file that are searched for a logger's line.
_SEARCHED_LINES = 20_000
#: A line of llama-server, which names a part of the server and a function, but no level.
_OF_LLAMA_SERVER = re.compile(r"(?:slot|srv|que|main) +[a-z_]+: ")


class ServingState(data_file.Record):
    """Numbers about requests in the server's log; None if no line reported the number."""

    generation_tok_s: float | None = None
    """The highest reported rate, in tokens per second over all running requests."""
    running: int | None = None
    """The number of running requests in that report."""
    accepted_length: float | None = None
    """The last reported number of tokens per step (more than 1 with speculative decoding)."""


def read_serving_state(log: Path, engine: str) -> ServingState | None:
    """Read the numbers that a server reported on its requests.

    Args:
        log: The log.
        engine: The engine, whose signatures find the lines (`signatures.known_engines`).

    Returns:
        The numbers; None if the log has no such line.

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
                continue  # the last request ended during the reported interval
            if state.generation_tok_s is None or value > state.generation_tok_s:
                state.generation_tok_s = value
                state.running = running
    if state == ServingState():
        return None
    return state


def compiled(log: Path, engine: str) -> list[str]:
    """Return the lines about kernels that were compiled during inference.

    Args:
        log: The log.
        engine: The engine, whose signatures find the lines (`signatures.known_engines`).

    Returns:
        The lines, cleaned and shortened.

    Raises:
        OSError: The file cannot be read.
        DataFileError: The engine has no signatures.
    """
    entries = signatures.load_signatures(engine).of("compiled")
    hints = [hint.encode() for entry in entries for hint in entry.hint]
    found: list[str] = []
    for raw in log_lines.read_raw_lines(log):
        if not any(hint in raw for hint in hints):
            continue
        line = log_message.clean(raw.decode("utf-8", errors="replace"))
        if any(entry.search(line) is not None for entry in entries):
            found.append(log_message.cut(line.text))
    return found


def has_log_lines(log: Path) -> bool:
    """Return whether a file looks like a log, because it has a line of a logger or a traceback.

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
