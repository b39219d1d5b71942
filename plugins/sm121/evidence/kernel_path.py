"""Which kernels really ran, read from a server's log, with the line that proves each value. What
was asked for proves nothing, nor does a line that says ``auto``. None: the log is silent."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import Field

from sm121.core import data_file, redaction
from sm121.evidence import log_lines, log_message
from sm121.evidence.failure import FailureReader, load_failures
from sm121.evidence.log_message import LogLine, Worker
from sm121.evidence.signatures import Signature, SignatureField, known_engines, load_signatures

#: What a log may name several of, by the field of the path that lists them.
_LISTS = {
    **{name: name for name in ("unknown_env", "weights", "channels", "rerouted")},
    **{"fallback": "fallbacks", "silent_fallback": "silent_fallbacks"},
}
_OF_REQUESTS = ("progress", "generation_rate", "accepted_length", "compiled")
_NO_SINGLE_VALUE = (*_LISTS, *_OF_REQUESTS, "fact")
_SINGLE_FIELDS = tuple(name for name in get_args(SignatureField) if name not in _NO_SINGLE_VALUE)
_LIST_LIMIT = 200  # entries kept of unknown variables and fallbacks: a log may repeat without end
_DETECTED_IN = 4 << 20
_OF_TARGET_ONLY = frozenset({"attention", "attention_decode", "moe", "native_fp4"})
_TYPES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("context", "rank", "world_size"), int),
    "requantised": lambda layer: [layer],
}
_ANOTHER_RUN = range(2, 180 * 24 * 60)  # minutes; more is the turn of a year
_DAYS_BEFORE = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)  # each month
#: What the kernel prints, as dmesg and journald show it.
_OF_KERNEL = re.compile(
    r"(?:<\d+>)?\[ *\d+\.\d+\] |\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4}\] "
    r"|.{0,80}\bkernel: "
)
_PROFILER_HINT = "] Executing '"
_PROFILER_SPEAKS = re.compile(r"^\[\d/\d\] Executing '\w+' stats report")


class RequestReport(data_file.Record):
    """Something that was asked for, and what became of it (`sm121.engines.requested`)."""

    by: str
    """The argument or the variable, with its value."""
    field: str | None
    """The value of the path that it speaks of; None for a variable that has no effect."""
    resolved: str | None
    state: str
    """``resolved``, ``different``, ``not_proven`` or ``not_applicable``."""
    message: str


class KernelPath(data_file.Record):
    """The ``path`` object of verdict.json. None where the log is silent."""

    attention: str | None = None
    """vLLM's name of the attention backend: FLASHINFER, TRITON_ATTN, FLASH_ATTN, CPU_ATTN, ..."""
    attention_decode: str | None = None
    """FlashInfer's kernel for decode: ``xqa``, ``trtllm-gen``, ``flashinfer-native`` (its FA2)."""
    moe: str | None = None
    """The name of the MoE backend: MARLIN, FLASHINFER_CUTLASS_MXFP4_MXFP8, TRITON, CPU, ..."""
    cuda_graphs: bool | None = None
    """True when graphs were captured, False when the log says that they are off."""
    kv_layout: str | None = None
    """As printed: LBHNC, LBNHC, ..., or the older HND, NHD."""
    speculative: str | None = None
    """The method; ``none`` when the log says that there is no speculation."""
    native_fp4: bool | None = None
    """True when the experts run block-scaled FP4 MMA, False when FP4 weights are only unpacked."""
    kv_cache_dtype: str | None = None
    dtype: str | None = None
    load_format: str | None = None
    quantization: str | None = None
    """The checkpoint's format as the engine resolved it; it names no kernel."""
    context: int | None = None
    """Tokens of context."""
    requantised: list[str] | None = None
    """Layers that are proven to be quantised beyond the checkpoint: ``qkv``, ``o``, ``lm_head``.
    None where nothing shows any; an empty list where it is shown that there are none."""
    requantised_is_whole: bool = Field(default=False, exclude=True)
    """Whether that list is complete: the kernels proved it. A log names some of the layers."""
    moe_variant: str | None = None
    """``fused`` or ``unfused``: whether the experts' first product has the activation in it."""
    moe_tiles: str | None = None
    """Of the experts' modules that were compiled at this start: ``(64, 128)``."""
    weights: list[str] = Field(default_factory=list)
    """Types of the weights' tensors, with their numbers, where the log lists them."""
    prefix_caching: bool | None = None
    block_size: str | None = None
    """Tokens a block of the KV cache."""
    unknown_env: list[str] = Field(default_factory=list)
    """Variables that this vLLM does not know, harmless ones of official images included."""
    fallbacks: list[str] = Field(default_factory=list)
    """Kinds of fallback that the log admits, by the ids of ``fixtures/signatures``."""
    silent_fallbacks: list[str] = Field(default_factory=list)
    """What looks like a choice and was none, by the ids of ``fixtures/signatures``: of the
    candidates that the log lists, one was left. It may be the right one."""
    failure: str | None = None
    """Kind of failure, as in `sm121.evidence.failure`."""
    evidence: dict[str, str] = Field(default_factory=dict)
    """Field to the log line (cleaned, at most 400 characters); ``fallbacks.<id>`` and
    ``unknown_env.<name>`` too. ``<field>_also`` is a line as strong that names another value."""
    also: dict[str, list[str]] = Field(default_factory=dict)
    """Field to the other values that lines as strong name: some layers run these."""
    requested: list[RequestReport] = Field(default_factory=list)
    """What the configuration asked for; empty where it is not known."""
    differences: list[str] = Field(default_factory=list)
    """What was asked for and did not run. With any of them the configuration's numbers are
    INVALID."""
    version: str | None = Field(default=None, exclude=True)
    """The engine's own version, as it prints it; not part of ``path``."""
    build: str | None = Field(default=None, exclude=True)
    """The build of ``fixtures/builds.toml`` whose lines the log has."""
    asked: str | None = Field(default=None, exclude=True)
    """The arguments, as the engine prints those that are not its default ones."""
    model: str | None = Field(default=None, exclude=True)
    served_model: str | None = Field(default=None, exclude=True)
    """What the server loaded, and by which name it serves it; not part of ``path`` either."""
    rank: int | None = Field(default=None, exclude=True)
    world_size: int | None = Field(default=None, exclude=True)
    group: str | None = Field(default=None, exclude=True)
    """What the ranks' process group is made by: ``nccl``, ``gloo``."""
    graph_sizes: str | None = Field(default=None, exclude=True)
    """The graphs that a rank is to capture: ``PIECEWISE=51 (largest=512), FULL=35 (...)``."""
    channels: list[str] = Field(default_factory=list, exclude=True)
    """What NCCL's channels to other ranks go through: ``NET/IB/0``, ``NET/Socket/0``, ``SHM``."""
    rerouted: list[str] = Field(default_factory=list, exclude=True)
    """RDMA devices in whose place NCCL uses another one: ``2>0``."""
    start: str | None = Field(default=None, exclude=True)
    """What is the same on all ranks of one start, and on no other."""
    since: int | None = Field(default=None, exclude=True)
    """Of a worker, the minute of the year in which it spoke first, by its node's clock."""
    network: str | None = Field(default=None, exclude=True)
    """NCCL's network between nodes: ``IB``, ``IBext_v10``, ``Socket``."""
    rdma_devices: str | None = Field(default=None, exclude=True)
    """Those that NCCL found, which need not carry anything: ``[0]rocep1s0f1:1/RoCE``."""
    begins: dict[str, int] = Field(default_factory=dict, exclude=True)
    """Container to the number of the physical line with which its last start begins."""
    ends: dict[str, int] = Field(default_factory=dict, exclude=True)
    """Container to that with which the rest of an older run begins, where the log ends in one."""


@dataclass(slots=True)
class _Candidate:
    value: str | bool
    strength: int
    line: str
    needs: tuple[str, ...]
    #: Other values of the same strength, with their lines.
    others: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _ServerState:
    failures: FailureReader = field(default_factory=FailureReader)
    facts: set[str] = field(default_factory=set)
    best: dict[str, list[_Candidate]] = field(default_factory=dict)
    #: By field of the path (`_LISTS`): each value with its line.
    lists: dict[str, dict[str, str]] = field(
        default_factory=lambda: {name: {} for name in _LISTS.values()}
    )
    opened: bool = False
    """Whether this run's opening line was seen."""
    began: int = 0
    """Number of the physical line with which this run begins."""
    since: str | None = None
    """Moment of this run's first line that has one (`LogLine.stamp`)."""
    stale: bool = False
    """Whether the line belongs to a run before this one: the log was not emptied between them."""
    ended: int = 0
    """Number of the line at which `stale` became true."""

    def place(self, line: LogLine) -> None:
        """Whether a line and what follows it are older than this run, by its moment."""
        before = self.stale
        if line.stamp is not None:
            self.since = self.since or line.stamp
            self.stale = _minute(self.since) - _minute(line.stamp) in _ANOTHER_RUN
        elif _PROFILER_SPEAKS.match(line.text):
            self.stale = True  # nsys, of the server that it ended
        if self.stale and not before:
            self.ended = line.number

    def take(self, signature: Signature, line: LogLine) -> None:
        match = signature.search(line)
        if match is None:
            return
        value = signature.read(match)
        if value is None:
            return
        excerpt = log_message.cut(line.text, around=match.start())
        if signature.field == "fact":
            self.facts.add(signature.id)
        elif (name := _LISTS.get(signature.field)) is not None:
            is_drafters = name == "silent_fallbacks" and "drafter_loads" in self.facts
            values = self.lists[name]
            if len(values) < _LIST_LIMIT and not is_drafters:
                values.setdefault(" ".join(str(value).split()), excerpt)
        elif not (
            signature.field in _OF_TARGET_ONLY
            and "drafter_loads" in self.facts
            and not signature.drafter
        ):
            candidates = self.best.setdefault(signature.field, [])
            for candidate in candidates:
                if candidate.strength == signature.strength and candidate.needs == signature.needs:
                    if candidate.value != value and len(candidate.others) < _LIST_LIMIT:
                        candidate.others.setdefault(str(value), excerpt)
                    return  # the first line of a strength counts
            candidates.append(_Candidate(value, signature.strength, excerpt, signature.needs))

    def resolve(self) -> dict[str, _Candidate]:
        resolved = {}
        for name, candidates in self.best.items():
            possible = [item for item in candidates if self.facts.issuperset(item.needs)]
            if possible:
                resolved[name] = max(possible, key=lambda item: item.strength)
        return resolved


def read_log(path: Path, engine: str = "vllm", *, one_run: bool = False) -> KernelPath:
    """The kernel path that a log file proves. Of a server that was restarted the last run counts;
    of several in one log (``docker compose``) what they agree on. Memory stays bounded; bytes that
    are no text are replaced. `engine`: ``vllm``, ``sglang`` or ``llama-cpp``; `one_run`: no line is
    of an older run, whatever its moment. Raises OSError: the file cannot be read; DataFileError:
    nothing is known of the engine."""
    reader = LogReader(engine, one_run=one_run)
    reader.read(path)
    return reader.path()


class LogReader:
    """Takes a log line by line; one state for each server in it."""

    def __init__(self, engine: str, *, one_run: bool = False) -> None:
        self._states: dict[str, _ServerState] = {}
        self._workers: dict[tuple[str, Worker | None], _ServerState] = {}
        self._one_run = one_run
        self._hints = [
            (hint, entry)
            for entry in load_signatures(engine).signature
            if entry.field not in _OF_REQUESTS
            for hint in entry.hint
        ]
        texts = {hint for hint, _ in self._hints}
        texts |= {hint for entry in load_failures().failure for hint in entry.hint}
        texts.add(_PROFILER_HINT)
        self._bare_hints = {log_lines.without_digits(text) for text in texts}

    def take(self, line: LogLine) -> None:
        """Takes the next whole line."""
        states = self._states
        state = states.get(line.container)
        if state is None:
            if len(states) >= _LIST_LIMIT:
                return
            state = states[line.container] = _ServerState(began=line.number)
        if not self._one_run and not self._is_plain(line):
            state.place(line)
        if state.stale:
            return
        text = line.text
        for hint, entry in self._hints:
            if hint in text:  # cheap, and true of few lines
                if entry.opens and entry.search(line):
                    if state.opened or (state.best and entry.field == "version"):
                        # It was restarted, or the log begins in the run before.
                        state = _ServerState(began=line.number, since=line.stamp)
                        states[line.container] = state
                        for key in [key for key in self._workers if key[0] == line.container]:
                            del self._workers[key]
                    state.failures = FailureReader()
                    state.opened = True
                state.take(entry, line)
                if len(self._workers) < _LIST_LIMIT:
                    key = (line.container, line.worker)
                    worker = self._workers.setdefault(key, _ServerState())
                    worker.since = worker.since or line.stamp
                    worker.take(entry, line)
        state.failures.feed(line)

    def read(self, path: Path) -> None:
        """Takes a whole file, as `take` does of `join_wrapped`, ten times as fast."""
        for line in log_lines.read_new_lines(path, self._is_plain, self._again):
            self.take(line)

    def _is_plain(self, line: LogLine) -> bool:
        text = log_lines.without_digits(line.text)
        is_plain = self._states[line.container].failures.is_plain(line)
        return is_plain and not any(hint in text for hint in self._bare_hints)

    def _again(self, _raw: bytes, like: LogLine) -> None:
        state = self._states[like.container]
        if not state.stale and state.failures.shows_life(like):
            state.failures.goes_on()

    def path(self) -> KernelPath:
        """What all of it proves."""
        path = _merge(list(self._states.values()))
        path.begins = {n: state.began for n, state in self._states.items() if state.began}
        path.ends = {n: state.ended for n, state in self._states.items() if state.stale}
        return path

    def workers(self) -> dict[Worker, KernelPath]:
        """What the lines of each worker prove, by its id and the address of its node (``7``,
        ``7 10.0.0.2``); what no worker printed holds for all of them, where they are silent."""
        paths: dict[Worker, KernelPath] = {}
        for (container, worker), state in self._workers.items():
            if worker is not None:
                # Where it is silent, what no worker printed is said of it.
                common = self._workers.get((container, None), _ServerState())
                of_all = {name: values for name, values in common.best.items() if name != "rank"}
                lists = {
                    **state.lists,
                    "channels": state.lists["channels"] or common.lists["channels"],
                    "fallbacks": common.lists["fallbacks"] | state.lists["fallbacks"],
                }
                facts, best = state.facts | common.facts, of_all | state.best
                paths[worker] = _merge([replace(state, facts=facts, best=best, lists=lists)])
                paths[worker].since = _minute(state.since) if state.since is not None else None
        return paths


def search_last_start(
    path: Path,
    begins: Mapping[str, int],
    patterns: Collection[re.Pattern[str]],
    ends: Mapping[str, int] | None = None,
) -> Iterator[tuple[re.Pattern[str], str]]:
    """Each pattern with each line of a log that matches it, from the last start of each server on;
    what a line quotes of a user is not searched. `begins, ends`: of the log's `KernelPath`."""
    for number, raw in enumerate(log_lines.read_raw_lines(path)):
        text = raw.decode("utf-8", errors="replace").rstrip()
        matches = [pattern for pattern in patterns if pattern.search(text)]
        if not matches:
            continue
        line = log_message.clean(text)
        if not begins.get(line.container, 0) <= number < (ends or {}).get(line.container, 1 << 62):
            continue
        searched = text if text.endswith(line.text) else line.text
        for pattern in matches:
            if pattern.search(searched):
                yield pattern, text.strip()


def detect_engine(path: Path) -> str | None:
    """The engine that wrote a log, by the words of its first megabytes, else by the values that its
    lines prove; None where neither tells, as of the kernel's messages. Raises OSError when the
    file cannot be read."""
    with path.open("rb") as file:
        head = file.read(_DETECTED_IN).decode("utf-8", errors="replace")
    text = "\n".join(line for line in head.splitlines() if not _OF_KERNEL.match(line))
    engines = {
        name: sum(word in text for word in load_signatures(name).detect) for name in known_engines()
    }
    best = max(engines, key=lambda name: (engines[name], name == "vllm"))
    if engines[best]:
        return best
    for name in sorted(engines, key=lambda name: name != "vllm"):
        proven = read_log(path, name)
        if proven.version is not None or proven.evidence.keys() - {"failure"}:
            return name
    return None


def mistaken_environment(path: KernelPath, engine: str = "vllm") -> list[str]:
    """The unknown variables without those that images and Kubernetes set by themselves."""
    signatures = load_signatures(engine)
    return [name for name in path.unknown_env if not signatures.is_harmless_env(name)]


def _minute(stamp: str) -> int:
    month, day, hour, minute, _ = map(int, re.findall(r"\d+", stamp))
    return ((_DAYS_BEFORE[(month - 1) % 12] + day) * 24 + hour) * 60 + minute


def _merge(states: list[_ServerState]) -> KernelPath:
    speaks_in = ("weights", "unknown_env", "fallbacks", "channels")
    speaking = [s for s in states if s.best or any(s.lists[name] for name in speaks_in)]
    result = KernelPath()
    resolved = [state.resolve() for state in speaking]
    for name in _SINGLE_FIELDS:
        offers = [values.get(name) for values in resolved]
        named = [candidate for candidate in offers if candidate is not None]
        if not named:
            continue
        if len(named) < len(offers) or len({str(candidate.value) for candidate in named}) > 1:
            result.evidence[f"{name}_also"] = log_message.cut(
                f"{len(offers)} servers in one log, which do not all say the same: {named[0].line}"
            )
            continue
        setattr(result, name, _TYPES.get(name, lambda value: value)(named[0].value))
        result.evidence[name] = named[0].line
        for candidate in named:
            for value, line in candidate.others.items():
                if KernelPath.model_fields[name].exclude:
                    continue  # not part of the path
                if name == "requantised":  # one line, or several, may show several layers
                    result.requantised = list(dict.fromkeys([*(result.requantised or ()), value]))
                    continue
                result.evidence.setdefault(f"{name}_also", line)
                if value not in (others := result.also.setdefault(name, [])):
                    others.append(value)
    for state in speaking:
        for field_name, lines in state.lists.items():
            observed = getattr(result, field_name)
            for name, line in lines.items():
                if name not in observed:
                    observed.append(name)
                    result.evidence[f"{field_name}.{name}"] = line
    for state in states:
        kind, excerpts = state.failures.kind(), state.failures.evidence()
        if kind is not None and excerpts is not None and result.failure is None:
            result.failure = kind
            result.evidence["failure"] = excerpts
    result.evidence = {name: redaction.redact(line) for name, line in result.evidence.items()}
    return result
