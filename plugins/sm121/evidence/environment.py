"""The reproducibility record: what a run was made with. Phase 9 of the benchmark plan. A value that
cannot be known is null, and ``unknown`` says why."""

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, Field, JsonValue, TypeAdapter, ValidationError

from sm121.compilation.caches import CompileCaches
from sm121.core import architecture, data_file, digest, interpreter
from sm121.core.data_file import Record
from sm121.core.redaction import redact, redact_arguments, redact_environment, secrets_of
from sm121.evidence import engine_probe
from sm121.evidence.mapped import MappedLibrary

PROBE_TIMEOUT_S = 60.0
_GIT_TIMEOUT_S = 20.0
_IMAGE_ID = "SM121_IMAGE_ID"

#: Of the variables that are recorded: names, how names begin, and those of an image.
_RECORDED = data_file.load_key("recorded-variables.toml", "recorded", dict[str, tuple[str, ...]])
_SHA = re.compile(r"^g?(?P<sha>[0-9a-f]{7,40})$")
_LOCAL_SHA = re.compile(r"\+(?:\w+\.)?g(?P<sha>[0-9a-f]{7,40})\b")


class SourceRecord(Record):
    """Which source a piece of software was made from."""

    sha: str | None = None
    """Git commit, as long as it is known (a version string holds 9 digits)."""
    dirty: bool | None = None
    """True when tracked files of the checkout differ from that commit; None without a checkout."""
    version: str | None = None
    changes: str | None = None
    """Digest of what differs from that commit; None where nothing does."""

    @property
    def text(self) -> str:
        """All of it on one line."""
        parts = [self.version, self.sha, self.changes and f"with changes {self.changes}"]
        return " ".join(filter(None, parts)) or "unknown"


class GpuRecord(Record):
    """One GPU as NVML sees it. GB10 answers several of these with "not supported": null."""

    name: str | None = None
    unit: str | None = None
    """Which one of its kind it is: a digest of its UUID."""
    compute_capability: str | None = None
    clocks: Literal["locked", "default"] | None = None
    """``locked`` when application clocks differ from the default ones. Clocks locked by
    ``nvidia-smi -lgc`` are not visible to NVML, so ``default`` speaks of application clocks."""
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    power_mode: Literal["default", "changed"] | None = None
    persistence: bool | None = None
    memory_total_bytes: int | None = None


class HostRecord(Record):
    """The machine without its GPU."""

    cpu_model: str | None = None
    cores_physical: int | None = None
    cores_logical: int | None = None
    memory_bytes: int | None = None
    kernel: str | None = None
    os: str | None = None
    machine: str | None = None


class ContainerRecord(Record):
    """The container that the suite runs in, as far as a process inside can tell."""

    runtime: str
    image: str | None = None
    image_id: str | None = None
    build: dict[str, str] = Field(default_factory=dict)
    """What the image says of itself in its environment, such as NVIDIA_BUILD_ID."""


class PackagesRecord(Record):
    """Interpreter and installed distributions."""

    python: str | None = None
    packages: dict[str, str] | None = None
    """Normalised name to version."""


class EnvironmentRecord(Record):
    """What has to be known to repeat a run."""

    git_shas: dict[str, SourceRecord]
    """For ``vllm``, ``flashinfer`` and ``suite``."""
    container: ContainerRecord | None = None
    engine_packages: PackagesRecord
    suite_packages: PackagesRecord
    cuda_version: str | None = None
    driver_version: str | None = None
    cudnn_version: str | None = None
    gpus: list[GpuRecord] | None = None
    """None when there is no NVML to ask."""
    host: HostRecord
    engine_arguments: list[str]
    environment: dict[str, str]
    """The variables that bear on an engine, secrets blanked."""
    workload: dict[str, JsonValue]
    nccl: dict[str, list[MappedLibrary]] = Field(default_factory=dict)
    """By node, the NCCL that the server's processes mapped, once its path was judged; empty where
    none did, or where they are not seen from here."""
    autotune: dict[str, str] = Field(default_factory=dict)
    """Digest of each set of tactics that FlashInfer's autotuner has saved, by the folder that vLLM
    names after the configuration. Between two starts another set may be a slower one."""
    unknown: dict[str, str] = Field(default_factory=dict)
    """Field to the reason why it is null."""


class _Probe(BaseModel):
    python: str
    packages: dict[str, str]
    commits: dict[str, str]
    locations: dict[str, str | None]
    versions: dict[str, str | None]
    built_from: dict[str, str | None]
    cuda: str | None


def record(
    engine_python: str,
    *,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    workload: Mapping[str, object],
    root: Path = Path("/"),
) -> EnvironmentRecord:
    """The record of a run that is about to start, by the engine's interpreter, what it is started
    with, and what will be measured (``workload``). One subprocess is started, for `PROBE_TIMEOUT_S`
    seconds at most, and ``git`` for checkouts. ``root`` is where ``/proc`` and marks of a container
    are. What cannot be read is null. Raises TypeError: `workload` cannot be written as JSON."""
    unknown: dict[str, str] = {}
    secrets = secrets_of(environment)
    probe = _probe(engine_python, environment, unknown)
    names = ("flashinfer-python", "flashinfer")
    devices, driver = gpus(unknown)
    engine = PackagesRecord(python=probe.python, packages=probe.packages) if probe else None
    packages = dict(sorted(engine_probe.installed()["packages"].items()))
    if (suite := _checkout(Path(__file__).resolve())) is None:
        suite, unknown["git_shas.suite"] = SourceRecord(), "not run from a git checkout"
    if (cuda := (probe.cuda if probe else None) or environment.get("CUDA_VERSION")) is None:
        unknown["cuda_version"] = "the engine's torch was built without CUDA, or is not installed"
    return EnvironmentRecord(
        git_shas={
            "vllm": _engine_source("vllm", ("vllm",), probe, unknown),
            "flashinfer": _engine_source("flashinfer", names, probe, unknown),
            "suite": suite.model_copy(update={"version": packages.get("sm121-conformance")}),
        },
        container=container(environment, root),
        engine_packages=engine or PackagesRecord(),
        suite_packages=PackagesRecord(python=platform.python_version(), packages=packages),
        cuda_version=cuda,
        driver_version=driver or _driver_from_proc(root, unknown),
        cudnn_version=_cudnn(probe.packages if probe else {}, environment, unknown),
        gpus=devices,
        host=host(root),
        engine_arguments=redact_arguments(arguments, secrets),
        environment=relevant_environment(environment),
        workload=TypeAdapter(dict[str, JsonValue]).validate_json(
            redact(json.dumps(dict(workload), sort_keys=True), secrets)
        ),
        autotune=autotune_sets(environment),
        unknown=unknown,
    )


def autotune_sets(environment: Mapping[str, str]) -> dict[str, str]:
    """The sets of tactics that FlashInfer's autotuner has saved for vLLM.

    Args:
        environment: Of the engine: it says where the caches are.

    Returns:
        Folder below the cache to the digest of its set, whatever the order of its entries; empty
        where nothing was saved, as before a first start.
    """
    named = environment.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
    vllm = CompileCaches.of(environment).vllm
    root = Path(named).expanduser() if named else vllm / "flashinfer_autotune_cache"
    sets = {}
    for file in sorted(root.rglob("autotune_configs.json")):
        text = file.read_text("utf-8", errors="replace")
        try:
            content = json.loads(text)
        except ValueError:
            content = text  # cut short: another set all the same
        sets[str(file.parent.relative_to(root))] = digest.of(content)
    return sets


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an engine that bear on what it runs, sorted, secrets blanked."""
    chosen = {
        name: value
        for name, value in sorted(environment.items())
        if name in _RECORDED["names"] or name.startswith(_RECORDED["prefixes"])
    }
    return redact_environment(chosen, secrets_of(environment))


def _probe(
    engine_python: str, environment: Mapping[str, str], unknown: dict[str, str]
) -> _Probe | None:
    source = (files("sm121.evidence") / "engine_probe.py").read_text(encoding="utf-8")
    # PYTHONPATH counts: the development container has its checkouts there.
    variables = {**os.environ, **environment, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        answer = interpreter.ask(engine_python, source, variables, within_s=PROBE_TIMEOUT_S)
        return _Probe.model_validate(answer)
    except interpreter.NoAnswer as error:
        unknown["engine_packages"] = str(error)
    except ValidationError as error:
        problem = f"{engine_python} answered something else: {error.error_count()} errors"
        unknown["engine_packages"] = problem
    return None


def _engine_source(
    name: str, distributions: tuple[str, ...], probe: _Probe | None, unknown: dict[str, str]
) -> SourceRecord:
    if probe is None:
        unknown[f"git_shas.{name}"] = "the engine's interpreter did not answer"
        return SourceRecord()
    installed = next(filter(None, map(probe.packages.get, distributions)), None)
    version = probe.versions.get(name) or installed
    location = probe.locations.get(name)
    if location is None and version is None:
        unknown[f"git_shas.{name}"] = "not installed in the engine's environment"
        return SourceRecord()
    if location is not None and (checkout := _checkout(Path(location) / "__init__.py")):
        return checkout.model_copy(update={"version": version})
    stated = [_SHA.match(probe.commits.get(item) or "") for item in distributions]
    stated += [_SHA.match(probe.built_from.get(name) or ""), _LOCAL_SHA.search(version or "")]
    if match := next(filter(None, stated), None):
        return SourceRecord(sha=match["sha"], version=version)
    unknown[f"git_shas.{name}"] = f"version {version} is installed without a commit in its metadata"
    return SourceRecord(version=version)


def _checkout(file: Path) -> SourceRecord | None:
    """The commit of the checkout that tracks `file`, and what differs from it; None when none does:
    a virtual environment may lie inside some other project's checkout."""
    folder = file.parent
    if _git(folder, "ls-files", "--error-unmatch", file.name) is None:
        return None
    if (sha := _git(folder, "rev-parse", "HEAD")) is None:
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    changes = _git(folder, "diff", "HEAD") if status else None
    return SourceRecord(
        sha=sha.strip(),
        dirty=None if status is None else bool(status),
        changes=None if changes is None else digest.of(changes),
    )


def changed_files(checkout: Path, parts: Sequence[str]) -> list[str] | None:
    """Files of a checkout that its commit does not have, or not so, also those that git was told
    not to look at; None: git knows nothing of them. `parts`: files and folders."""
    status = _git(checkout, "status", "--porcelain", "-uno", "--", *parts)
    flags = _git(checkout, "ls-files", "-v", "--", *parts)
    others = _git(checkout, "ls-files", "--others", "--", *parts)
    if status is None or others is None or not flags:
        return None
    changed = [line[3:] for line in status.splitlines()]
    changed += [line[2:] for line in flags.splitlines() if not line.startswith("H ")]
    changed += [
        name
        for name in others.splitlines()
        if "__pycache__/" not in name and not (checkout / name).is_symlink()
    ]
    return list(dict.fromkeys(changed))


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says of the checkout of a folder; None where it does not answer. No variable may
    send it to another checkout, and it may be somebody else's, as often in a container."""
    git = shutil.which("git")
    if git is None:
        return None
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    trust = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false")
    try:
        run = subprocess.run(
            [git, *trust, "-C", str(folder), *arguments],
            capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False,
            env={**variables, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout if run.returncode == 0 else None


def _cudnn(
    packages: Mapping[str, str], environment: Mapping[str, str], unknown: dict[str, str]
) -> str | None:
    for name, version in packages.items():
        if re.fullmatch(r"nvidia-cudnn(-cu\d+)?", name):
            return version
    # NGC images have it in the system, and say so.
    version_of_image = environment.get("CUDNN_VERSION")
    if version_of_image is None:
        unknown["cudnn_version"] = "no nvidia-cudnn package and no CUDNN_VERSION in the environment"
    return version_of_image


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _driver_from_proc(root: Path, unknown: dict[str, str]) -> str | None:
    text = _read(root / "proc/driver/nvidia/version")
    if text is None:
        unknown["driver_version"] = "no NVML and no /proc/driver/nvidia/version"
        return None
    match = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


def gpus(unknown: dict[str, str]) -> tuple[list[GpuRecord] | None, str | None]:
    """The GPUs and the driver's version. (None, None) without NVML."""
    nvml: Any = import_module("pynvml")
    try:
        with architecture.opened_nvml():
            driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion)
            count: int = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
            handles = [_ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
            return [_gpu(nvml, handle) for handle in handles if handle is not None], driver
    except nvml.NVMLError as error:
        unknown["gpus"] = f"NVML: {error}"
        return None, None


def _ask(nvml: Any, function: Any, *arguments: Any) -> Any:
    """An NVML answer; None where this GPU has none (much of it on GB10)."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _gpu(nvml: Any, handle: Any) -> GpuRecord:
    def ask(question: str, *arguments: Any) -> Any:
        return _ask(nvml, getattr(nvml, f"nvmlDeviceGet{question}"), handle, *arguments)

    sm = nvml.NVML_CLOCK_SM
    application, default = ask("ApplicationsClock", sm), ask("DefaultApplicationsClock", sm)
    limit, limit_default = ask("EnforcedPowerLimit"), ask("PowerManagementDefaultLimit")
    capability, persistence = ask("CudaComputeCapability"), ask("PersistenceMode")
    total, uuid = ask("MemoryInfo"), ask("UUID")
    record = GpuRecord(
        name=ask("Name"),
        unit=None if uuid is None else digest.of(uuid),
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        sm_clock_mhz=ask("ClockInfo", sm),
        sm_clock_max_mhz=ask("MaxClockInfo", sm),
        memory_clock_mhz=ask("ClockInfo", nvml.NVML_CLOCK_MEM),
        power_limit_w=None if limit is None else limit / 1000,
        power_limit_default_w=None if limit_default is None else limit_default / 1000,
        persistence=None if persistence is None else bool(persistence),
        memory_total_bytes=None if total is None else int(total.total),
    )
    if application is not None and default is not None:
        record.clocks = "default" if application == default else "locked"
    if limit is not None and limit_default is not None:
        record.power_mode = "default" if limit == limit_default else "changed"
    return record


def host(root: Path = Path("/")) -> HostRecord:
    """Processor, memory, kernel and distribution of this machine."""
    release = re.search(r'(?m)^PRETTY_NAME="?([^"\n]+)"?', _read(root / "etc/os-release") or "")
    text = _read(root / "proc/cpuinfo") or ""
    model = re.search(r"(?m)^model name\s*:\s*(.+)$", text)
    # ARM (GB10) has only part numbers, which are its name then.
    parts = ", ".join(sorted({*re.findall(r"(?m)^CPU part\s*:\s*(\S+)", text)}))
    implementer = re.search(r"(?m)^CPU implementer\s*:\s*(\S+)", text)
    arm = f"ARM implementer {implementer[1]} part {parts}" if parts and implementer else None
    return HostRecord(
        cpu_model=model[1].strip() if model else arm,
        cores_physical=psutil.cpu_count(logical=False),
        cores_logical=psutil.cpu_count(logical=True),
        memory_bytes=psutil.virtual_memory().total,
        kernel=platform.release() or None,
        os=release[1] if release else None,
        machine=platform.machine() or None,
    )


def cpu_flags(root: Path = Path("/")) -> str:
    """The flags of this machine's CPU, as /proc/cpuinfo lists them; empty where it lists none."""
    match = re.search(r"(?m)^flags\s*:\s*(.+)$", _read(root / "proc/cpuinfo") or "")
    return match[1] if match else ""


def container(environment: Mapping[str, str], root: Path = Path("/")) -> ContainerRecord | None:
    """The container of this process; None when nothing says that there is one. Podman writes the
    image into ``/run/.containerenv``. Docker tells a process nothing but that it is there, so the
    image is null unless it names itself in its environment, as NGC's and vLLM's do, and its id is
    that of the variable SM121_IMAGE_ID, if whoever started the container gave it."""
    build = {name: environment[name] for name in _RECORDED["image"] if environment.get(name)}
    image = environment.get("VLLM_IMAGE_TAG")
    image_id = environment.get(_IMAGE_ID) or None
    text = _read(root / "run/.containerenv")
    if text is not None:
        values = dict(re.findall(r'(?m)^(\w+)="?([^"\n]*)"?$', text))
        return ContainerRecord(
            runtime="podman",
            image=values.get("image") or image,
            image_id=values.get("imageid") or image_id,
            build=build,
        )
    if (root / ".dockerenv").exists():
        return ContainerRecord(runtime="docker", image=image, image_id=image_id, build=build)
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return ContainerRecord(runtime="kubernetes", image=image, image_id=image_id, build=build)
    return None
