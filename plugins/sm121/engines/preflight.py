"""Checks before a server is started. They look and change nothing.

What is known of architectures, build memory and wrong choices is data: ``fixtures/preflight.toml``.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, model_validator

from sm121.core import data_file

Severity = Literal["error", "warning", "note"]

_GIB = 1 << 30
_CACHE_NAME = re.compile(r"\d{2,3}[a-z]?(_\d{2,3}[a-z]?)*")
_ALL_INTERFACES = "0.0.0.0"  # noqa: S104 - what vLLM binds without --host
_WARNING_LIST = 5  # names shown of what may be a long list


class Finding(BaseModel):
    """Something that a start should not pass over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    check: str
    severity: Severity
    message: str
    """What was required and what was seen."""
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a start needs of the machine. What is None or empty is not checked."""

    memory_gib: float | None = None
    disk_gib: float | None = None
    disk_path: Path | None = None
    port: int | None = None
    arch_list: tuple[str, ...] = ()
    """Accepted entries of an architecture list, such as ``12.1a``, ``12.1f``."""
    jit_modules: tuple[str, ...] = ()
    """FlashInfer modules that the engine will want, as their directories are called; ``*`` is a
    wildcard."""


class _Architecture(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    target: str = Field(pattern=r"^\d+\.\d$")
    codes: tuple[str, ...] = Field(min_length=1)
    bare: str


class _MaxJobs(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    jobs: int = Field(ge=1)
    peak_gb: float = Field(gt=0)


class _Rule(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    arch: tuple[str, ...] = ()
    severity: Severity
    arguments: str | None = None
    unless_arguments: str | None = None
    environment: str | None = None
    unless_environment: str | None = None
    message: str
    remedy: str
    source: str

    @model_validator(mode="after")
    def _check(self) -> _Rule:
        if self.arguments is None and self.environment is None:
            raise ValueError("arguments or environment is needed")
        for regex in (
            self.arguments,
            self.unless_arguments,
            self.environment,
            self.unless_environment,
        ):
            try:
                re.compile(regex or "")
            except re.error as error:
                raise ValueError(
                    f"a regular expression is expected, got {regex!r}: {error}"
                ) from error
        return self


class PreflightData(BaseModel):
    """The content of ``fixtures/preflight.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: tuple[_Architecture, ...] = Field(min_length=1)
    max_jobs: tuple[_MaxJobs, ...] = Field(min_length=1)
    rule: tuple[_Rule, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> PreflightData:
        ids = [rule.id for rule in self.rule]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(f"ids must be unique, seen twice: {', '.join(twice)}")
        known = {item.name for item in self.architecture}
        for rule in self.rule:
            if strange := set(rule.arch) - known:
                raise ValueError(
                    f"rule {rule.id}: arch must be of {sorted(known)}, seen {sorted(strange)}"
                )
        if [row.jobs for row in self.max_jobs] != sorted({row.jobs for row in self.max_jobs}):
            raise ValueError("max_jobs must be in rising order of jobs")
        return self


def parse_preflight(text: str, name: str = "preflight.toml") -> PreflightData:
    """The data file's text, validated. Raises DataFileError naming file and entry."""
    return data_file.parse(text, PreflightData, name)


@cache
def load_preflight() -> PreflightData:
    """The known checks. Raises DataFileError when the file is wrong."""
    return parse_preflight((files("sm121.fixtures") / "preflight.toml").read_text(encoding="utf-8"))


def inspect(
    arch: str, arguments: Sequence[str], environment: Mapping[str, str], *, needs: Needs
) -> list[Finding]:
    """What stands against starting an engine with these arguments in this environment.

    `arch` is a name such as ``sm121``; nothing architecture-specific is checked for one that the
    data does not know. `environment` is the engine's whole environment. Empty when nothing was
    found; errors come first.
    """
    data = load_preflight()
    architecture = next((item for item in data.architecture if item.name == arch), None)
    findings = [
        *_memory(needs),
        *_disk(needs),
        *_port(arguments, needs),
        *_arch_lists(architecture, environment, needs),
        *_jit(data, architecture, environment, needs),
        *_rules(data, arch, arguments, environment),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda finding: order[finding.severity])


def _memory(needs: Needs) -> Iterator[Finding]:
    if needs.memory_gib is None:
        return
    available = psutil.virtual_memory().available / _GIB  # MemAvailable on Linux
    if available < needs.memory_gib:
        yield Finding(
            check="memory",
            severity="error",
            message=f"{needs.memory_gib:.1f} GiB of memory are needed, "
            f"{available:.1f} GiB are available",
            remedy="stop what holds memory (other servers, dead containers)",
        )


def _disk(needs: Needs) -> Iterator[Finding]:
    if needs.disk_gib is None:
        return
    path = (needs.disk_path or Path.cwd()).absolute()
    existing = next(item for item in (path, *path.parents) if item.exists())
    free = shutil.disk_usage(existing).free / _GIB
    if free < needs.disk_gib:
        yield Finding(
            check="disk",
            severity="error",
            message=f"{needs.disk_gib:.1f} GiB are needed at {path}, {free:.1f} GiB are free",
            remedy="free space there, or choose another place",
        )


def _port(arguments: Sequence[str], needs: Needs) -> Iterator[Finding]:
    if needs.port is None:
        return
    line = _one_line(arguments)
    match = re.search(r"--host (\S+)", line)
    address = match[1] if match else _ALL_INTERFACES
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do it: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, needs.port))
        except OSError as error:
            held = error.errno == errno.EADDRINUSE
            yield Finding(
                check="port",
                severity="error",
                message=f"port {needs.port} of {address} is needed, "
                + ("another process holds it" if held else f"it cannot be had: {error.strerror}"),
                remedy="stop that server, or choose another port"
                if held
                else "choose another host or port",
            )


def _arch_lists(
    architecture: _Architecture | None, environment: Mapping[str, str], needs: Needs
) -> Iterator[Finding]:
    if not needs.arch_list or architecture is None:
        return
    separators: dict[str, tuple[str, Severity]] = {
        "FLASHINFER_CUDA_ARCH_LIST": (r"\s+", "error"),
        "TORCH_CUDA_ARCH_LIST": (r"[\s;,]+", "warning"),
    }
    for name, (separator, severity) in separators.items():
        value = environment.get(name, "").strip()
        if not value:
            continue  # the engine asks the device, which is right
        if name.startswith("FLASHINFER") and re.search("[,;]", value):
            yield Finding(
                check="arch_list",
                severity="error",
                message=f"{name} is a list separated by blanks, seen {value!r}",
                remedy=f"{name}='{needs.arch_list[0]}'",
            )
            continue
        entries = [entry.removesuffix("+PTX") for entry in re.split(separator, value) if entry]
        accepted = [entry for entry in entries if entry in needs.arch_list]
        bare = architecture.target in entries
        if accepted and not bare:
            continue
        why = f": {architecture.bare}" if bare else ""
        yield Finding(
            check="arch_list",
            severity="warning" if accepted else severity,
            message=f"{name} must hold one of {', '.join(needs.arch_list)}, seen {value!r}{why}",
            remedy=f"{name}={needs.arch_list[0]}",
        )


def _jit(
    data: PreflightData,
    architecture: _Architecture | None,
    environment: Mapping[str, str],
    needs: Needs,
) -> Iterator[Finding]:
    if not needs.jit_modules or architecture is None:
        return
    base = (
        environment.get("FLASHINFER_WORKSPACE_BASE") or environment.get("HOME") or str(Path.home())
    )
    cache_folder = Path(base) / ".cache" / "flashinfer"
    right, wrong = _cache_folders(cache_folder, architecture)
    missing = [name for name in needs.jit_modules if not _is_built(name, right)]
    if wrong:
        yield Finding(
            check="jit_cache",
            severity="warning",
            message=f"the JIT cache of {architecture.name} must hold "
            f"{', '.join(architecture.codes)}, "
            f"seen {_short(sorted(folder.name for folder in wrong))} in {cache_folder}",
            remedy=f"set FLASHINFER_CUDA_ARCH_LIST={architecture.target}a; "
            "remove those directories if nothing else uses them",
        )
    if missing:
        state = "cold" if len(missing) == len(needs.jit_modules) else "incomplete"
        yield Finding(
            check="jit_cache",
            severity="note",
            message=f"the JIT cache in {cache_folder} is {state}: the first start builds "
            f"{_short(missing)}, which takes minutes (unless flashinfer-jit-cache is installed)",
            remedy="allow for it in the start-up limit, or start once before measuring",
        )
        yield from _max_jobs(data, environment)


def _cache_folders(
    cache_folder: Path, architecture: _Architecture
) -> tuple[list[Path], list[Path]]:
    """Directories ``<version>/<arch>`` for this architecture, and those for others."""
    right: list[Path] = []
    wrong: list[Path] = []
    for folder in sorted(cache_folder.glob("*/*")):
        if not (folder.is_dir() and _CACHE_NAME.fullmatch(folder.name)):
            continue
        if set(folder.name.split("_")) & set(architecture.codes):
            right.append(folder)
        elif (folder / "cached_ops").is_dir():
            wrong.append(folder)
    return right, wrong


def _is_built(module: str, folders: Sequence[Path]) -> bool:
    for folder in folders:
        ops = folder / "cached_ops"
        if not ops.is_dir():
            continue
        for item in ops.iterdir():
            if fnmatch.fnmatchcase(item.name, module) and next(item.glob("*.so"), None) is not None:
                return True
    return False


def _max_jobs(data: PreflightData, environment: Mapping[str, str]) -> Iterator[Finding]:
    text = environment.get("MAX_JOBS", "").strip()
    if text and not (text.isdecimal() and int(text) > 0):
        yield Finding(
            check="max_jobs",
            severity="error",
            message=f"MAX_JOBS must be a whole number of at least 1, seen {text!r}",
            remedy="MAX_JOBS=4",
        )
        return
    jobs = int(text) if text else (os.cpu_count() or 1)
    rows = data.max_jobs
    row = next((row for row in rows if row.jobs >= jobs), rows[-1])
    per_job = row.peak_gb / row.jobs
    peak = row.peak_gb if row.jobs >= jobs else per_job * jobs
    available = psutil.virtual_memory().available / 1e9
    if peak <= available:
        return
    fitting = max((row.jobs for row in rows if row.peak_gb <= available), default=1)
    origin = "MAX_JOBS" if text else "MAX_JOBS unset: one a core"
    yield Finding(
        check="max_jobs",
        severity="warning",
        message=f"building with {jobs} jobs ({origin}) can take {peak:.0f} GB, "
        f"{available:.0f} GB are available: the host may kill the compiler",
        remedy=f"MAX_JOBS={fitting}",
    )


def _rules(
    data: PreflightData, arch: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Finding]:
    line = _one_line(arguments)
    variables = [f"{name}={value}" for name, value in sorted(environment.items())]
    for rule in data.rule:
        if rule.arch and arch not in rule.arch:
            continue
        seen: list[str] = []
        if rule.arguments is not None:
            match = re.search(rule.arguments, line)
            if match is None:
                continue
            if match[0]:
                seen.append(match[0])
        if rule.environment is not None:
            matching = [item for item in variables if re.fullmatch(rule.environment, item)]
            if not matching:
                continue
            seen += matching
        if rule.unless_arguments is not None and re.search(rule.unless_arguments, line):
            continue
        if rule.unless_environment is not None and any(
            re.fullmatch(rule.unless_environment, item) for item in variables
        ):
            continue
        yield Finding(
            check=rule.id,
            severity=rule.severity,
            message=f"{rule.message} (seen: {', '.join(seen)})" if seen else rule.message,
            remedy=rule.remedy,
        )


def _one_line(arguments: Sequence[str]) -> str:
    """Arguments with ``--name=value`` as ``--name value``, hyphens for underscores in names."""
    words: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            head, *rest = name.split(".")
            words.append(".".join([head.replace("_", "-"), *rest]))
            if equals:
                words.append(value)
        else:
            words.append(argument)
    return " ".join(words)


def _short(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_WARNING_LIST])
    more = len(names) - _WARNING_LIST
    return f"{shown} and {more} more" if more > 0 else shown
