"""Checks before a server is started. They look and change nothing. What is known of architectures,
build memory and wrong choices is data: ``fixtures/preflight.toml``."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import psutil
from packaging.version import Version
from pydantic import Field, model_validator

from sm121.compilation import jit
from sm121.compilation.caches import CompileCaches
from sm121.compilation.jit import FlashInferModules, JitModule
from sm121.core import builds, data_file
from sm121.core.arguments import one_line
from sm121.core.data_file import DataTable, Entries, Regex
from sm121.core.engine_settings import Needs
from sm121.core.printable import some_of
from sm121.core.versions import Versions, release, within
from sm121.engines import choices

Severity = Literal["error", "warning", "note"]

_GIB = 1 << 30
_DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"
_FLASHINFER_NAMED = re.compile(r"(?i)--(moe|attention)\S* flashinfer")
_CACHE_NAME = re.compile(r"\d{2,3}[a-z]?(_\d{2,3}[a-z]?)*")


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """Something that a start should not pass over."""

    check: str
    severity: Severity
    message: str
    """What was required and what was seen."""
    remedy: str | None = None


class _Architecture(DataTable):
    name: str
    target: str = Field(pattern=r"^\d+\.\d$")
    codes: tuple[str, ...] = Field(min_length=1)
    bare: str

    @property
    def number(self) -> int:
        """Its compute capability: 121."""
        return int(self.target.replace(".", ""))


class _Rule(DataTable):
    id: str = Field(pattern=r"^[a-z0-9_]+$")
    arch: tuple[str, ...] = ()
    severity: Severity
    arguments: Regex | None = None
    unless_arguments: Regex | None = None
    environment: Regex | None = None
    unless_environment: Regex | None = None
    #: Releases of the engine that it holds for, or a build of ``fixtures/builds.toml``, or all but
    #: one; of an unknown engine a rule without a bound holds.
    versions: Versions = ""
    build: str | None = None
    unless_build: str | None = None
    #: Versions of FlashInfer that it holds for; not where the installed one is not known.
    flashinfer: Versions = ""
    message: str
    remedy: str
    source: str

    @model_validator(mode="after")
    def _check(self) -> _Rule:
        if self.arguments is None and self.environment is None:
            raise ValueError("arguments or environment is needed")
        return self


class PreflightData(DataTable):
    """The content of ``fixtures/preflight.toml``."""

    architecture: tuple[_Architecture, ...] = Field(min_length=1)
    rule: Entries[_Rule]

    @model_validator(mode="after")
    def _check(self) -> PreflightData:
        names = {item.name for item in self.architecture}
        for rule in self.rule:
            if strange := set(rule.arch) - names:
                raise ValueError(
                    f"rule {rule.id}: arch must be of {sorted(names)}, seen {sorted(strange)}"
                )
        return self


@cache
def load_preflight() -> PreflightData:
    """The known checks. Raises DataFileError when the file is wrong."""
    return data_file.load("preflight.toml", PreflightData)


def inspect(
    arch: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    needs: Needs,
    directory: Path,
    modules: FlashInferModules | None = None,
    engine: str = "vllm",
    version: str | None = None,
    cold_ready_within_s: float = math.inf,
) -> list[PreflightFinding]:
    """What stands against starting an engine with these arguments in this environment.

    Args:
        arch: a name such as ``sm121``; nothing architecture-specific is checked for one that the
            data does not know.
        arguments: of the engine.
        environment: the engine's whole environment.
        needs: what the machine must have; what is None or empty is not checked.
        directory: where the disk must have room. It need not exist yet.
        modules: what the engine's FlashInfer has compiled (default: in its cache, of any version).
        engine: its name.
        version: of the engine that will be started (`builds.identity`), None where that is not
            known.
        cold_ready_within_s: the most that a start may take which compiles.

    Returns: Errors first; empty when nothing was found."""
    data = load_preflight()
    architecture = next((item for item in data.architecture if item.name == arch), None)
    findings = [
        *_memory(needs),
        *_disk(needs, directory.absolute()),
        *_arch_lists(architecture, environment, needs),
        *_jit(
            architecture,
            arguments,
            environment,
            needs,
            modules or FlashInferModules(None, CompileCaches.of(environment).flashinfer),
            cold_ready_within_s,
        ),
        *_rules(data, arch, arguments, environment, version, modules.version if modules else None),
        *_refusals(engine, arch, version, arguments, environment),
    ]
    order = get_args(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _memory(needs: Needs) -> Iterator[PreflightFinding]:
    available = psutil.virtual_memory().available / _GIB  # MemAvailable on Linux
    if needs.memory_gib is not None and available < needs.memory_gib:
        yield PreflightFinding(
            check="memory",
            severity="error",
            message=f"{needs.memory_gib:.1f} GiB of memory are needed, "
            f"{available:.1f} GiB are available",
            remedy="stop what holds memory (other servers, dead containers)",
        )


def _disk(needs: Needs, path: Path) -> Iterator[PreflightFinding]:
    existing = next(item for item in (path, *path.parents) if item.exists())
    free = shutil.disk_usage(existing).free / _GIB
    if needs.disk_gib is not None and free < needs.disk_gib:
        yield PreflightFinding(
            check="disk",
            severity="error",
            message=f"{needs.disk_gib:.1f} GiB are needed at {path}, {free:.1f} GiB are free",
            remedy="free space there, or choose another place",
        )


def _arch_lists(
    architecture: _Architecture | None, environment: Mapping[str, str], needs: Needs
) -> Iterator[PreflightFinding]:
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
            yield PreflightFinding(
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
        yield PreflightFinding(
            check="arch_list",
            severity="warning" if accepted else severity,
            message=f"{name} must hold one of {', '.join(needs.arch_list)}, seen {value!r}{why}",
            remedy=f"{name}={needs.arch_list[0]}",
        )


def _jit(
    architecture: _Architecture | None,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    needs: Needs,
    modules: FlashInferModules,
    cold_s: float,
) -> Iterator[PreflightFinding]:
    if architecture is None or not (needed := jit.needed(needs, arguments, environment)):
        return
    wrong = _of_others(modules.folder, architecture)
    if wrong:
        yield PreflightFinding(
            check="jit_cache",
            severity="warning",
            message=f"the JIT cache of {architecture.name} must hold "
            f"{', '.join(architecture.codes)}, "
            f"seen {some_of(sorted(folder.name for folder in wrong), 5)} in {modules.folder}",
            remedy=f"set FLASHINFER_CUDA_ARCH_LIST={architecture.target}a; "
            "remove those directories if nothing else uses them",
        )
    missing = modules.missing(needed, architecture.codes, architecture.number)
    if not missing:
        return
    state = "cold" if len(missing) == len(needed) else "incomplete"
    version = f" of FlashInfer {modules.version}" if modules.version else ""
    yield PreflightFinding(
        check="jit_cache",
        severity="note",
        message=f"the JIT cache{version} in {modules.folder} is {state}: the first start builds "
        f"{some_of([module.module for module in missing], 5)}, "
        f"{sum(module.cpu_s for module in missing) / 60:.0f} minutes of one core",
        remedy="`sm121 warm` builds it without a server; a cold start has its own time limit",
    )
    yield from _compilers(missing, environment, needs, cold_s)
    yield from _tools(missing, arguments, environment)


def lacking_tools(environment: Mapping[str, str]) -> list[str]:
    """Of nvcc and ninja those that are not where FlashInfer looks for them, with the places."""
    search = environment.get("PATH", os.defpath)
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = Path(home) / "bin" / "nvcc" if home else shutil.which("nvcc", path=search)
    tools = {
        "nvcc (CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda)": nvcc or _DEFAULT_NVCC,
        "ninja (PATH)": "ninja",
    }
    return [name for name, tool in tools.items() if shutil.which(tool, path=search) is None]


def _tools(
    missing: Sequence[JitModule], arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[PreflightFinding]:
    """Whether there is what compiles."""
    if not (lacking := lacking_tools(environment)):
        return
    silenced = environment.get("VLLM_HAS_FLASHINFER_CUBIN", "").strip() not in ("", "0")
    # Else vLLM looks for them too, and chooses attention without FlashInfer.
    certain = silenced or _FLASHINFER_NAMED.search(one_line(arguments)) is not None
    why = "; VLLM_HAS_FLASHINFER_CUBIN switches off vLLM's own look for them" if silenced else ""
    yield PreflightFinding(
        check="jit_tools",
        severity="error" if certain else "note",
        message=f"{some_of([module.module for module in missing], 5)} must be compiled, and there "
        f"is no {' and no '.join(lacking)}{why}: the engine would stop late in its start",
        remedy="set CUDA_HOME to a CUDA toolkit and put ninja on PATH, or install "
        "flashinfer-jit-cache of FlashInfer's release",
    )


def _of_others(cache_folder: Path, architecture: _Architecture) -> list[Path]:
    """Directories ``<version>/<arch>`` with modules for other architectures alone."""
    return [
        folder
        for folder in sorted(cache_folder.glob("*/*"))
        if _CACHE_NAME.fullmatch(folder.name)
        and not set(folder.name.split("_")) & set(architecture.codes)
        and (folder / "cached_ops").is_dir()
    ]


def _compilers(
    missing: Sequence[JitModule], environment: Mapping[str, str], needs: Needs, cold_s: float
) -> Iterator[PreflightFinding]:
    """Whether the memory is enough for the compilers beside the weights, and so the time."""
    text = environment.get("MAX_JOBS", "").strip()
    if text and not (text.isdecimal() and int(text) > 0):
        yield PreflightFinding(
            check="max_jobs",
            severity="error",
            message=f"MAX_JOBS must be a whole number of at least 1, seen {text!r}",
            remedy="unset it: the suite sets what fits",
        )
        return
    bound = jit.bound(missing, environment, resident_gib=needs.weights_gib or 0.0)
    names = some_of([module.module for module in missing], 5)
    cpu_s = sum(module.cpu_s for module in missing)
    if bound.jobs == 0:
        yield PreflightFinding(
            check="jit_memory",
            severity="error",
            message=f"to compile {names} at this start, {bound}: the machine may freeze",
            remedy="`sm121 warm` first, which compiles without the weights",
        )
    elif text and int(text) > bound.jobs:
        yield PreflightFinding(
            check="max_jobs",
            severity="error",
            message=f"MAX_JOBS={text} compiles {names} with {text} jobs at the same time, "
            f"{bound.jobs} fit: {bound}",
            remedy=f"unset MAX_JOBS, or give --engine-env=MAX_JOBS={bound.jobs}, or `sm121 warm` "
            "first",
        )
    elif (takes_s := cpu_s / (jobs := int(text or bound.jobs))) > cold_s:
        yield PreflightFinding(
            check="jit_time",
            severity="error",
            message=f"to compile {names} takes {takes_s / 60:.0f} minutes with {jobs} jobs at the "
            f"same time, and a cold start may take {cold_s / 60:.0f}; {bound}",
            remedy="`sm121 warm` first, which compiles without the weights and has no such limit",
        )


def _rules(
    data: PreflightData,
    arch: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    identity: str | None,
    flashinfer: str | None,
) -> Iterator[PreflightFinding]:
    line, row = one_line(arguments), builds.named(identity)
    build = row.name if row is not None else "none"
    variables = [f"{name}={value}" for name, value in sorted(environment.items())]
    for rule in data.rule:
        if rule.arch and arch not in rule.arch:
            continue
        if not within(identity, rule.versions) or rule.unless_build == build:
            continue
        if rule.build not in (None, build):
            continue
        if rule.flashinfer and (
            release(flashinfer) is None or not within(flashinfer, rule.flashinfer)
        ):
            continue
        matches = [f"FlashInfer {flashinfer}"] if rule.flashinfer else []
        if rule.arguments is not None:
            match = rule.arguments.search(line)
            if match is None:
                continue
            if match[0]:
                matches.append(match[0])
        if rule.environment is not None:
            matching = [item for item in variables if rule.environment.fullmatch(item)]
            if not matching:
                continue
            matches += matching
        if rule.unless_arguments is not None and rule.unless_arguments.search(line):
            continue
        unless = rule.unless_environment
        if unless is not None and any(unless.fullmatch(item) for item in variables):
            continue
        yield PreflightFinding(
            check=rule.id,
            severity=rule.severity,
            message=f"{rule.message} (seen: {', '.join(matches)})" if matches else rule.message,
            remedy=rule.remedy,
        )


def _refusals(
    engine: str,
    arch: str,
    version: str | None,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[PreflightFinding]:
    releases = choices.load(engine, arch)
    installed = None if releases is None else releases.at(version)
    if installed is None:
        return
    # A vendor's build may take what the release does not: it is told, and tried.
    is_release = version is not None and Version(version).local is None
    for refusal in choices.refusals(installed, arguments, environment):
        yield PreflightFinding(
            check="release_refuses",
            severity="error" if is_release else "warning",
            message=refusal.message,
            remedy=f"it takes {' or '.join(refusal.instead)}"
            if refusal.instead
            else "leave it out",
        )
