"""Whether a log is the one that an attached server writes, now: any file can be given as one. And a
copy of it, which rotation, truncation and removal do not touch."""

import datetime
import os
import re
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import httpx

from sm121.core.redaction import redact_file
from sm121.core.server import Endpoint, Server
from sm121.core.waiting import until
from sm121.engines.attached import json_of
from sm121.engines.attached_life import entry_of
from sm121.engines.capabilities import Capabilities
from sm121.evidence import metrics, signatures
from sm121.evidence.kernel_path import KernelPath, read_log
from sm121.evidence.log_lines import read_raw_lines
from sm121.evidence.log_message import moment

#: A line is in the file so soon after what it speaks of.
_WRITTEN_WITHIN_S = 3.0
#: In front of each line of vLLM.
_PID = re.compile(r"\(\w*API_?Server\w* pid=(\d+)")
#: From the start of a process to the first line with a time.
_FIRST_LINE = (datetime.timedelta(seconds=-5), datetime.timedelta(seconds=300))
#: How far the clocks of two machines may be apart.
_CLOCKS = datetime.timedelta(minutes=2)
_HOW = (
    "give the log that this server writes (vLLM: with its lines of access, so without "
    "--disable-uvicorn-access-log, or with --enable-log-requests)"
)
#: A longer log is not copied: it is read where it lies.
_COPIED_BYTES = 256 << 20
_BLOCK_BYTES = 1 << 20
#: So much of what was written since the mark is read.
_LARGEST_GROWTH_BYTES = 8 << 20


def doubt(server: Server, can: Capabilities, log: Path, name: str) -> str | None:
    """Why a log proves nothing about an attached server; None when it is that server's. Version and
    model must be the server's, the start in it that of the server's process where the server tells
    it, and the log must have the mark of a request that is sent here. `can`: of `detection.detect`;
    `name`: what the user named the log by."""
    if can.engine not in signatures.known_engines():
        return (
            f"the server at {server.endpoint.base_url} does not say which engine it is, so that "
            "its log cannot be read; name it with --engine"
        )
    try:
        path = read_log(log, can.engine)
        reason = (
            _wrong_release_or_model(path, server.endpoint, can)
            or _wrong_start(path, server.endpoint, log)
            or _does_not_grow(server.endpoint, log, path)
        )
    except OSError as error:
        reason = f"it cannot be read: {error.strerror or error}"
    return f"{name} is not proven to be this server's: {reason}" if reason else None


def _wrong_release_or_model(path: KernelPath, endpoint: Endpoint, can: Capabilities) -> str | None:
    engine, version = can.engine, can.version
    if path.version is None:
        return f"it has no start of {engine} (its beginning is cut off, or it is another program's)"
    if version is None:
        return f"the server does not tell its version, the log says {path.version}"
    if version not in (path.version, path.version.partition("+")[0]):
        return f"the log is of {engine} {path.version}, the server is {version}"
    with endpoint.http(timeout_s=10.0) as http:
        entry = entry_of(json_of(http, "/v1/models"), endpoint.served_name) or {}
    names = {endpoint.served_name, *(root for root in [entry.get("root")] if isinstance(root, str))}
    logged = [name for name in (path.served_model, path.model) if name is not None]
    if not logged:
        return "its last start names no model"
    if not names & {*logged, *(Path(name).name for name in logged)}:
        return f"the log is of the model {logged[0]}, the server has {endpoint.served_name}"
    return None


def _wrong_start(path: KernelPath, endpoint: Endpoint, log: Path) -> str | None:
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
    for zone in (datetime.UTC, None):  # None: the zone of this process
        began_there = process_began.astimezone(zone).replace(tzinfo=None)
        now_there = now.astimezone(zone).replace(tzinfo=None)
        moments = (moment(line, now_there) for line in _last_start(path, log))
        stamps = [stamp for stamp in moments if stamp is not None]
        if not stamps:
            return None
        logged, last = stamps[0], stamps[-1]
        fits = _FIRST_LINE[0] <= logged - began_there <= _FIRST_LINE[1]
        if fits and last <= now_there + _CLOCKS:
            return None
    here = process_began.astimezone()
    return (
        f"the log's last start is of {logged}, the server's process began at "
        f"{process_began:%F %T} UTC, {here:%F %T} here; if the server logs the time of another "
        "zone, set the variable TZ of the suite to that zone"
    )


def _last_start(path: KernelPath, log: Path) -> Iterator[str]:
    begins = max(path.begins.values(), default=0)
    return (raw.decode("utf-8", "replace") for raw in islice(read_raw_lines(log), begins, None))


def _does_not_grow(endpoint: Endpoint, log: Path, path: KernelPath) -> str | None:
    """Send requests with a mark, and look for it in what the log gets."""
    mark = f"sm121-{uuid.uuid4().hex}"
    size_before = log.stat().st_size
    try:
        _send_marked(endpoint, mark)
    except httpx.HTTPError as error:
        return f"no request of ours was answered ({type(error).__name__}: {error})"
    if not until(lambda: mark in _written(log, size_before), _WRITTEN_WITHIN_S, every_s=0.05):
        return f"no line of it follows requests that are sent to {endpoint.base_url}; {_HOW}"
    line = next(line for line in _written(log, size_before).splitlines() if mark in line)
    pids = (_PID.search(each) for each in _last_start(path, log))
    starter, answered = next(filter(None, pids), None), _PID.search(line)
    if starter is None or answered is None or answered[1] == starter[1]:
        return None  # they are the same, or lines have no pid
    return (
        f"several servers write it: the last start in it is of process {starter[1]}, "
        f"and process {answered[1]} answered"
    )


def _send_marked(endpoint: Endpoint, mark: str) -> None:
    """Send the mark where some engine logs it.

    Uvicorn logs the query of a path, llama-server the path without it, and vLLM with
    ``--enable-log-requests`` the header X-Request-Id.
    """
    body = {"model": endpoint.served_name, "prompt": mark, "max_tokens": 1, "temperature": 0}
    with endpoint.http(timeout_s=60.0) as http:
        http.get("/v1/models", params={"sm121": mark})
        http.get(f"/v1/models/{mark}")
        http.post("/v1/completions", json=body, headers={"X-Request-Id": mark})


def _written(log: Path, size_before: int) -> str:
    """What the log has got since it had this size; all of it where it was cut since."""
    size = log.stat().st_size
    with log.open("rb") as file:
        file.seek(size_before if size >= size_before else 0)
        return file.read(_LARGEST_GROWTH_BYTES).decode("utf-8", "replace")


class KeptLog:
    """Follows a log that its owner may rename, cut or remove while the run goes on. Raises OSError:
    the log cannot be read, or the copy cannot be written."""

    def __init__(self, log: Path, kept: Path) -> None:
        self.log = log
        self._read = log.open("rb")
        #: Where the log is to be read.
        self.path = kept if os.fstat(self._read.fileno()).st_size <= _COPIED_BYTES else log
        #: What of the log cannot be known any more; None while all is.
        self.lost: str | None = None
        if self.path == kept:
            kept.unlink(missing_ok=True)
            self.follow()

    def follow(self) -> None:
        """Copy what was written since."""
        if self.path == self.log or self._read.closed:
            return
        if os.fstat(self._read.fileno()).st_size < self._read.tell():
            self.lost = f"{self.log} was cut while the run went on: lines may be lost"
            self._read.seek(0)
        self._copy()
        try:
            now = self.log.stat()
        except FileNotFoundError:
            return  # renamed or removed; what its owner still writes is read through the open file
        if not os.path.samestat(now, os.fstat(self._read.fileno())):
            self._read.close()
            self._read = self.log.open("rb")
            self._copy()

    def _copy(self) -> None:
        with self.path.open("ab") as copy:
            while block := self._read.read(_BLOCK_BYTES):
                copy.write(block)

    def close(self, secrets: set[str]) -> None:
        """Copy the rest, and take secrets out of the copy."""
        self.follow()
        self._read.close()
        if self.path != self.log:
            redact_file(self.path, secrets)
