"""Whether a log is the one that an attached server writes, now: any file can be given as one. And a
copy of it, which rotation, truncation and removal do not touch."""

import datetime
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
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
from sm121.evidence.log_lines import clean, moment, read_raw_lines

#: A line is in the file so soon after what it speaks of.
_WRITTEN_WITHIN_S = 3.0
#: So many requests, one after the other, must be so many lines.
_COUNTS = (3, 2)
#: vLLM and SGLang say every ten seconds how many tokens they took.
_RATE_EVERY_S, _RATE_WITHIN_S, _RATE_FITS = 10.0, 13.0, (0.5, 1.6)
#: Prompts of different length, by repetitions: a load of others fits one of them, never both.
_PROMPTS = (12, 48)
#: In front of each line of vLLM.
_PID = re.compile(r"\(\w*API_?Server\w* pid=(\d+)")
#: From the start of a process to the first line with a time; to be read in any time zone.
_FIRST_LINE = (datetime.timedelta(seconds=-5), datetime.timedelta(seconds=300))
#: Hours and half hours, and the three that are neither.
_ZONES = [datetime.timedelta(minutes=minutes) for minutes in (*range(-720, 841, 30), 345, 525, 765)]
#: How far the clocks of two machines may be apart.
_CLOCKS = datetime.timedelta(minutes=2)
_HOW = (
    "give the log that this server writes (vLLM: with its lines of access, so without "
    "--disable-uvicorn-access-log, or with --enable-log-requests)"
)
#: A longer log is not copied: it is read where it lies.
_COPIED_BYTES = 256 << 20
_BLOCK_BYTES = 1 << 20


def doubt(server: Server, can: Capabilities, log: Path, name: str) -> str | None:
    """Why a log proves nothing about an attached server; None when it is that server's. Version and
    model must be the server's, the start in it that of the server's process where the server tells
    it, and the log must grow with requests that are sent here. `can`: of `detection.detect`;
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
            or _does_not_grow(server.endpoint, log, can.engine, path)
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
    started = metrics.total(endpoint.page("/metrics") or "", "process_start_time_seconds")
    if started is None:
        return None
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    began = datetime.datetime.fromtimestamp(started, datetime.UTC).replace(tzinfo=None)
    moments = (moment(line, now) for line in _last_start(path, log))
    stamps = [stamp for stamp in moments if stamp is not None]
    if not stamps:
        return None
    first, last = stamps[0], stamps[-1]
    if any(
        _FIRST_LINE[0] <= first - ahead - began <= _FIRST_LINE[1] and last - ahead <= now + _CLOCKS
        for ahead in _ZONES
    ):
        return None
    return f"the log's last start is of {first}, the server's process began at {began:%F %T} UTC"


def _last_start(path: KernelPath, log: Path) -> Iterator[str]:
    begins = max(path.begins.values(), default=0)
    return (raw.decode("utf-8", "replace") for raw in islice(read_raw_lines(log), begins, None))


class _Growth:
    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = log.stat().st_size
        #: All that has come.
        self._appended = ""

    def more(self) -> str:
        size = self._log.stat().st_size
        with self._log.open("rb") as file:
            file.seek(self._at if size >= self._at else 0)
            read = file.read(8 << 20)
        self._at = (self._at if size >= self._at else 0) + len(read)
        self._appended += read.decode("utf-8", "replace")
        return self._appended

    def has(self, wanted: Callable[[str], bool], within_s: float) -> bool:
        return until(lambda: wanted(self.more()), within_s, every_s=0.05)


def _does_not_grow(endpoint: Endpoint, log: Path, engine: str, path: KernelPath) -> str | None:
    mark = f"sm121-{uuid.uuid4().hex}"
    with endpoint.http(timeout_s=60.0) as http:
        try:
            growth = _Growth(log)
            http.get("/v1/models", params={"sm121": mark})
            if growth.has(lambda text: mark in text, _WRITTEN_WITHIN_S):
                line = next(line for line in growth.more().splitlines() if mark in line)
                pids = (_PID.search(each) for each in _last_start(path, log))
                starter, answered = next(filter(None, pids), None), _PID.search(line)
                if starter is None or answered is None or answered[1] == starter[1]:
                    return None  # they are the same, or lines have no pid
                return (
                    f"several servers write it: the last start in it is of process {starter[1]}, "
                    f"and process {answered[1]} answered"
                )
            if _counts_our_requests(http, log):
                return None
            if all(_rate_follows(endpoint, http, log, engine, words) for words in _PROMPTS):
                return None
        except httpx.HTTPError as error:
            return f"no request of ours was answered ({type(error).__name__}: {error})"
    return f"no line of it follows requests that are sent to {endpoint.base_url}; {_HOW}"


def _rate_follows(
    endpoint: Endpoint, http: httpx.Client, log: Path, engine: str, words: int
) -> bool:
    mark = f"sm121-{uuid.uuid4().hex}"
    growth = _Growth(log)
    # No cache has this prompt.
    prompt = f"{mark} " + "the quick brown fox jumps over the lazy dog " * words
    body = {"model": endpoint.served_name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": mark})
    try:
        tokens = int(answer.json()["usage"]["prompt_tokens"])
    except (ValueError, KeyError, TypeError):
        tokens = len(prompt.split())
    rates = [signature.regex for signature in signatures.load_signatures(engine).of("prompt_rate")]

    def has_it(text: str) -> bool:
        parts = (
            float(match["value"]) * _RATE_EVERY_S / max(1, tokens)
            for rate in rates
            for match in rate.finditer(text)
        )
        return mark in text or any(_RATE_FITS[0] <= part <= _RATE_FITS[1] for part in parts)

    return growth.has(has_it, _RATE_WITHIN_S if rates else _WRITTEN_WITHIN_S)


def _counts_our_requests(http: httpx.Client, log: Path) -> bool:
    """Whether unmarked requests of ours are as many lines, twice, and else there are none."""
    for count in _COUNTS:
        growth = _Growth(log)
        time.sleep(0.5)
        if growth.more():
            return False  # others use it, or write it
        for _ in range(count):
            http.get("/v1/models")
        time.sleep(1.0)
        lines = [clean(line).text for line in growth.more().splitlines()]
        if sum("/v1/models" in line for line in lines) != count:
            return False
    return True


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
