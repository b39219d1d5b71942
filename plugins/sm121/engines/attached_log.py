"""Check that an attached server writes to the log file that the user named.

The checks, in this order:

1. The last start in the log has the version and the model of the server.
2. The time of that start is the start time of the server's process, if /metrics shows one.
3. The suite sends a request with a random mark. A line with this mark must appear in the log.
4. The process that writes this line must be the process of the last start.
"""

import datetime
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import httpx

from sm121.core.server import Endpoint, Server
from sm121.core.waiting import until
from sm121.engines.attached_pages import entry_of, json_of
from sm121.engines.capabilities import Capabilities
from sm121.evidence import metrics, signatures
from sm121.evidence.kernel_path import KernelPath, read_log
from sm121.evidence.log_lines import read_raw_lines
from sm121.evidence.log_message import moment

#: The log must get a line about the request within this time, in seconds.
_WRITTEN_WITHIN_S = 3.0
#: The prefix of each line that vLLM's API server logs.
_PID = re.compile(r"\(\w*API_?Server\w* pid=(\d+)")
#: The minimum and maximum time from the start of a process to its first line with a timestamp.
_FIRST_LINE_AFTER = datetime.timedelta(seconds=-5)
_FIRST_LINE_BEFORE = datetime.timedelta(seconds=300)
#: The largest accepted difference between the clocks of two machines.
_CLOCKS = datetime.timedelta(minutes=2)
#: A start in the log that is farther than this from the start of the server's process is another
#: start. A time zone cannot explain the difference, because no time zone is farther from UTC than
#: 14 hours.
_FARTHEST_ZONE = datetime.timedelta(hours=15)
_HOW = (
    "give the log that this server writes (vLLM: it must contain access lines, so start it "
    "without --disable-uvicorn-access-log, or with --enable-log-requests)"
)
_HOW_TO_FOLLOW = (
    "it did not grow, so it may be only a copy of the log: give --container NAME, or docker logs "
    "-f NAME 2>&1 | sm121 run ... --server-log -, or the file that the server writes (vLLM: not "
    "with --disable-uvicorn-access-log)"
)
#: Advice by engine, in place of the advice above. llama-server logs no requests.
_HOW_BY_ENGINE = {
    "llama-cpp": (
        "llama-server logs no requests, so omit the log, or let the suite start it: --engine "
        "llama-cpp --engine-binary PATH"
    )
}
#: The maximum number of new bytes of the log to read.
_LARGEST_GROWTH_BYTES = 8 << 20


@dataclass(frozen=True)
class Doubt:
    """Why a log is not proven to be the log of an attached server.

    Attributes:
        text: The reason, with the name of the log.
        is_of_another: Whether the log is proven to be another server's.
    """

    text: str
    is_of_another: bool


@dataclass(frozen=True)
class _Reason:
    text: str
    is_of_another: bool = False


def doubt(server: Server, can: Capabilities, log: Path, name: str) -> Doubt | None:
    """Return why a log is not proven to be the log of an attached server; None if it is proven.

    Args:
        server: The attached server.
        can: The server's capabilities, from `detection.detect`.
        log: The file.
        name: The file as the user named it.
    """
    if can.engine not in signatures.known_engines():
        return Doubt(
            f"the server at {server.endpoint.base_url} does not report its engine, so its log "
            "cannot be read; name the engine with --engine",
            is_of_another=False,
        )
    try:
        path = read_log(log, can.engine)
        reason = (
            _wrong_release(path, can)
            or _wrong_model(path, server.endpoint)
            or _wrong_start(path, server.endpoint, log)
            or _does_not_grow(server.endpoint, log, path, can.engine)
        )
    except OSError as error:
        reason = _Reason(f"it cannot be read: {error.strerror or error}")
    if reason is None:
        return None
    if reason.is_of_another:
        text = f"{name}: expected the log of the server at {server.endpoint.base_url}, got the log "
        text += f"of another start: {reason.text}"
    else:
        text = f"{name} is not proven to be this server's: {reason.text}"
    return Doubt(text, reason.is_of_another)


def _wrong_release(path: KernelPath, can: Capabilities) -> _Reason | None:
    engine = can.engine
    version = can.version
    logged = path.log.version
    if logged is None:
        return _Reason(
            f"it has no start of {engine} (its beginning is missing, or another program wrote it)"
        )
    if version is None:
        return _Reason(f"the server does not report its version, the log shows {logged}")
    release = logged.partition("+")[0]
    if version in (logged, release):
        return None
    return _Reason(
        f"expected a log of {engine} {version}, got one of {logged}",
        is_of_another=version.partition("+")[0] != release,
    )


def _wrong_model(path: KernelPath, endpoint: Endpoint) -> _Reason | None:
    with endpoint.http(timeout_s=10.0) as http:
        entry = entry_of(json_of(http, "/v1/models"), endpoint.served_name) or {}
        loaded = json_of(http, "/props").get("model_path")  # only llama-server has this path
    names = {endpoint.served_name}
    # parent: the base model of an adapter
    for value in (entry.get("root"), entry.get("parent"), loaded):
        if isinstance(value, str):
            names.add(value)
    logged = [name for name in (path.log.served_model, path.log.model) if name is not None]
    if not logged:
        return _Reason("its last start names no model")
    if names.isdisjoint({*logged, *(Path(name).name for name in logged)}):
        return _Reason(
            f"expected a log of the model {endpoint.served_name}, got one of {logged[0]}",
            # If the log does not contain the served name, and the server does not report the path
            # of its model (`root`), both names may belong to one model: the log may contain the
            # path of the model, and the server an alias.
            is_of_another=path.log.served_model is not None or "root" in entry or bool(loaded),
        )
    return None


def _wrong_start(path: KernelPath, endpoint: Endpoint, log: Path) -> _Reason | None:
    """Compare the time of the log's last start with the start in /metrics.

    A log has no time zone. Servers and containers log in UTC or in the zone of their machine, so
    the times are read in UTC and in this process's zone, which the variable TZ sets.
    """
    started = metrics.total(endpoint.page("/metrics") or "", "process_start_time_seconds")
    if started is None:
        return None
    process_began = datetime.datetime.fromtimestamp(started, datetime.UTC)
    now = datetime.datetime.now(datetime.UTC)
    logged = None
    for zone in (datetime.UTC, None):  # None stands for the time zone of this process
        began_there = process_began.astimezone(zone).replace(tzinfo=None)
        now_there = now.astimezone(zone).replace(tzinfo=None)
        moments = (moment(line, now_there) for line in _last_start(path, log))
        stamps = [stamp for stamp in moments if stamp is not None]
        if not stamps:
            return None
        logged = stamps[0]
        is_first_line = _FIRST_LINE_AFTER <= logged - began_there <= _FIRST_LINE_BEFORE
        if is_first_line and stamps[-1] <= now_there + _CLOCKS:
            return None
    here = process_began.astimezone()
    began = f"the server's process began at {process_began:%F %T} UTC, {here:%F %T} here"
    text = f"the log's last start is of {logged}, {began}"
    assert logged is not None
    if abs(logged - process_began.replace(tzinfo=None)) > _FARTHEST_ZONE:
        return _Reason(text, is_of_another=True)
    return _Reason(
        f"{text}; if the server logs the time of another zone, set the variable TZ of the suite "
        "to that zone"
    )


def _last_start(path: KernelPath, log: Path) -> Iterator[str]:
    """Yield the lines of the log, beginning with the engine's last start."""
    begins = max(path.log.begins.values(), default=0)
    for raw in islice(read_raw_lines(log), begins, None):
        yield raw.decode("utf-8", "replace")


def _does_not_grow(endpoint: Endpoint, log: Path, path: KernelPath, engine: str) -> _Reason | None:
    """Send requests with a mark, and search for it in the new lines of the log."""
    mark = f"sm121-{uuid.uuid4().hex}"
    size_before = log.stat().st_size
    try:
        _send_marked(endpoint, mark)
    except httpx.HTTPError as error:
        why = f"{type(error).__name__}: {error}"
        return _Reason(f"the server answered no request of the suite ({why})")
    if not until(lambda: mark in _written(log, size_before), _WRITTEN_WITHIN_S, every_s=0.05):
        how = _HOW if log.stat().st_size > size_before else _HOW_TO_FOLLOW
        how = _HOW_BY_ENGINE.get(engine, how)
        return _Reason(
            f"it got no line about the requests that the suite sent to {endpoint.base_url}; {how}"
        )
    line = next(line for line in _written(log, size_before).splitlines() if mark in line)
    answered = _PID.search(line)
    starter = _first_pid(_last_start(path, log))
    if starter is None or answered is None or answered[1] == starter:
        return None  # one process wrote both, or the lines have no pid
    return _Reason(
        f"several servers write to it: process {starter} logged the last start, but process "
        f"{answered[1]} answered"
    )


def _first_pid(lines: Iterator[str]) -> str | None:
    for line in lines:
        match = _PID.search(line)
        if match is not None:
            return match[1]
    return None


def _send_marked(endpoint: Endpoint, mark: str) -> None:
    """Send a request with the mark in each part that any of the engines logs.

    Uvicorn logs the path with its query string, llama-server logs the path without the query
    string, and vLLM with ``--enable-log-requests`` logs the header X-Request-Id.
    """
    body = {"model": endpoint.served_name, "prompt": mark, "max_tokens": 1, "temperature": 0}
    with endpoint.http(timeout_s=60.0) as http:
        http.get("/v1/models", params={"sm121": mark})
        http.get(f"/v1/models/{mark}")
        http.post("/v1/completions", json=body, headers={"X-Request-Id": mark})


def _written(log: Path, size_before: int) -> str:
    """Return what was appended to the log after it had the given size; all if it was truncated."""
    size = log.stat().st_size
    with log.open("rb") as file:
        file.seek(size_before if size >= size_before else 0)
        return file.read(_LARGEST_GROWTH_BYTES).decode("utf-8", "replace")
