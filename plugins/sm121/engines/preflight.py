"""Checks before a server is started. The checks modify nothing.

The data of the checks (architectures, memory for compiling, wrong arguments) are in
``fixtures/preflight.toml``.
"""

import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from pydantic import Field, model_validator

from sm121.compilation import caches, jit
from sm121.core import builds, data_file, engine_settings, printable
from sm121.core.data_file import DataTable, Entries, Regex
from sm121.core.engine_arguments import one_line
from sm121.core.server import Node
from sm121.core.versions import Versions, within
from sm121.engines.cuda_versions import CudaVersion, CudaVersions

Severity = Literal["error", "warning", "note"]

_GIB = 1 << 30
_DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"
_FLASHINFER_NAMED = re.compile(r"(?i)--(moe|attention)\S* flashinfer")
#: Maximum number of names in a message.
_SHOWN_NAMES = 5


class PreflightFinding(DataTable):
    """A problem that prevents or endangers a start.

    In the data file, names in braces are placeholders for values that the check finds.
    """

    check: str
    severity: Severity
    message: str
    """The text of the finding, with the expected and the actual state."""
    remedy: str


class Architecture(DataTable):
    """An architecture of GPUs."""

    name: str
    #: The compute capability, for example 12.1.
    target: str = Field(pattern=r"^\d+\.\d$")
    #: The names of the architecture's machine code, for example sm_121a.
    codes: tuple[str, ...] = Field(min_length=1)
    #: Why a list of architectures must not contain the compute capability without a suffix.
    bare: str

    @property
    def number(self) -> int:
        """The compute capability as a whole number: 121 for 12.1."""
        return int(self.target.replace(".", ""))


class _Floor(DataTable):
    """The minimum version of a component (for example the driver) for an architecture."""

    arch: tuple[str, ...] = Field(min_length=1)
    part: Literal["driver", "toolkit", "cudnn"]
    #: The name of the component in a message.
    title: str
    at_least: str = Field(pattern=r"^\d+\.\d+$")
    #: The consequence of an older version.
    reason: str
    remedy: str
    source: str

    @property
    def version(self) -> CudaVersion:
        """The version in ``at_least``."""
        major, minor = self.at_least.split(".")
        return CudaVersion(int(major), int(minor))


class _Rule(DataTable):
    id: str = Field(pattern=r"^[a-z0-9_]+$")
    arch: tuple[str, ...] = ()
    severity: Severity
    arguments: Regex | None = None
    unless_arguments: Regex | None = None
    environment: Regex | None = None
    unless_environment: Regex | None = None
    #: The releases or builds to which the rule applies. If the engine's release is unknown, only
    #: rules without this bound apply.
    versions: Versions = ""
    build: str | None = None
    unless_build: str | None = None
    #: The versions of FlashInfer to which the rule applies. If FlashInfer's version is unknown, a
    #: rule with this bound does not apply.
    flashinfer: Versions = ""
    #: The rule applies if this package is installed in another version than FlashInfer.
    beside: str | None = None
    message: str
    remedy: str
    source: str

    @model_validator(mode="after")
    def _check(self) -> "_Rule":
        if self.arguments is None and self.environment is None and self.beside is None:
            raise ValueError("expected arguments, environment or beside, got none")
        return self


class PreflightData(DataTable):
    """The content of ``fixtures/preflight.toml``."""

    architecture: tuple[Architecture, ...] = Field(min_length=1)
    finding: dict[str, PreflightFinding] = Field(default_factory=dict)
    floor: tuple[_Floor, ...] = ()
    rule: Entries[_Rule]

    @model_validator(mode="after")
    def _check(self) -> "PreflightData":
        names = {item.name for item in self.architecture}
        rows = [(f"floor {floor.part}", floor.arch) for floor in self.floor]
        rows += [(f"rule {rule.id}", rule.arch) for rule in self.rule]
        for row, arch in rows:
            strange = set(arch) - names
            if strange:
                raise ValueError(
                    f"{row}: arch: expected names among {', '.join(sorted(names))}, got "
                    f"{', '.join(sorted(strange))}"
                )
        return self


def load_preflight() -> PreflightData:
    """Return the content of ``fixtures/preflight.toml``.

    Raises:
        DataFileError: The file is wrong.
    """
    return data_file.load("preflight.toml", PreflightData)


def finding_of(
    name: str, severity: Severity | None = None, /, **values: object
) -> PreflightFinding:
    """Return a finding of the data file.

    Args:
        name: The key of the finding in the data file.
        severity: The severity; None for the severity in the data file.
        **values: The values for the placeholders in the finding's texts.
    """
    row = load_preflight().finding[name]
    update = {
        "severity": severity or row.severity,
        "message": row.message.format_map(values),
        "remedy": row.remedy.format_map(values),
    }
    return row.model_copy(update=update)


def lacking_tools(environment: Mapping[str, str]) -> list[str]:
    """Return which of nvcc and ninja FlashInfer would not find, and where it looks for them.

    Args:
        environment: The whole environment of the engine.
    """
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
    """Yield a finding for each other node of a server with too little free memory.

    Args:
        needs: The needs of the profile.
        facts: The facts of each node (`sm121.engines.nodes.check_nodes`), this machine first.

    Yields:
        The findings. Each contains the name of its node.
    """
    for node, record in [*facts.items()][1:]:
        finding = _check_memory(needs, record["available_bytes"])
        if finding is not None:
            yield finding.model_copy(update={"message": f"{node}: {finding.message}"})


def _check_memory(needs: engine_settings.Needs, available_bytes: int) -> PreflightFinding | None:
    available = available_bytes / _GIB
    if needs.memory_gib is None or available >= needs.memory_gib:
        return None
    return finding_of("memory", memory=needs.memory_gib, available=available)


@dataclass(frozen=True)
class Preflight:
    """The checks of one start of an engine."""

    #: The architecture, for example ``sm121``. If it is not in the data file, the checks that
    #: depend on the architecture are skipped.
    arch: str
    arguments: Sequence[str]
    #: The engine's whole environment.
    environment: Mapping[str, str]
    _: KW_ONLY
    #: The needs of the profile; a need that is None or empty is not checked.
    needs: engine_settings.Needs
    #: A folder on the disk that must have free space. The folder need not exist yet.
    directory: Path
    #: The compiled kernels of the engine's FlashInfer. If None, all versions in its cache count.
    modules: jit.FlashInferModules | None = None
    #: The CUDA versions of the driver and of the engine's torch.
    cuda: CudaVersions = field(default_factory=CudaVersions)
    #: The engine's release or build (`builds.identity`); None if it is not known.
    version: str | None = None
    #: The time limit of a start that compiles, in seconds.
    cold_ready_within_s: float = math.inf

    def findings(self) -> list[PreflightFinding]:
        """Return the problems of the start, errors first."""
        data = load_preflight()
        findings = [*self._room(), *self._older_driver(), *self._floors(data)]
        for architecture in data.architecture:
            if architecture.name == self.arch:
                findings += self._arch_lists(architecture)
                findings += self._jit(architecture)
        findings += filter(None, map(self._broken, data.rule))
        findings += self._unmet_requirements()
        order = get_args(Severity)
        return sorted(findings, key=lambda finding: order.index(finding.severity))

    def _room(self) -> Iterator[PreflightFinding]:
        available = psutil.virtual_memory().available  # MemAvailable on Linux
        memory = _check_memory(self.needs, available)
        if memory is not None:
            yield memory
        disk = self.needs.disk_gib
        path = self.directory.absolute()
        existing = next(item for item in (path, *path.parents) if item.exists())
        free = shutil.disk_usage(existing).free / _GIB
        if disk is not None and free < disk:
            yield finding_of("disk", disk=disk, path=path, free=free)

    def _older_driver(self) -> Iterator[PreflightFinding]:
        driver, toolkit = self.cuda.driver, self.cuda.toolkit
        if driver is None or toolkit is None or driver >= toolkit:
            return
        is_of_same_major = driver.major == toolkit.major
        name = "driver_of_an_older_minor" if is_of_same_major else "driver_of_an_older_major"
        yield finding_of(name, driver=driver, toolkit=toolkit)

    def _floors(self, data: PreflightData) -> Iterator[PreflightFinding]:
        """Compare driver, toolkit and cuDNN with the architecture's minimum versions."""
        if not self.cuda.asked:
            return
        older_driver = any(self._older_driver())  # Another finding already reports an older driver.
        unknown = []
        for floor in data.floor:
            if self.arch not in floor.arch or (floor.part == "driver" and older_driver):
                continue
            version = self.cuda.of_part(floor.part)
            if version is None:
                unknown.append(f"{floor.title} {floor.at_least}")
            elif version < floor.version:
                yield finding_of(
                    "below_floor",
                    title=floor.title,
                    arch=self.arch,
                    at_least=floor.at_least,
                    version=version,
                    reason=floor.reason,
                    remedy=floor.remedy,
                )
        if unknown:
            yield finding_of("unknown_floor", arch=self.arch, unknown=", ".join(unknown))

    def _unmet_requirements(self) -> Iterator[PreflightFinding]:
        unmet = self.modules.unmet if self.modules is not None else ()
        for each in unmet:
            yield finding_of(
                "requirement",
                package=f"{each.package} {each.version}",
                requirement=each.requirement,
                installed=each.installed,
            )

    def _arch_lists(self, architecture: Architecture) -> Iterator[PreflightFinding]:
        codes = self.needs.arch_list
        if not codes:
            return
        separators: dict[str, tuple[str, Severity]] = {
            "FLASHINFER_CUDA_ARCH_LIST": (r"\s+", "error"),
            "TORCH_CUDA_ARCH_LIST": (r"[\s;,]+", "warning"),
        }
        for name, (separator, severity) in separators.items():
            value = self.environment.get(name, "").strip()
            if not value:
                continue  # without the variable, the engine reads the architecture from the device
            if name.startswith("FLASHINFER") and re.search("[,;]", value):
                yield finding_of("arch_list_separators", name=name, value=value, code=codes[0])
                continue
            entries = [entry.removesuffix("+PTX") for entry in re.split(separator, value) if entry]
            is_accepted = not {*entries}.isdisjoint(codes)
            is_bare = architecture.target in entries
            if is_bare or not is_accepted:
                yield finding_of(
                    "arch_list",
                    "warning" if is_accepted else severity,
                    name=name,
                    code=codes[0],
                    codes=", ".join(codes),
                    value=value,
                    why=f": {architecture.bare}" if is_bare else "",
                )

    def _jit(self, architecture: Architecture) -> Iterator[PreflightFinding]:
        version = self._flashinfer
        needed = jit.needed(self.needs, self.arguments, self.environment, version)
        if not needed:
            return
        cache = caches.CompileCaches.of(self.environment).flashinfer
        modules = self.modules or jit.FlashInferModules(None, cache)
        foreign = _caches_of_others(modules.folder, architecture)
        if foreign:
            yield finding_of(
                "jit_cache_of_others",
                it=architecture,
                codes=", ".join(architecture.codes),
                others=printable.some_of(foreign, _SHOWN_NAMES),
                m=modules,
            )
        missing = modules.missing(needed, architecture.codes, architecture.number)
        if not missing:
            return
        names = printable.some_of([module.module for module in missing], _SHOWN_NAMES)
        cpu_s = sum(module.cpu_s for module in missing)
        yield finding_of(
            "jit_cache",
            version=f" of FlashInfer {modules.version}" if modules.version else "",
            folder=modules.folder,
            state="cold" if len(missing) == len(needed) else "incomplete",
            names=names,
            minutes=cpu_s / 60,
        )
        yield from self._compilers(missing, names, cpu_s)
        yield from self._tools(names)

    def _tools(self, names: str) -> Iterator[PreflightFinding]:
        """Yield a finding if a tool is missing that is needed to compile the named modules."""
        lacking = lacking_tools(self.environment)
        if not lacking:
            return
        # vLLM searches for the tools, too. If they are missing, it does not use FlashInfer for
        # attention, unless this variable states that the kernels are installed.
        has_cubin = self.environment.get("VLLM_HAS_FLASHINFER_CUBIN", "").strip()
        is_silenced = has_cubin not in ("", "0")
        is_named = _FLASHINFER_NAMED.search(one_line(self.arguments)) is not None
        why = ""
        if is_silenced:
            why = "; VLLM_HAS_FLASHINFER_CUBIN switches off vLLM's own search for them"
        severity: Severity = "error" if is_silenced or is_named else "note"
        yield finding_of(
            "jit_tools", severity, names=names, lacking=" and no ".join(lacking), why=why
        )

    def _compilers(
        self, missing: Sequence[jit.JitModule], names: str, cpu_s: float
    ) -> Iterator[PreflightFinding]:
        text = self.environment.get("MAX_JOBS", "").strip()
        if text and not (text.isdecimal() and int(text) > 0):
            yield finding_of("max_jobs_is_no_number", text=text)
            return
        bound = jit.bound(missing, self.environment, resident_gib=self.needs.weights_gib or 0.0)
        if bound.jobs == 0:
            yield finding_of("jit_memory", names=names, bound=bound)
            return
        if text and int(text) > bound.fitting:
            yield finding_of("max_jobs", text=text, names=names, bound=bound)
            return
        jobs = min(int(text or bound.jobs), bound.jobs)
        takes_s = cpu_s / jobs
        if takes_s > self.cold_ready_within_s:
            yield finding_of(
                "jit_time",
                names=names,
                minutes=takes_s / 60,
                jobs=jobs,
                limit=self.cold_ready_within_s / 60,
                bound=bound,
            )

    @property
    def _flashinfer(self) -> str | None:
        """The version of the engine's FlashInfer; None if it is not known."""
        return self.modules.version if self.modules is not None else None

    def _broken(self, rule: _Rule) -> PreflightFinding | None:
        """Return the finding of a rule if the start violates the rule, else None."""
        if not self._applies(rule):
            return None
        line = one_line(self.arguments)
        variables = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        if rule.unless_arguments is not None and rule.unless_arguments.search(line):
            return None
        excepted = rule.unless_environment
        if excepted is not None and any(map(excepted.fullmatch, variables)):
            return None
        matches = []
        if rule.flashinfer:
            matches.append(f"FlashInfer {self._flashinfer}")
        if rule.beside is not None:
            other = self._of_another_release(rule.beside)
            if other is None:
                return None
            matches.append(f"{rule.beside} {other}")
        if rule.arguments is not None:
            match = rule.arguments.search(line)
            if match is None:
                return None
            if match[0]:
                matches.append(match[0])
        if rule.environment is not None:
            matching = list(filter(rule.environment.fullmatch, variables))
            if not matching:
                return None
            matches += matching
        text = f" (found: {', '.join(matches)})" if matches else ""
        return PreflightFinding(
            check=rule.id,
            severity=rule.severity,
            message=rule.message + text,
            remedy=rule.remedy,
        )

    def _applies(self, rule: _Rule) -> bool:
        """Return whether a rule is for this architecture, engine and FlashInfer."""
        row = builds.named(self.version)
        build = row.name if row is not None else "none"
        if rule.arch and self.arch not in rule.arch:
            return False
        if rule.unless_build == build or rule.build not in (None, build):
            return False
        return within(self.version, rule.versions) and within(self._flashinfer, rule.flashinfer)

    def _of_another_release(self, package: str) -> str | None:
        """Return the version of an installed package if it is not the version of FlashInfer.

        Return None if the package is not installed, or if the two versions are equal.
        """
        if self.modules is None:
            return None
        version = self.modules.beside.get(package)
        return version if jit.other_release(version, self.modules.version) else None


def _caches_of_others(folder: Path, architecture: Architecture) -> list[str]:
    """Return the names of folders with kernels that were compiled for other architectures."""
    names = []
    for cache in folder.glob("*/*"):  # <version>/<architectures>
        found = jit.architectures_of(cache)
        is_cache = bool(found) and (cache / "cached_ops").is_dir()
        if is_cache and found.isdisjoint(architecture.codes):
            names.append(cache.name)
    return sorted(names)
