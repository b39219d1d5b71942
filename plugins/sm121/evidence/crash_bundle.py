"""Crash bundles: a folder with the evidence of a server's abnormal end.

Each part is written even if other parts are not available. bundle.json has the reason for each
missing part.
"""

import contextlib
import datetime
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from sm121.core import lenient, templates
from sm121.core.files import write_text
from sm121.evidence import failure, kernel_messages, process_snapshot, stacks

#: The folder with the bundles in the report directory.
FOLDER = "crashes"
#: The file that describes a bundle.
INDEX = "bundle.json"
Redact = Callable[[str], str]

#: The size of the largest log that is copied whole. Of a larger log, only the beginning and the end
#: are copied.
_WHOLE_LOG_BYTES = 24 << 20
_LOG_HEAD_BYTES = 4 << 20
_LOG_TAIL_BYTES = 8 << 20
#: The time limit of a program such as nvidia-smi, in seconds.
_PROGRAM_TIMEOUT_S = 30
#: The maximum number of important messages, which are at the beginning of kernel.log.
_MOST_NOTED = 50
_NO_PROCESS = "no process of the server was left to inspect"


class Unavailable(Exception):
    """A part of a crash bundle is not available; the message has the reason."""


class BundleIndex(failure.Cause):
    """The content of bundle.json."""

    schema_version: int = 1
    kind: str = Field(serialization_alias="class", validation_alias=AliasChoices("class", "kind"))
    """One of `failure_tables.Kind`, or one of the suite's own classes, such as suite_killed."""
    what: str
    test: str | None
    at: str
    exit_status: int | None
    exits: list[dict[str, Any]]
    engine_debug: bool
    rerun: str
    """The command for a rerun that yields a better stack trace; empty if no option would help."""
    parts: dict[str, dict[str, str]]
    """For each part, by its name: ``{"file": name}`` or ``{"unavailable": reason}``."""


@dataclass
class EngineProcesses:
    """The processes of an engine at the time of its end.

    Attributes:
        exit_status: The exit status of the server's first process; None if it is unknown.
        exits: The processes that have ended, each with its status.
        tree: The processes, as returned by `process_snapshot.snapshot`.
        stacks: The stack traces that were read before the processes were killed; empty if they
            still run.
        stacks_folder: The folder in which the processes can write their stack traces
            (`stacks.take_stacks`).
    """

    exit_status: int | None = None
    exits: list[dict[str, Any]] = field(default_factory=list)
    tree: list[dict[str, Any]] = field(default_factory=list)
    stacks: str = ""
    stacks_folder: Path | None = None


@dataclass(frozen=True)
class CgroupCounters:
    """The memory counters of the control group, or the reason why they were not read.

    Attributes:
        before: The counters at the server's start.
        after: The counters after its end.
    """

    before: Mapping[str, int] | str = "not read before"
    after: Mapping[str, int] | str = "not read"


@dataclass
class EngineSetup:
    """The configuration and the environment with which an engine was started.

    Attributes:
        configuration: The server's configuration; None if it is unknown.
        environment: The environment of the engine's process.
        debug: Whether the run had ``--engine-debug``.
    """

    configuration: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    debug: bool = False


@dataclass
class Evidence:
    """The evidence of an abnormal end. Unknown values are None or empty.

    Attributes:
        cause: The cause.
        what: A description of the end, such as "the suite died".
        test: The id of the test that was running.
        log: The server's log.
        processes: The server's processes.
        kernel: The messages of the Linux kernel since the server's start.
        cgroup: The counters of the control group.
        memory: The memory samples.
        in_flight: The requests that were in flight.
        metrics: The last answer of /metrics before the end.
        setup: The configuration and the environment of the engine.
        rerun: The command for a rerun that yields a better stack trace.
        missing: For a field that is missing for a specific reason, this reason. It replaces the
            general reason in the bundle.
        nodes: The log and the last report of each other node of the server. The keys fit in file
            names.
        stacks_of_nodes: The stack traces of the processes of each other node, with the same keys.
    """

    cause: failure.Cause
    what: str
    test: str | None = None
    log: Path | None = None
    processes: EngineProcesses = field(default_factory=EngineProcesses)
    kernel: kernel_messages.KernelMessages = field(default_factory=kernel_messages.KernelMessages)
    cgroup: CgroupCounters = field(default_factory=CgroupCounters)
    memory: Mapping[str, Any] | None = None
    in_flight: list[dict[str, Any]] | None = None
    metrics: str | None = None
    setup: EngineSetup = field(default_factory=EngineSetup)
    rerun: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    nodes: Mapping[str, tuple[Path | None, Any]] = field(default_factory=dict)
    stacks_of_nodes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """A file of a bundle."""

    file: str
    #: Returns the content of the file, or raises `Unavailable`.
    produce: Callable[[], str]


def read_index(folder: Path) -> BundleIndex:
    """Read bundle.json of a bundle.

    Args:
        folder: The folder of the bundle.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged.
    """
    return lenient.validate(BundleIndex, json.loads((folder / INDEX).read_text("utf-8")))


def write(evidence: Evidence, directory: Path, redact: Redact) -> Path:
    """Write a bundle into a new folder.

    Args:
        evidence: The evidence.
        directory: The folder in which the bundle's folder ``<n>-<class>`` is created.
        redact: Removes secrets from a text.

    Returns:
        The folder of the bundle.

    Raises:
        OSError: The folder or its index cannot be written.
    """
    folder = _new_folder(directory, evidence.cause.kind)
    try:
        parts = {part.file: _write_part(part, folder, redact) for part in _parts(evidence)}
        index = BundleIndex(
            **evidence.cause.model_dump(),
            what=evidence.what,
            test=evidence.test,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            exit_status=evidence.processes.exit_status,
            exits=evidence.processes.exits,
            engine_debug=evidence.setup.debug,
            rerun=evidence.rerun,
            parts=parts,
        )
        readme = templates.rendered("crash.md.j2", index=index)
        write_text(redact(readme), folder / "README.md")
        text = json.dumps(index.model_dump(mode="json", by_alias=True), indent=2)
        write_text(redact(text) + "\n", folder / INDEX)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete bundle would mislead
        raise
    return folder


def _write_part(part: _Part, folder: Path, redact: Redact) -> dict[str, str]:
    """Write a part, and return its entry in the index."""
    try:
        write_text(redact(part.produce()), folder / part.file)
    except Unavailable as reason:
        return {"unavailable": redact(str(reason))}
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # Store the reason, for example "No space left on device".
        return {"unavailable": redact(f"{type(error).__name__}: {error}")}
    return {"file": part.file}


def write_somewhere(evidence: Evidence, directory: Path, redact: Redact) -> tuple[Path, str | None]:
    """Write a bundle into a folder, or into a temporary folder if that fails.

    Args:
        evidence: As in `write`.
        directory: As in `write`.
        redact: As in `write`.

    Returns:
        The folder of the bundle, and the reason why it is not in `directory`, or None.

    Raises:
        OSError: The bundle cannot be written into a temporary folder either.
    """
    try:
        return write(evidence, directory, redact), None
    except OSError as error:
        elsewhere = Path(tempfile.mkdtemp(prefix="sm121-crash-"))
        return write(evidence, elsewhere, redact), f"{directory}: {error.strerror or error}"


def _parts(evidence: Evidence) -> Iterator[_Part]:
    """Yield the files of a bundle, in the order in which they are written."""

    def known(name: str, value: object, reason: str) -> str:
        if value is None:
            raise Unavailable(evidence.missing.get(name, reason))
        return _json(value)

    yield _Part("server.log", lambda: _log(evidence))
    yield _Part("process-tree.txt", lambda: _process_tree(evidence))
    yield _Part("exits.json", lambda: _exits(evidence))
    yield _Part("stacks.txt", lambda: _stacks(evidence))
    yield _Part("kernel.log", lambda: _kernel(evidence))
    yield _Part("cgroup.json", lambda: _cgroup(evidence))
    yield _Part("gpu.txt", _gpu)
    yield _Part("memory.json", lambda: known("memory", evidence.memory, "no memory was sampled"))
    yield _Part(
        "in-flight.json",
        lambda: known("in_flight", evidence.in_flight, "no load of the suite was running"),
    )
    yield _Part("metrics-before.txt", lambda: _metrics(evidence))
    yield _Part(
        "configuration.json",
        lambda: known(
            "configuration", evidence.setup.configuration, "unknown: the server is attached"
        ),
    )
    yield _Part("flashinfer-api.log", lambda: _flashinfer(evidence))
    for name, (log, record) in evidence.nodes.items():
        yield _Part(f"{name}.json", partial(_json, record))
        if log is not None:
            yield _Part(f"{name}.log", partial(_whole_or_ends, log))
    for name, taken in evidence.stacks_of_nodes.items():
        yield _Part(f"{name}-stacks.txt", partial(str, taken))


def _log(evidence: Evidence) -> str:
    if evidence.log is None:
        raise Unavailable(evidence.missing.get("log", "the server's log is unknown"))
    if not evidence.log.is_file():
        raise Unavailable(f"{evidence.log.name} does not exist")
    return _whole_or_ends(evidence.log)


def _whole_or_ends(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as source:
        if size <= _WHOLE_LOG_BYTES:
            return source.read().decode("utf-8", "replace")
        head = source.read(_LOG_HEAD_BYTES)
        source.seek(size - _LOG_TAIL_BYTES)
        tail = source.read()
    left_out = size - len(head) - len(tail)
    return (
        head.decode("utf-8", "replace")
        + f"\n[sm121: {left_out} bytes left out here; the whole log is {file}]\n"
        + tail.decode("utf-8", "replace")
    )


def _output(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT_S)
    return f"{answer.stdout}{answer.stderr}\n"


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _exits(evidence: Evidence) -> str:
    if not evidence.processes.exits and evidence.processes.exit_status is None:
        raise Unavailable(evidence.missing.get("exits", "no process has ended"))
    entries: list[dict[str, Any]] = []
    for entry in evidence.processes.exits:
        if entry.get("status") is None:
            entry = {**entry, "why": "not known: its parent process has collected the exit status"}
        entries.append(entry)
    return _json({"main": evidence.processes.exit_status, "processes": entries})


def _stacks(evidence: Evidence) -> str:
    processes = evidence.processes
    if processes.stacks:
        return processes.stacks
    if not processes.tree:
        raise Unavailable(evidence.missing.get("tree", _NO_PROCESS))
    try:
        return stacks.take_stacks(processes.tree, processes.stacks_folder)
    except stacks.NoStacks as error:
        raise Unavailable(str(error)) from error


def _kernel(evidence: Evidence) -> str:
    kernel = evidence.kernel
    if kernel.unavailable and not kernel.lines:
        raise Unavailable(kernel.unavailable)
    noted = kernel.of_note
    lines = [f"# {len(noted)} important messages since the start"]
    lines += [f"# {line}" for line in noted[:_MOST_NOTED]]
    lines += kernel.lines or ["(no message since the start)"]
    return "\n".join(lines) + "\n"


def _cgroup(evidence: Evidence) -> str:
    if isinstance(evidence.cgroup.after, str):
        raise Unavailable(evidence.cgroup.after)
    return _json({"before": evidence.cgroup.before, "after": evidence.cgroup.after})


def _gpu() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise Unavailable("nvidia-smi is not installed: no NVIDIA driver")
    query = "--query-compute-apps=pid,process_name,used_memory"
    return _output(tool, query, "--format=csv") + _output(tool, "-q")


def _process_tree(evidence: Evidence) -> str:
    if not evidence.processes.tree:
        raise Unavailable(evidence.missing.get("tree", _NO_PROCESS))
    return process_snapshot.table(evidence.processes.tree)


def _metrics(evidence: Evidence) -> str:
    if evidence.metrics is None:
        raise Unavailable(evidence.missing.get("metrics", "/metrics was not read before"))
    return evidence.metrics


def _flashinfer(evidence: Evidence) -> str:
    level = evidence.setup.environment.get("FLASHINFER_LOGLEVEL", "0")
    if level in ("", "0"):
        raise Unavailable("FlashInfer's API log was off; --engine-debug turns it on")
    target = evidence.setup.environment.get("FLASHINFER_LOGDEST", "stdout")
    if target in ("stdout", "stderr"):
        raise Unavailable(f"FlashInfer's API log went to {target}: it is in server.log")
    files = [file for file in _api_logs(target, evidence) if file.is_file()]
    if not files:
        raise Unavailable(f"FlashInfer's API log should be {target}, which does not exist")
    return "".join(f"# {file.name}\n{_whole_or_ends(file)}\n" for file in files)


def _api_logs(target: str, evidence: Evidence) -> list[Path]:
    """Return the files of FlashInfer's API log.

    If the configured name contains %i (the pid), each process has its own file.
    """
    if "%i" not in target:
        return [Path(target)]
    pids = {entry["pid"] for entry in [*evidence.processes.tree, *evidence.processes.exits]}
    return [Path(target.replace("%i", str(pid))) for pid in sorted(pids)]


def _new_folder(directory: Path, kind: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = directory / f"{number}-{kind}"
        if not any(directory.glob(f"{number}-*")):
            with contextlib.suppress(FileExistsError):  # another process has just created it
                folder.mkdir()
                return folder
        number += 1
