"""Read from a server's log which kernels really ran, with the line that proves each value.

A requested value is no proof, and neither is a line with the value ``auto``. A value is None if no
line of the log proves it.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import Field

from sm121.core import data_file, redaction
from sm121.evidence import log_lines, log_message
from sm121.evidence.failure import FailureReader
from sm121.evidence.failure_tables import load_failures
from sm121.evidence.log_message import LoggingWorker, LogLine
from sm121.evidence.log_start import Draft, LogStart, RankLinks
from sm121.evidence.server_state import (
    LIST_LIMIT,
    LISTS,
    ProvenValue,
    ServerState,
    minute_of_year,
)
from sm121.evidence.signatures import Signature, SignatureField, known_engines, load_signatures

#: The signature fields that are about single requests, and not about the kernel path.
_OF_REQUESTS = ("progress", "generation_rate", "accepted_length", "compiled")
_NO_SINGLE_VALUE = (*LISTS, *_OF_REQUESTS, "fact")
_SINGLE_FIELDS = tuple(name for name in get_args(SignatureField) if name not in _NO_SINGLE_VALUE)
_NUMBERS = ("context", "rank", "world_size", "draft_tokens")
#: The lists whose entries come only from the lines of a server. If the lines of a container fill
#: one of them, the container runs a server.
_LISTS_OF_SERVERS = ("weights", "unknown_env", "fallbacks", "channels")
#: The number of bytes at the beginning of a log that are searched for its engine.
_DETECTED_IN = 4 << 20
#: A line of the Linux kernel, or of a program that starts servers, as dmesg and journald show it.
#: Such lines are not used to detect the engine, because they contain names of processes and units
#: that users choose.
_OF_HOST = re.compile(
    r"(?:<\d+>|[a-z]+ *:[a-z]+ *: )?"
    r"(?:\[ *\d+\.\d+\] |\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4}\] "
    r"|\d{4}-\d\d-\d\dT[\d:]{8},\d{6}[+-]\d\d:\d\d )"
    r"|.{0,80}\b(?:kernel|systemd[\w-]*\[\d+\]|dockerd\[\d+\]|containerd\[\d+\]|earlyoom\[\d+\]): "
)
#: Lines of the Linux kernel, nvidia-smi and TensorRT-LLM (no known engine). They may contain names
#: of users' processes and paths, so they do not show the engine, with any prefix.
_OF_OTHERS = re.compile(
    r"NVRM: |\boom-kill:constraint="
    r"|\b(?:Out of memory|Memory cgroup out of memory): Killed process "
    r"|\bINFO: task \S+ blocked for more than "
    r"|^\|.* \d+MiB \|$|\[(?:TRT-LLM|TensorRT-LLM)\]"
)
#: The name of a service at the beginning of a line of docker compose.
_OF_SERVICE = re.compile(r"(?:\x1b\[[\d;]*m)*[\w.-]+ +\|(?:\x1b\[[\d;]*m)* ?")
#: A part of the line of nsys that `ServerState.note_age` reads.
_PROFILER_HINT = "] Executing '"


class RequestReport(data_file.Record):
    """A requested value, and whether it ran (`sm121.engines.requested`)."""

    by: str
    """The argument or environment variable, with its value."""
    field: str | None
    """The field of the path that is requested; None for a variable without an effect."""
    resolved: str | None
    state: str
    """``resolved``, ``different``, ``not_proven`` or ``not_applicable``."""
    message: str


class KernelPath(data_file.Record):
    """The ``path`` object of verdict.json. A field is None if no line of the log proves it."""

    attention: str | None = None
    """vLLM's name of the attention backend: FLASHINFER, TRITON_ATTN, FLASH_ATTN, CPU_ATTN, ..."""
    attention_decode: str | None = None
    """FlashInfer's kernel for decode: ``xqa``, ``trtllm-gen``, ``flashinfer-native`` (its FA2)."""
    moe: str | None = None
    """The name of the MoE backend: MARLIN, FLASHINFER_CUTLASS_MXFP4_MXFP8, TRITON, CPU, ..."""
    cuda_graphs: bool | None = None
    """True if graphs were captured, False if the log states that they are off."""
    kv_layout: str | None = None
    """The layout of the KV cache as the log prints it: LBHNC, LBNHC, ..., or the older HND, NHD."""
    speculative: str | None = None
    """The method of speculative decoding; ``none`` if the log states that it is off."""
    native_fp4: bool | None = None
    """True if the experts run block-scaled FP4 MMA, False if FP4 weights are only decoded."""
    kv_cache_dtype: str | None = None
    dtype: str | None = None
    load_format: str | None = None
    quantization: str | None = None
    """The checkpoint's format, as resolved by the engine. It does not determine the kernel."""
    context: int | None = None
    """The context length, in tokens."""
    requantised: list[str] | None = None
    """Layers that are proven to be quantised beyond the checkpoint: ``qkv``, ``o``, ``lm_head``.
    None if there is no evidence. Empty if it is proven that there are no such layers.
    """
    requantised_is_whole: bool = Field(default=False, exclude=True)
    """Whether the list `requantised` is complete. It is if the kernels of a profile proved it; a
    log may name only some of the layers."""
    moe_variant: str | None = None
    """``fused`` or ``unfused``: whether the experts' first product includes the activation."""
    moe_tiles: str | None = None
    """The tile sizes of the experts' modules that this start compiled, for example ``(64,
    128)``."""
    weights: list[str] = Field(default_factory=list)
    """The types of the weights' tensors with their counts, if the log lists them."""
    prefix_caching: bool | None = None
    block_size: str | None = None
    """The block size of the KV cache, in tokens."""
    unknown_env: list[str] = Field(default_factory=list)
    """Environment variables that this vLLM does not know, including harmless ones of official
    images."""
    fallbacks: list[str] = Field(default_factory=list)
    """The ids (in ``fixtures/signatures``) of fallbacks that the log reports."""
    silent_fallbacks: list[str] = Field(default_factory=list)
    """The ids (in ``fixtures/signatures``) of choices for which the engine had only one candidate
    left. The candidate may be the right one."""
    failure: str | None = None
    """The kind of failure, as in `sm121.evidence.failure_tables`."""
    evidence: dict[str, str] = Field(default_factory=dict)
    """The log line (cleaned, at most 400 characters) that proves each value. The keys are fields,
    ``fallbacks.<id>`` and ``unknown_env.<name>``. The key ``<field>_also`` has an equally strong
    line that proves another value of the field."""
    also: dict[str, list[str]] = Field(default_factory=dict)
    """For each field, other values that equally strong lines prove. Some layers run with these
    values."""
    requested: list[RequestReport] = Field(default_factory=list)
    """The values that the configuration requested; empty if they are unknown."""
    differences: list[str] = Field(default_factory=list)
    """The requested values that did not run. If there are any, the configuration's numbers are
    INVALID."""
    log: LogStart = Field(default_factory=LogStart, exclude=True)
    """Facts that the log proves and that are not part of the kernel path."""


#: The fields of the ``path`` object of verdict.json.
PATH_FIELDS = tuple(name for name, info in KernelPath.model_fields.items() if not info.exclude)


def read_log(path: Path, engine: str = "vllm", *, one_run: bool = False) -> KernelPath:
    """Read the kernel path that a log proves, in bounded memory.

    If the server was restarted, only its last run counts. If the log contains several servers
    (``docker compose``), only values on which all servers agree count. Invalid bytes are replaced.

    Args:
        path: The log.
        engine: The engine, one of `signatures.known_engines`.
        one_run: Whether all lines are from one run. If so, their times do not separate runs.

    Raises:
        OSError: The file cannot be read.
        DataFileError: The engine has no signatures.
    """
    reader = LogReader(engine, one_run=one_run)
    reader.read(path)
    return reader.path()


class _Source(NamedTuple):
    """The origin of a line: a container, and the worker that printed the line (None: no worker)."""

    container: str
    worker: LoggingWorker | None


class LogReader:
    """Reads a log line by line, and keeps a state for each server in it.

    Args:
        engine: The engine, one of `signatures.known_engines`.
        one_run: Whether all lines are from one run. If so, their times do not separate runs.
    """

    def __init__(self, engine: str, *, one_run: bool = False) -> None:
        self._states: dict[str, ServerState] = {}
        self._workers: dict[_Source, ServerState] = {}
        self._one_run = one_run
        self._hints: list[tuple[str, Signature]] = []
        for entry in load_signatures(engine).signature:
            if entry.field not in _OF_REQUESTS:
                self._hints += [(hint, entry) for hint in entry.hint]
        texts = {hint for hint, _ in self._hints}
        for failure in load_failures().failure:
            texts.update(failure.hint)
        texts.add(_PROFILER_HINT)
        self._bare_hints = {log_lines.without_digits(text) for text in texts}

    def take(self, line: LogLine) -> None:
        """Read the next line.

        Args:
            line: The line, joined with its continuation lines.
        """
        state = self._states.get(line.container)
        if state is None:
            if len(self._states) >= LIST_LIMIT:
                return
            state = ServerState(began=line.number)
            self._states[line.container] = state
        if not self._one_run and not self._is_plain(line):
            state.note_age(line)
        if state.stale:
            return
        for hint, entry in self._hints:
            if hint not in line.text:  # a cheap test, which excludes most lines
                continue
            if entry.opens and entry.search(line):
                state = self._open_run(state, entry, line)
            state.take(entry, line)
            self._take_of_worker(entry, line)
        state.failures.feed(line)

    def _open_run(self, state: ServerState, entry: Signature, line: LogLine) -> ServerState:
        """Return the state of the new run that begins with a line."""
        if state.opened or (state.candidates and entry.field == "version"):
            # The server was restarted, or the log begins within an earlier run.
            state = ServerState(began=line.number, since=line.stamp)
            self._states[line.container] = state
            for source in list(self._workers):
                if source.container == line.container:
                    del self._workers[source]
        state.failures = FailureReader()
        state.opened = True
        return state

    def _take_of_worker(self, entry: Signature, line: LogLine) -> None:
        if len(self._workers) >= LIST_LIMIT:
            return
        source = _Source(line.container, line.worker)
        state = self._workers.get(source)
        if state is None:
            state = ServerState()
            self._workers[source] = state
        state.since = state.since or line.stamp
        state.take(entry, line)

    def read(self, path: Path) -> None:
        """Read a whole file, ten times as fast as by calling `take` for each line.

        Args:
            path: The log.

        Raises:
            OSError: The file cannot be read.
        """
        for line in log_lines.read_new_lines(path, self._is_plain, self._take_plain):
            self.take(line)

    def _is_plain(self, line: LogLine) -> bool:
        text = log_lines.without_digits(line.text)
        is_plain = self._states[line.container].failures.is_plain(line)
        return is_plain and not any(hint in text for hint in self._bare_hints)

    def _take_plain(self, _raw: bytes, like: LogLine) -> None:
        """Read a line that differs only in its digits from a line that proves nothing."""
        state = self._states[like.container]
        if not state.stale and state.failures.shows_life(like):
            state.failures.goes_on()

    def path(self) -> KernelPath:
        """Return the path that all lines so far prove."""
        path = _merge(list(self._states.values()))
        for container, state in self._states.items():
            if state.began:
                path.log.begins[container] = state.began
            if state.stale:
                path.log.ends[container] = state.ended
        return path

    def workers(self) -> dict[LoggingWorker, KernelPath]:
        """Return the path that the lines of each worker prove.

        Values from lines that no worker printed also apply to each worker, unless the worker's own
        lines prove another value.
        """
        paths: dict[LoggingWorker, KernelPath] = {}
        for source, state in self._workers.items():
            if source.worker is None:
                continue
            common = self._workers.get(_Source(source.container, None), ServerState())
            path = _merge([_with_common(state, common)])
            if state.since is not None:
                path.log.since = minute_of_year(state.since)
            paths[source.worker] = path
        return paths


def _with_common(state: ServerState, common: ServerState) -> ServerState:
    """Add the values from lines that no worker printed to the state of a worker."""
    candidates = {**common.candidates, **state.candidates}
    if "rank" not in state.candidates:
        candidates.pop("rank", None)  # each worker has its own rank
    lists = dict(state.lists)
    lists["channels"] = state.lists["channels"] or common.lists["channels"]
    lists["fallbacks"] = common.lists["fallbacks"] | state.lists["fallbacks"]
    facts = state.facts | common.facts
    return replace(state, facts=facts, candidates=candidates, lists=lists)


def search_last_start(
    path: Path,
    begins: Mapping[str, int],
    patterns: Collection[re.Pattern[str]],
    ends: Mapping[str, int] | None = None,
) -> Iterator[tuple[re.Pattern[str], str]]:
    """Search the lines of a log since the last start of each server.

    Args:
        path: The log.
        begins: The numbers of the lines with which the last starts begin (`LogStart.begins`).
        patterns: The patterns. If a line quotes text of a user, this text is not searched.
        ends: The numbers of the lines with which older runs begin (`LogStart.ends`).

    Yields:
        Each pattern with each line that it matches.

    Raises:
        OSError: The file cannot be read.
    """
    for number, raw in enumerate(log_lines.read_raw_lines(path)):
        text = raw.decode("utf-8", errors="replace").rstrip()
        matches = [pattern for pattern in patterns if pattern.search(text)]
        if not matches:
            continue
        line = log_message.clean(text)
        if number < begins.get(line.container, 0):
            continue
        if ends is not None and line.container in ends and number >= ends[line.container]:
            continue
        searched = text if text.endswith(line.text) else line.text
        for pattern in matches:
            if pattern.search(searched):
                yield pattern, text.strip()


def detect_engine(path: Path) -> str | None:
    """Find the engine that wrote a log.

    The engine is identified by words in the first megabytes of the log or, without such words, by
    its signatures in the whole log.

    Args:
        path: The log.

    Returns:
        The engine. None if neither words nor signatures identify one (for example in a log of the
        Linux kernel), or if the signatures of several engines match.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_DETECTED_IN).decode("utf-8", errors="replace")
    lines = []
    for line in head.splitlines():
        if not _OF_HOST.match(line) and not _OF_OTHERS.search(line):
            lines.append(_OF_SERVICE.sub("", line, count=1))
    text = "\n".join(lines)
    engines = sorted(known_engines(), key=lambda name: name != "vllm")
    counts: dict[str, int] = {}
    for name in engines:
        words = [word for word in load_signatures(name).detect if word in text]
        counts[name] = len(words)
    best = max(engines, key=counts.__getitem__)  # vLLM, if counts are equal
    if counts[best]:
        return best
    named = [name for name in engines if _proves_values(read_log(path, name))]
    if len(named) != 1:
        return None  # the log may contain only a stack frame of a kernel that several engines call
    return named[0]


def _proves_values(path: KernelPath) -> bool:
    """Whether a log proves a value of a path."""
    return path.log.version is not None or bool(path.evidence.keys() - {"failure"})


def shown(path: KernelPath, field: str) -> Any:
    """Return the value of a signature's field, from a path or from its `KernelPath.log`.

    Args:
        path: The path.
        field: The field (`signatures.SignatureField`).
    """
    return getattr(_holder(path, field), field)


def give(path: KernelPath, field: str, value: object) -> None:
    """Set the value of a signature's field, in a path or in its `KernelPath.log`.

    Args:
        path: The path, which is modified.
        field: The field (`signatures.SignatureField`).
        value: The value, of the field's type.
    """
    setattr(_holder(path, field), field, value)


def _holder(path: KernelPath, field: str) -> KernelPath | LogStart | RankLinks | Draft:
    """Return the object that has a field: the path itself, or a part of what its log shows."""
    parts: tuple[LogStart | RankLinks | Draft, ...] = (path.log, path.log.links, path.log.draft)
    for part in parts:
        if field in type(part).model_fields:
            return part
    return path


def mistaken_environment(path: KernelPath, engine: str = "vllm") -> list[str]:
    """Return the unknown environment variables, except those that images and Kubernetes set.

    Args:
        path: The path.
        engine: The engine of the path.
    """
    signatures = load_signatures(engine)
    return [name for name in path.unknown_env if not signatures.is_harmless_env(name)]


def _merge(states: list[ServerState]) -> KernelPath:
    """Return the path on which the servers of one log agree."""
    path = KernelPath()
    speaking = [state for state in states if _speaks_of_path(state)]
    resolved = [state.resolve() for state in speaking]
    for name in _SINGLE_FIELDS:
        _set_value(path, name, [candidates.get(name) for candidates in resolved])
    for state in speaking:
        for name, lines in state.lists.items():
            _extend_list(path, name, lines)
    for state in states:
        kind = state.failures.kind()
        line = state.failures.evidence()
        if kind is not None and line is not None:
            path.failure = kind
            path.evidence["failure"] = line
            break
    path.evidence = {name: redaction.redact(line) for name, line in path.evidence.items()}
    return path


def _speaks_of_path(state: ServerState) -> bool:
    if state.candidates:
        return True
    return any(state.lists[name] for name in _LISTS_OF_SERVERS)


def _set_value(path: KernelPath, name: str, offers: Sequence[ProvenValue | None]) -> None:
    """Set a field if all servers of the log prove the same value."""
    named = [candidate for candidate in offers if candidate is not None]
    if not named:
        return
    values = {str(candidate.value) for candidate in named}
    if len(named) < len(offers) or len(values) > 1:
        path.evidence[f"{name}_also"] = log_message.cut(
            f"{len(offers)} servers in one log, with different values: {named[0].line}"
        )
        return
    give(path, name, _typed(name, named[0].value))
    path.evidence[name] = named[0].line
    if name not in PATH_FIELDS:
        return  # for a field outside the path, other values are not kept
    for candidate in named:
        for value, line in candidate.others.items():
            _add_other(path, name, value, line)


def _typed(name: str, value: str | bool) -> Any:
    """Convert a value to the type of its field."""
    if name in _NUMBERS:
        return int(value)
    if name == "requantised":
        return [value]
    return value


def _add_other(path: KernelPath, name: str, value: str, line: str) -> None:
    """Add another value of a field, which an equally strong line proves."""
    if name == "requantised":  # several values (layers) of this field do not contradict each other
        layers = [*(path.requantised or []), value]
        path.requantised = list(dict.fromkeys(layers))
        return
    path.evidence.setdefault(f"{name}_also", line)
    others = path.also.setdefault(name, [])
    if value not in others:
        others.append(value)


def _extend_list(path: KernelPath, name: str, lines: Mapping[str, str]) -> None:
    values = shown(path, name)
    for value, line in lines.items():
        if value not in values:
            values.append(value)
            path.evidence[f"{name}.{value}"] = line
