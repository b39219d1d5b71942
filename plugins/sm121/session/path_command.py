"""`sm121 path`: shows a server's kernel path, from its log, metrics, traces or compiled modules."""

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel

from sm121.compilation.architecture import CodeArchitecture
from sm121.core import builds
from sm121.core.errors import UsageError
from sm121.core.files import cause_of
from sm121.engines import requested
from sm121.engines.followed_log import FollowedLog
from sm121.evidence import (
    failure,
    jit_cache,
    kernel_profile,
    kernel_proof,
    kernel_requirement,
    metrics,
    profile_files,
    remedies,
    serving_lines,
)
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import KernelPath, detect_engine, read_log
from sm121.machine import roofline
from sm121.report import glance, path_outlook
from sm121.report.path_outlook import RateBound
from sm121.run import spanning
from sm121.run.spanning import RanksOfLogs

_STDIN = Path("-")
#: Texts for messages that say how to create each source.
_SAVE_LOG = "Save one: docker logs NAME > server.log 2>&1"
_SAVE_METRICS = "Save it: curl http://localhost:8000/metrics > metrics.txt"
_RECORD_TRACE = "Record one with the engine's profiler"
#: The engine whose signatures are used if the engine is unknown or if there is no log.
_DEFAULT_ENGINE = "vllm"
_DEFAULT_MODEL = "gpt-oss-120b"


@dataclass(frozen=True)
class PathRequest:
    """The arguments of the command.

    Attributes:
        logs: The log of each node; one `-` is standard input.
        container: The container whose log is read instead.
        libraries: Whether the libraries of an engine are read instead.
        engine: The engine that wrote the log. None: the log shows it.
        metrics: The text of /metrics.
        trace: A trace of a profiler.
        jit_caches: Folders of compiled modules.
        gpu: The architecture that the modules are for.
        as_table: Print the kernels of the trace as a Markdown table.
        as_json: Print JSON in place of the table of the path.
    """

    logs: tuple[Path, ...]
    container: str | None
    libraries: bool
    engine: str | None
    metrics: Path | None
    trace: Path | None
    jit_caches: list[Path] | None
    gpu: str
    as_table: bool
    as_json: bool


def run(request: PathRequest) -> None:
    """Print what the sources of a request show about the kernel path.

    Args:
        request: The arguments. With `libraries`, they are only checked.

    Raises:
        UsageError: A source is missing, contradicts another one, or shows nothing.
        OSError: A file cannot be read.
    """
    has_files = bool(request.metrics or request.trace or request.jit_caches)
    if request.container is not None and (request.logs or request.libraries):
        raise UsageError("--container: expected no LOG and no --libraries with it")
    has_log = bool(request.logs) or request.container is not None
    if (has_log or has_files) == request.libraries:
        raise UsageError(
            "expected the LOG of a server, --container NAME or --libraries; with or without LOG: "
            "--metrics, --trace, --jit-cache"
        )
    if not request.libraries:
        with _logs(request) as logs:
            _Reading(request, logs).print()


@contextlib.contextmanager
def _logs(request: PathRequest) -> Iterator[tuple[Path, ...]]:
    """Yield the log files. Standard input, pipes and a container's log are copied to files."""
    if request.container is not None:
        followed = FollowedLog.of_container(
            request.container, follow=False, instead="sm121 path LOG"
        )
        with contextlib.closing(followed) as log:
            log.settle(to_the_end=True)
            yield (log.path,)
    elif request.logs[:1] == (_STDIN,):
        if sys.stdin.isatty():
            raise UsageError(
                "-: expected a log on standard input: docker logs NAME 2>&1 | sm121 path -"
            )
        with _copied(sys.stdin.buffer) as copy:
            yield (copy,)
    else:
        with contextlib.ExitStack() as copies:
            logs = list(request.logs)
            for number, given in enumerate(request.logs):
                if given.is_fifo():  # bash passes a FIFO for <(docker logs NAME)
                    with given.open("rb") as stream:
                        logs[number] = copies.enter_context(_copied(stream))
            yield tuple(logs)


@contextlib.contextmanager
def _copied(stream: BinaryIO) -> Iterator[Path]:
    """Copy a stream to its end, and yield the file."""
    with tempfile.NamedTemporaryFile(prefix="sm121-log-") as copy:
        shutil.copyfileobj(stream, copy)
        copy.flush()
        yield Path(copy.name)


def _is_stream(request: PathRequest) -> bool:
    """Whether the first log is standard input or a pipe, which has no name for other commands."""
    return request.logs[:1] == (_STDIN,) or request.logs[0].is_fifo()


@dataclass
class _Reading:
    """Collects what the sources show."""

    request: PathRequest
    logs: tuple[Path, ...]
    path: KernelPath = field(default_factory=KernelPath)
    #: The content of the JSON output, apart from the path.
    answer: dict[str, Any] = field(default_factory=dict)
    cause: Cause | None = None

    def print(self) -> None:
        """Read the sources and print the result."""
        self._refuse_missing_files()
        known = self.request.engine
        if known is None and self.logs:
            known = detect_engine(self.logs[0])
        engine = known or _DEFAULT_ENGINE
        if self.logs:
            self._read_log(known, engine)
        if self.request.metrics is not None:
            text = self.request.metrics.read_text("utf-8", "replace")
            if not metrics.has_any(text):
                raise UsageError(
                    f"--metrics {self.request.metrics}: expected the text of /metrics, got a text "
                    f"without a metric of an engine. {_SAVE_METRICS}"
                )
            self.path = metrics.with_metrics(self.path, text, engine)
        if self.request.jit_caches is not None:
            self._read_jit_caches(self.request.jit_caches)
        if self.request.trace is not None:
            profile = profile_files.read_profile(self.request.trace)
            if self.request.as_table:
                sys.stdout.write(kernel_profile.table(profile))
                return
            self._add_kernels(profile)
        if self._shows_nothing():
            for folder in self.request.jit_caches or ():
                sys.stdout.write(f"{folder}: no compiled modules\n")
            return
        self.path = requested.of_log(self.path, engine)
        ranks = spanning.of_logs(self.logs, engine)
        bound: RateBound | None = None
        if self.logs:
            bound = path_outlook.bound(self.path)
            self._add_outlook(engine)
        if self.logs and not self.request.as_json:
            self._print_table(known, ranks, bound)
        else:
            self._print_json(ranks, bound)

    def _shows_nothing(self) -> bool:
        """Whether caches without a module are the only sources, and no JSON was requested."""
        others = self.logs or self.request.metrics or self.request.trace or self.request.as_json
        return not others and self.answer.get("jit_cache") == []

    def _print_table(self, known: str | None, ranks: RanksOfLogs, bound: RateBound | None) -> None:
        name = known or "engine not known"
        version = self.answer["identity"] or self.path.log.version
        title = [part for part in (name, version, self.path.log.model) if part]
        sys.stdout.write(" ".join(title) + "\n")
        values: dict[str, Any] = {"contradictions": ()}
        values.update(self.answer)
        values.update(nodes=ranks.rows, unequal=ranks.faults, cause=self.cause, bound=bound)
        sys.stdout.write(glance.table("path.txt.j2", path=self.path, **values))

    def _print_json(self, ranks: RanksOfLogs, bound: RateBound | None) -> None:
        answer = dict(self.answer)
        answer["nodes"] = [node.model_dump(mode="json") for node in ranks.rows]
        answer["unequal"] = ranks.faults
        if self.logs:
            answer["bound"] = _dumped(bound)
            answer["serving"] = _dumped(answer["serving"])
        whole = self.path.model_dump(mode="json") | answer
        sys.stdout.write(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")

    def _refuse_missing_files(self) -> None:
        for log in self.logs:
            _refuse_missing(log, "the log file of a server", _SAVE_LOG)
        if self.request.metrics is not None:
            _refuse_missing(self.request.metrics, "the text of /metrics", _SAVE_METRICS)
        if self.request.trace is not None:
            _refuse_missing(self.request.trace, "a trace", _RECORD_TRACE)

    def _read_log(self, known: str | None, engine: str) -> None:
        log = self.logs[0]
        self.path = path = read_log(log, engine)
        has_lines = known is not None and serving_lines.has_log_lines(log)
        if not path.evidence and not has_lines:
            content = "no line that an engine writes" if log.stat().st_size else "an empty file"
            name = "standard input" if self.request.logs[:1] == (_STDIN,) else log
            raise UsageError(
                f"{name}: expected the log of a server, from its start on, got {content}. "
                f"{_SAVE_LOG}"
            )
        self.answer = {
            "engine": known,
            "version": path.log.version,
            "identity": builds.identity(path.log.version, build=path.log.build),
            "serving": serving_lines.read_serving_state(log, engine),
            "compiled": serving_lines.compiled(log, engine),
            "missing": path_outlook.missing(path),
        }

    def _read_jit_caches(self, folders: list[Path]) -> None:
        gpu = CodeArchitecture.parse(self.request.gpu).number
        modules = jit_cache.read_modules(folders, gpu)
        self.path.evidence.update(jit_cache.evidence(modules))
        self.answer["jit_cache"] = [module.model_dump(mode="json") for module in modules]

    def _add_kernels(self, profile: kernel_profile.KernelProfile) -> None:
        config = roofline.read_config(self.path.log.model or _DEFAULT_MODEL) or {}
        contradictions = kernel_requirement.backend_contradictions(self.path, profile)
        self.answer["contradictions"] = contradictions
        layers = config.get("num_hidden_layers")
        self.path = kernel_proof.with_kernels(self.path, profile, layers)
        self.answer["kernels"] = profile.model_dump(mode="json")

    def _add_outlook(self, engine: str) -> None:
        self.answer.update(cause=None, owner=None, remedy=None)
        if self.path.failure:
            cause = failure.classify(self.logs[0])
            writer = remedies.writer(self.logs[0], self.answer["engine"])
            self.cause = remedies.for_engine(cause, writer)
            self.answer.update(
                cause=self.cause.summary, owner=self.cause.owner, remedy=self.cause.remedy
            )
        file: Path | None = None
        if self.request.container is None and not _is_stream(self.request):
            file = self.logs[0]
        source = path_outlook.LogSource(file, self.request.container)
        self.answer["next"] = path_outlook.next_step(self.path, engine, self.cause, source)


def _dumped(model: BaseModel | None) -> Any:
    if model is None:
        return None
    return model.model_dump(mode="json")


def _refuse_missing(file: Path, noun: str, step: str) -> None:
    """Raise UsageError if a source is not a readable file. ``step`` says how to create the file."""
    got = "something that is not a file" if file.exists() else "no file of that name"
    if file.is_file():
        try:
            with file.open("rb") as stream:
                stream.read(1)
        except OSError as error:
            got = f"one that cannot be read: {cause_of(error)}"
        else:
            return
    raise UsageError(f"{file}: expected {noun}, got {got}. {step}")
