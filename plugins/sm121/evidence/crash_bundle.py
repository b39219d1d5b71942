"""Everything that is known of an abnormal end, in one folder. Each part is written even when others
are not to be had; what is missing says why in bundle.json."""

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

from sm121.core import templates
from sm121.core.files import write_text
from sm121.evidence import failure, kernel_messages, process_snapshot

#: A longer log is kept by its beginning and its end; the whole one stays where it is.
_WHOLE_LOG_BYTES = 24 << 20
_LOG_HEAD_BYTES = 4 << 20
_LOG_TAIL_BYTES = 8 << 20
#: The folder of the report directory that bundles lie in, and the file that describes one.
FOLDER = "crashes"
INDEX = "bundle.json"
Redact = Callable[[str], str]
_NO_PROCESS = "no process of the tree was left to look at"


class Unavailable(Exception):
    """A part that is not to be had; the message says why."""


class BundleIndex(failure.Cause):
    """The whole of bundle.json."""

    schema_version: int = 1
    kind: str = Field(serialization_alias="class", validation_alias=AliasChoices("class", "kind"))
    """One of `failure_tables.Kind`, or a class of the suite's own such as suite_killed."""
    what: str
    test: str | None
    at: str
    exit_status: int | None
    exits: list[dict[str, Any]]
    engine_debug: bool
    rerun: str
    """How to run again for a better stack; empty where nothing would help."""
    parts: dict[str, dict[str, str]]
    """Name of a part -> ``{"file": name}`` or ``{"unavailable": why}``."""


@dataclass
class Evidence:
    """What is known. None or empty where it is not, with the reason in ``missing`` if there is one
    that is better than the general one."""

    cause: failure.Cause
    what: str
    test: str | None = None
    log: Path | None = None
    exit_status: int | None = None
    exits: list[dict[str, Any]] = field(default_factory=list)
    tree: list[dict[str, Any]] = field(default_factory=list)
    kernel: kernel_messages.KernelMessages = field(default_factory=kernel_messages.KernelMessages)
    cgroup_before: Mapping[str, int] | str = "not read before"
    cgroup_after: Mapping[str, int] | str = "not read"
    memory: Mapping[str, Any] | None = None
    in_flight: list[dict[str, Any]] | None = None
    metrics: str | None = None
    configuration: Mapping[str, Any] | None = None
    #: Of the engine's process.
    environment: Mapping[str, str] = field(default_factory=dict)
    debug: bool = False
    #: How to run again for a better stack.
    rerun: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    #: Of each other node of a server that spans machines, by the name of its files.
    nodes: Mapping[str, tuple[Path | None, Any]] = field(default_factory=dict)


def write(evidence: Evidence, directory: Path, redact: Redact) -> Path:
    """Write a bundle into a new folder ``<n>-<class>`` of ``directory``; its path. Raises OSError:
    not even the folder can be made, or the index in it."""
    folder = _new_folder(directory, evidence.cause.kind)
    try:
        parts: dict[str, dict[str, str]] = {}
        for name, produce in (*_PARTS.items(), *_of_nodes(evidence)):
            try:
                write_text(redact(produce(evidence)), folder / name)
                parts[name] = {"file": name}
            except Unavailable as reason:
                parts[name] = {"unavailable": redact(str(reason))}
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                # A reason such as "No space left on device" is what one wants to read then.
                parts[name] = {"unavailable": redact(f"{type(error).__name__}: {error}")}
        index = BundleIndex(
            **evidence.cause.model_dump(),
            what=evidence.what,
            test=evidence.test,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            exit_status=evidence.exit_status,
            exits=evidence.exits,
            engine_debug=evidence.debug,
            rerun=evidence.rerun,
            parts=parts,
        )
        readme = templates.rendered("crash.md.j2", index=index)
        write_text(redact(readme), folder / "README.md")
        text = json.dumps(index.model_dump(mode="json", by_alias=True), indent=2)
        write_text(redact(text) + "\n", folder / INDEX)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)  # half a bundle misleads
        raise
    return folder


def write_somewhere(evidence: Evidence, directory: Path, redact: Redact) -> tuple[Path, str | None]:
    """As `write`; where the report directory cannot be written, into a temporary one. The path,
    and why it is not where it should be."""
    try:
        return write(evidence, directory, redact), None
    except OSError as error:
        elsewhere = Path(tempfile.mkdtemp(prefix="sm121-crash-"))
        return write(evidence, elsewhere, redact), f"{directory}: {error.strerror or error}"


def _log(evidence: Evidence) -> str:
    if evidence.log is None:
        raise Unavailable(evidence.missing.get("log", "the server's log is not known"))
    if not evidence.log.is_file():
        raise Unavailable(f"{evidence.log.name} is not there")
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


def _said(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return f"{answer.stdout}{answer.stderr}\n"


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _exits(evidence: Evidence) -> str:
    if not evidence.exits and evidence.exit_status is None:
        raise Unavailable(evidence.missing.get("exits", "no process has ended"))
    why = {"why": "its parent collected it and does not say"}
    entries = [e if e.get("status") is not None else {**e, **why} for e in evidence.exits]
    return _json({"main": evidence.exit_status, "processes": entries})


def _stacks(evidence: Evidence) -> str:
    tool = shutil.which("py-spy")
    if tool is None:
        raise Unavailable("py-spy is not here; pip install py-spy gives the stacks of a hang")
    alive = [entry for entry in evidence.tree if entry["status"] not in ("zombie", "dead")]
    if not alive:
        raise Unavailable(_NO_PROCESS)
    return "".join(
        f"## {entry['name']} ({entry['pid']})\n"
        + _said(tool, "dump", "--nonblocking", "--pid", str(entry["pid"]))
        for entry in alive
    )


def _kernel(evidence: Evidence) -> str:
    kernel = evidence.kernel
    if kernel.unavailable and not kernel.lines:
        raise Unavailable(kernel.unavailable)
    noted = kernel.of_note
    opening = [f"# {len(noted)} messages of note since the start"]
    opening += [f"# {line}" for line in noted[:50]]
    lines = kernel.lines or ("(no message since the start)",)
    return "\n".join([*opening, *lines]) + "\n"


def _cgroup(evidence: Evidence) -> str:
    if isinstance(evidence.cgroup_after, str):
        raise Unavailable(evidence.cgroup_after)
    return _json({"before": evidence.cgroup_before, "after": evidence.cgroup_after})


def _gpu(_evidence: Evidence) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise Unavailable("nvidia-smi is not here: no NVIDIA driver")
    query = "--query-compute-apps=pid,process_name,used_memory"
    return _said(tool, query, "--format=csv") + _said(tool, "-q")


def _field(
    name: str, otherwise: str, shown: Callable[[Any], str] = _json
) -> Callable[[Evidence], str]:
    def produce(evidence: Evidence) -> str:
        value = getattr(evidence, name)
        if value is None or (name == "tree" and not value):
            raise Unavailable(evidence.missing.get(name, otherwise))
        return shown(value)

    return produce


def _flashinfer(evidence: Evidence) -> str:
    level = evidence.environment.get("FLASHINFER_LOGLEVEL", "0")
    if level in ("", "0"):
        raise Unavailable("FlashInfer's API log was off; --engine-debug turns it on")
    target = evidence.environment.get("FLASHINFER_LOGDEST", "stdout")
    if target in ("stdout", "stderr"):
        raise Unavailable(f"FlashInfer's API log went to {target}: it is in server.log")
    # %i is the pid of the process that logs: each of the tree has a file of its own.
    pids = sorted({entry["pid"] for entry in [*evidence.tree, *evidence.exits]})
    names = [target.replace("%i", str(pid)) for pid in pids] if "%i" in target else [target]
    files = [file for file in map(Path, names) if file.is_file()]
    if not files:
        raise Unavailable(f"FlashInfer's API log was to be {target}, which is not there")
    return "".join(f"# {file.name}\n{_whole_or_ends(file)}\n" for file in files)


#: The files of a bundle, in the order in which they are written.
_PARTS: dict[str, Callable[[Evidence], str]] = {
    "server.log": _log,
    "process-tree.txt": _field("tree", _NO_PROCESS, process_snapshot.table),
    "exits.json": _exits,
    "stacks.txt": _stacks,
    "kernel.log": _kernel,
    "cgroup.json": _cgroup,
    "gpu.txt": _gpu,
    "memory.json": _field("memory", "no memory was sampled"),
    "in-flight.json": _field("in_flight", "no load of the suite was running"),
    "metrics-before.txt": _field("metrics", "/metrics was not read before", str),
    "configuration.json": _field("configuration", "the server is attached: not known"),
    "flashinfer-api.log": _flashinfer,
}


def _of_nodes(evidence: Evidence) -> Iterator[tuple[str, Callable[[Evidence], str]]]:
    for name, (log, told) in evidence.nodes.items():
        yield f"{name}.json", partial(lambda told, _evidence: _json(told), told)
        if log is not None:
            yield f"{name}.log", partial(lambda log, _evidence: _whole_or_ends(log), log)


def _new_folder(directory: Path, kind: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = directory / f"{number}-{kind}"
        if not any(directory.glob(f"{number}-*")):
            with contextlib.suppress(FileExistsError):  # somebody has just made it
                folder.mkdir()
                return folder
        number += 1
