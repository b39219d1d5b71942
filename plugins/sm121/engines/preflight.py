"""Checks before a server is started. They look and change nothing. What is known of architectures,
build memory and wrong arguments is data: ``fixtures/preflight.toml``."""

import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from packaging.version import Version
from pydantic import Field, model_validator

from sm121.compilation import caches, jit
from sm121.core import builds, data_file, engine_settings, printable
from sm121.core.data_file import DataTable, Entries, Regex
from sm121.core.engine_arguments import one_line
from sm121.core.server import Node
from sm121.core.versions import Versions, within

Severity = Literal["error", "warning", "note"]

_GIB = 1 << 30
_DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"
_FLASHINFER_NAMED = re.compile(r"(?i)--(moe|attention)\S* flashinfer")
_CACHE_NAME = re.compile(r"\d{2,3}[a-z]?(_\d{2,3}[a-z]?)*")


class PreflightFinding(DataTable):
    """Something that a start should not pass over. In the data names in braces are numbers and
    names of the check."""

    check: str
    severity: Severity
    message: str
    """What was required and what was seen."""
    remedy: str


class _Architecture(DataTable):
    name: str
    target: str = Field(pattern=r"^\d+\.\d$")
    codes: tuple[str, ...] = Field(min_length=1)
    bare: str

    @property
    def number(self) -> int:
        return int(self.target.replace(".", ""))


class _Rule(DataTable):
    id: str = Field(pattern=r"^[a-z0-9_]+$")
    arch: tuple[str, ...] = ()
    severity: Severity
    arguments: Regex | None = None
    unless_arguments: Regex | None = None
    environment: Regex | None = None
    unless_environment: Regex | None = None
    #: Releases or builds that it holds for; of an unknown engine a rule without a bound holds.
    versions: Versions = ""
    build: str | None = None
    unless_build: str | None = None
    #: Versions of FlashInfer that it holds for; not where the installed one is not known.
    flashinfer: Versions = ""
    #: A package beside FlashInfer, where it is installed in another version than FlashInfer.
    beside: str | None = None
    message: str
    remedy: str
    source: str

    @model_validator(mode="after")
    def _check(self) -> "_Rule":
        if self.arguments is None and self.environment is None and self.beside is None:
            raise ValueError("arguments, environment or beside is needed")
        return self


class PreflightData(DataTable):
    """The content of ``fixtures/preflight.toml``."""

    architecture: tuple[_Architecture, ...] = Field(min_length=1)
    finding: dict[str, PreflightFinding] = Field(default_factory=dict)
    rule: Entries[_Rule]

    @model_validator(mode="after")
    def _check(self) -> "PreflightData":
        names = {item.name for item in self.architecture}
        for rule in self.rule:
            if strange := set(rule.arch) - names:
                raise ValueError(
                    f"rule {rule.id}: arch must be of {sorted(names)}, seen {sorted(strange)}"
                )
        return self


def load_preflight() -> PreflightData:
    """The known checks. Raises DataFileError when the file is wrong."""
    return data_file.load("preflight.toml", PreflightData)


def _of(name: str, severity: Severity | None = None, /, **values: object) -> PreflightFinding:
    row = load_preflight().finding[name]
    texts = {key: getattr(row, key).format_map(values) for key in ("message", "remedy")}
    return row.model_copy(update={"severity": severity or row.severity, **texts})


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


def of_nodes(
    needs: engine_settings.Needs, facts: Mapping[Node, Mapping[str, Any]]
) -> Iterator[PreflightFinding]:
    """What stands against a start in the memory of the other nodes of a server. `facts`: of each
    node (`sm121.engines.nodes.look`), this machine's first."""
    for node, record in [*facts.items()][1:]:
        for each in _memory(needs, record["available_bytes"]):
            yield each.model_copy(update={"message": f"{node}: {each.message}"})


def _memory(needs: engine_settings.Needs, available_bytes: int) -> Iterator[PreflightFinding]:
    available = available_bytes / _GIB
    if needs.memory_gib is not None and available < needs.memory_gib:
        yield _of("memory", memory=needs.memory_gib, available=available)


@dataclass(frozen=True)
class Preflight:
    """What stands against starting an engine with these arguments in this environment."""

    #: A name such as ``sm121``; nothing of one that the data does not know is checked.
    arch: str
    arguments: Sequence[str]
    #: The engine's whole environment.
    environment: Mapping[str, str]
    _: KW_ONLY
    #: What the machine must have; what is None or empty is not checked.
    needs: engine_settings.Needs
    #: Where the disk must have room. It need not exist yet.
    directory: Path
    #: What the engine's FlashInfer has compiled (default: in its cache, of any version).
    modules: jit.FlashInferModules | None = None
    #: Of the engine that will be started (`builds.identity`); None where that is not known.
    version: str | None = None
    #: The most that a start may take which compiles.
    cold_ready_within_s: float = math.inf

    def findings(self) -> list[PreflightFinding]:
        """Errors first; empty when nothing was found."""
        findings, data = [*self._room()], load_preflight()
        for architecture in (item for item in data.architecture if item.name == self.arch):
            findings += [*self._arch_lists(architecture), *self._jit(architecture)]
        findings += filter(None, map(self._broken, data.rule))
        order = get_args(Severity)
        return sorted(findings, key=lambda finding: order.index(finding.severity))

    def _room(self) -> Iterator[PreflightFinding]:
        available = psutil.virtual_memory().available  # MemAvailable on Linux
        yield from _memory(self.needs, available)
        disk, path = self.needs.disk_gib, self.directory.absolute()
        existing = next(item for item in (path, *path.parents) if item.exists())
        free = shutil.disk_usage(existing).free / _GIB
        if disk is not None and free < disk:
            yield _of("disk", disk=disk, path=path, free=free)

    def _arch_lists(self, architecture: _Architecture) -> Iterator[PreflightFinding]:
        if not (codes := self.needs.arch_list):
            return
        separators: dict[str, tuple[str, Severity]] = {
            "FLASHINFER_CUDA_ARCH_LIST": (r"\s+", "error"),
            "TORCH_CUDA_ARCH_LIST": (r"[\s;,]+", "warning"),
        }
        for name, (separator, severity) in separators.items():
            value = self.environment.get(name, "").strip()
            if not value:
                continue  # the engine asks the device, which is right
            if name.startswith("FLASHINFER") and re.search("[,;]", value):
                yield _of("arch_list_separators", name=name, value=value, code=codes[0])
                continue
            entries = [entry.removesuffix("+PTX") for entry in re.split(separator, value) if entry]
            accepted = not {*entries}.isdisjoint(codes)
            bare = architecture.target in entries
            if bare or not accepted:
                why = f": {architecture.bare}" if bare else ""
                values = {"name": name, "codes": ", ".join(codes), "value": value, "why": why}
                severity = "warning" if accepted else severity
                yield _of("arch_list", severity, code=codes[0], **values)

    def _jit(self, architecture: _Architecture) -> Iterator[PreflightFinding]:
        version = self.modules.version if self.modules is not None else None
        if not (needed := jit.needed(self.needs, self.arguments, self.environment, version)):
            return
        cache = caches.CompileCaches.of(self.environment).flashinfer
        modules = self.modules or jit.FlashInferModules(None, cache)
        wrong = [
            folder
            for folder in modules.folder.glob("*/*")  # <version>/<architectures>
            if _CACHE_NAME.fullmatch(folder.name)
            and not {*folder.name.split("_")} & {*architecture.codes}
            and (folder / "cached_ops").is_dir()
        ]
        if wrong:
            others = printable.some_of(sorted(folder.name for folder in wrong), 5)
            codes = ", ".join(architecture.codes)
            yield _of("jit_cache_of_others", it=architecture, codes=codes, others=others, m=modules)
        missing = modules.missing(needed, architecture.codes, architecture.number)
        if not missing:
            return
        state = "cold" if len(missing) == len(needed) else "incomplete"
        version = f" of FlashInfer {modules.version}" if modules.version else ""
        names = printable.some_of([module.module for module in missing], 5)
        cpu_s = sum(module.cpu_s for module in missing)
        minutes, folder = cpu_s / 60, modules.folder
        yield _of(
            "jit_cache", version=version, folder=folder, state=state, names=names, minutes=minutes
        )
        yield from self._compilers(missing, names, cpu_s)
        if not (lacking := lacking_tools(self.environment)):
            return
        silenced = self.environment.get("VLLM_HAS_FLASHINFER_CUBIN", "").strip() not in ("", "0")
        # Else vLLM looks for them too, and chooses attention without FlashInfer.
        certain = silenced or _FLASHINFER_NAMED.search(one_line(self.arguments)) is not None
        why = (
            "; VLLM_HAS_FLASHINFER_CUBIN switches off vLLM's own look for them" if silenced else ""
        )
        severity: Severity = "error" if certain else "note"
        yield _of("jit_tools", severity, names=names, lacking=" and no ".join(lacking), why=why)

    def _compilers(
        self, missing: Sequence[jit.JitModule], names: str, cpu_s: float
    ) -> Iterator[PreflightFinding]:
        text = self.environment.get("MAX_JOBS", "").strip()
        if text and not (text.isdecimal() and int(text) > 0):
            yield _of("max_jobs_is_no_number", text=text)
            return
        bound = jit.bound(missing, self.environment, resident_gib=self.needs.weights_gib or 0.0)
        if bound.jobs == 0:
            yield _of("jit_memory", names=names, bound=bound)
        elif text and int(text) > bound.jobs:
            yield _of("max_jobs", text=text, names=names, bound=bound)
        elif (takes_s := cpu_s / (jobs := int(text or bound.jobs))) > self.cold_ready_within_s:
            limit, minutes = self.cold_ready_within_s / 60, takes_s / 60
            yield _of("jit_time", names=names, minutes=minutes, jobs=jobs, limit=limit, bound=bound)

    def _broken(self, rule: _Rule) -> PreflightFinding | None:
        row = builds.named(self.version)
        build = row.name if row is not None else "none"
        flashinfer = self.modules.version if self.modules is not None else None
        other = self._of_another_release(rule.beside)
        line = one_line(self.arguments)
        variables = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        arguments = rule.arguments.search(line) if rule.arguments is not None else None
        matching = [v for v in variables if rule.environment and rule.environment.fullmatch(v)]
        excepted = rule.unless_environment
        if (
            (rule.arch and self.arch not in rule.arch)
            or not within(self.version, rule.versions)
            or rule.unless_build == build
            or rule.build not in (None, build)
            or not within(flashinfer, rule.flashinfer)
            or (rule.beside is not None and other is None)
            or (rule.arguments is not None and arguments is None)
            or (rule.environment is not None and not matching)
            or (rule.unless_arguments is not None and rule.unless_arguments.search(line))
            or (excepted is not None and any(map(excepted.fullmatch, variables)))
        ):
            return None
        matches = [
            *([f"FlashInfer {flashinfer}"] if rule.flashinfer else []),
            *([f"{rule.beside} {other}"] if other else []),
            *([arguments[0]] if arguments and arguments[0] else []),
            *matching,
        ]
        text = f" (seen: {', '.join(matches)})" if matches else ""
        message = rule.message + text
        return PreflightFinding(
            check=rule.id, severity=rule.severity, message=message, remedy=rule.remedy
        )

    def _of_another_release(self, package: str | None) -> str | None:
        """The version of a package beside FlashInfer; None: not installed, or of its release."""
        if self.modules is None or self.modules.version is None or package is None:
            return None
        version = self.modules.beside.get(package)
        if version is None or Version(version).public == Version(self.modules.version).public:
            return None
        return version
