"""Find the modules that an engine compiles at its first start, and limit the compile jobs.

FlashInfer compiles with ninja, which uses all cores if ``MAX_JOBS`` is not set. On a machine with
unified memory, this can exhaust the memory and freeze the machine, because the weights are already
loaded.
"""

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from packaging.version import InvalidVersion, Version
from pydantic import Field

from sm121.compilation import caches, libraries
from sm121.core import data_file, engine_settings, interpreter, profile_fields
from sm121.core.data_file import DataTable, Entries, Regex
from sm121.core.engine_arguments import one_line
from sm121.core.versions import Versions, within

_GIB = 1 << 30
#: Matches the names of folders with compiled kernels, which consist of compute capabilities.
_CACHE_NAME = re.compile(r"\d{2,3}[a-z]?(_\d{2,3}[a-z]?)*")
#: The engine's argument for the page size of the KV cache.
_BLOCK_SIZE = re.compile(r"--block-size (\d+)")
#: The engine's argument for the number of draft tokens in speculative decoding.
_DRAFTS = re.compile(r"num[-_]speculative[-_]tokens[\"']?\s*[: ]\s*(\d+)")
#: The default page size, in tokens (vLLM's CacheConfig.DEFAULT_BLOCK_SIZE).
_PAGE = 16
#: FlashInfer's variable for the number of compile jobs.
_JOBS = "MAX_JOBS"
#: FlashInfer's variable for the number of threads of each nvcc.
_THREADS = "FLASHINFER_NVCC_THREADS"
_ARCHITECTURES = "FLASHINFER_CUDA_ARCH_LIST"

#: The packages with precompiled kernels for FlashInfer. The keys are modules, the values are names
#: of distributions.
_PRECOMPILED = {
    "flashinfer_cubin": "flashinfer-cubin",
    "flashinfer_jit_cache": "flashinfer-jit-cache",
}
#: For each package, those of its requirements that must be installed in exactly the required
#: release.
_OF_ONE_TIME = {
    "torchvision": ("torch",),
    "torchaudio": ("torch",),
    "torchcodec": ("torch",),
    "flashinfer-python": ("apache-tvm-ffi", "nvidia-cutlass-dsl"),
    "vllm": ("apache-tvm-ffi", "nvidia-cutlass-dsl"),
}


class JitModule(DataTable):
    """A module of FlashInfer that gpt-oss may need."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    #: A shell pattern for the name of the module's folder in the cache. ``{page}`` stands for the
    #: page size of the KV cache, ``{queries}`` for the queries per sequence in a decode step.
    module: str
    #: A pattern for a line of the module's generated configuration. It is needed if the name does
    #: not identify the variant of the module.
    generated: Regex | None = None
    #: The releases of FlashInfer in which all modules with this pattern have the same name, so that
    #: the cache contains only the module that was compiled last.
    shares_name: Versions = ""
    #: The releases of FlashInfer with which the engine calls the module. With an unknown release,
    #: the engine is assumed to call it.
    flashinfer: Versions = ""
    #: A pattern for the engine's arguments. If it does not match, the module is not needed.
    arguments: Regex | None = None
    #: A pattern for the engine's arguments. If it matches, the module is not needed.
    unless_arguments: Regex | None = None
    #: A pattern for environment variables, as ``NAME=VALUE``. If it matches, the module is not
    #: needed.
    unless_environment: Regex | None = None
    #: The peak memory of one compile job, in GiB.
    memory_gib: float = Field(gt=0)
    #: The CPU time for the whole module, in seconds.
    cpu_s: float = Field(gt=0)
    source: str = Field(min_length=3)

    def is_compiled(self, library: Path) -> bool:
        """Return whether a compiled library in FlashInfer's cache is this module and is up to date.

        Args:
            library: The path ``<architectures>/cached_ops/<name>/<file>.so``. FlashInfer writes the
                module's sources to ``<architectures>/generated/<name>``. If they are newer than the
                library, FlashInfer recompiles the module.
        """
        name = library.parent.name
        if not fnmatch.fnmatchcase(name, self.module):
            return False
        if self.generated is None:
            return True
        file = library.parents[2] / "generated" / name / "batch_prefill_config.inc"
        if not file.is_file() or file.stat().st_mtime > library.stat().st_mtime:
            return False
        return self.generated.search(file.read_text("utf-8", "replace")) is not None

    def displaces(self, other: "JitModule", flashinfer: str | None) -> bool:
        """Return whether compiling this module overwrites another one in the cache.

        Args:
            other: The other module.
            flashinfer: The release of FlashInfer; None if it is unknown.
        """
        if self.name == other.name or self.module != other.module or not self.shares_name:
            return False
        return flashinfer is None or within(flashinfer, self.shares_name)

    def is_needed(self, arguments: str, environment: Mapping[str, str]) -> bool:
        """Return whether an engine may call the module.

        Args:
            arguments: The engine's arguments, on one line.
            environment: The engine's environment.
        """
        if self.arguments is not None and self.arguments.search(arguments) is None:
            return False
        if self.unless_arguments is not None and self.unless_arguments.search(arguments):
            return False
        if self.unless_environment is None:
            return True
        for name, value in environment.items():
            if self.unless_environment.fullmatch(f"{name}={value}"):
                return False
        return True


class Unbuilt(DataTable):
    """A module that a start compiles, but ``sm121 warm`` does not."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    #: A shell pattern for the name of the module's folder in the cache; None if it is unknown.
    module: str | None = None
    arguments: Regex
    why: str = Field(min_length=3)
    source: str = Field(min_length=3)


class JitData(DataTable):
    """The content of ``fixtures/compilation/jit.toml``."""

    reserve_gib: profile_fields.Sourced
    module: Entries[JitModule]
    unbuilt: Entries[Unbuilt]


def load_jit() -> JitData:
    """Return the known modules.

    Raises:
        DataFileError: The file is malformed.
    """
    return data_file.load("compilation/jit.toml", JitData)


@dataclass(frozen=True)
class Decoding:
    """The sizes for which XQA is compiled, in addition to its dtypes.

    Attributes:
        page: The page size of the KV cache, in tokens.
        queries: The number of queries per sequence in a decode step. With N draft tokens, it is N +
            1.
    """

    page: int
    queries: int

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Decoding":
        """Read the sizes from an engine's arguments.

        Args:
            arguments: The engine's arguments. The last value of a repeated argument counts.
        """
        line = one_line(arguments)
        pages = _BLOCK_SIZE.findall(line)
        drafts = _DRAFTS.findall(line)
        return cls(
            page=int(pages[-1]) if pages else _PAGE,
            queries=1 + int(drafts[-1]) if drafts else 1,
        )

    def in_name(self, module: str) -> str:
        """Fill in the placeholders of a pattern for a module's name.

        Args:
            module: The pattern, as in `JitModule`.
        """
        return module.replace("{page}", f"{self.page}").replace("{queries}", f"{self.queries}")


def needed(
    needs: engine_settings.Needs,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    flashinfer: str | None = None,
) -> list[JitModule]:
    """Return the profile's modules that an engine may compile.

    Args:
        needs: The profile's table of requirements.
        arguments: The engine's arguments.
        environment: The engine's environment.
        flashinfer: The release of FlashInfer; None if it is unknown.

    Raises:
        UsageError: The profile names an unknown module.
    """
    line = one_line(arguments)
    decoding = Decoding.of(arguments)
    modules = []
    for name in needs.jit_modules:
        module = data_file.named(load_jit().module, name, "module")
        is_of_release = flashinfer is None or within(flashinfer, module.flashinfer)
        if is_of_release and module.is_needed(line, environment):
            pattern = decoding.in_name(module.module)
            modules.append(module.model_copy(update={"module": pattern}))
    return modules


def unbuilt(arguments: Sequence[str]) -> list[Unbuilt]:
    """Return the modules that a start compiles, but ``sm121 warm`` does not.

    Args:
        arguments: The engine's arguments.
    """
    line = one_line(arguments)
    return [module for module in load_jit().unbuilt if module.arguments.search(line) is not None]


@dataclass(frozen=True)
class FlashInferModules:
    """The modules that an engine's FlashInfer has compiled.

    Attributes:
        version: The release of FlashInfer. If it is unknown (None), the caches of all releases
            count.
        folder: The cache, which contains ``<version>/<architectures>/cached_ops/<module>``.
        ahead: The folders with modules that were compiled ahead of time.
        installed: Whether FlashInfer is installed.
        beside: The versions of installed packages with precompiled kernels; the keys are the
            packages' names.
        unmet: Requirements on torch, TVM FFI and CuTe DSL that the installed packages do not meet.
    """

    version: str | None
    folder: Path
    ahead: tuple[Path, ...] = ()
    installed: bool = True
    beside: Mapping[str, str] = field(default_factory=dict)
    unmet: Sequence[interpreter.UnmetRequirement] = ()

    @classmethod
    def of(cls, python: str, environment: Mapping[str, str]) -> "FlashInferModules":
        """Find the compiled modules of an interpreter's FlashInfer.

        Args:
            python: The engine's interpreter.
            environment: The engine's environment.

        Raises:
            NoAnswer: The interpreter does not answer.
        """
        cache = caches.CompileCaches.of(environment).flashinfer
        found = interpreter.packages(python, ["flashinfer", *_PRECOMPILED], environment)
        place, version = found["flashinfer"]
        if place is None:
            return cls(None, cache, installed=False)
        folder = Path(place)
        ahead = [folder / "data" / "aot"]
        beside = {}
        for module, name in _PRECOMPILED.items():
            _, version_beside = found[module]
            if version_beside is not None:
                beside[name] = version_beside
        if not other_release(beside.get("flashinfer-jit-cache"), version):
            ahead += sorted(folder.parent.glob("flashinfer_jit_cache*"))
        unmet = interpreter.unmet_requirements(python, _OF_ONE_TIME, environment)
        return cls(version, cache, tuple(filter(Path.is_dir, ahead)), beside=beside, unmet=unmet)

    def missing(
        self, modules: Sequence[JitModule], codes: Sequence[str], gpu: int
    ) -> list[JitModule]:
        """Return the modules that are neither in the cache nor in installed packages.

        Args:
            modules: The modules.
            codes: The accepted architectures of modules in the cache, such as ``121a``.
            gpu: The compute capability for which installed libraries must have code, such as 121.
        """
        folders = self._cached(codes)
        missing = []
        for module in modules:
            if not _is_in_cache(module, folders) and not self._is_installed(module, gpu):
                missing.append(module)
        return missing

    def _is_installed(self, module: JitModule, gpu: int) -> bool:
        """Return whether a precompiled library is this module and runs on the GPU."""
        if module.generated is not None:
            return False
        for folder in self.ahead:
            for file in folder.rglob("*.so"):
                is_named = fnmatch.fnmatchcase(file.stem, module.module)
                if is_named and libraries.check_file(file, gpu).state in libraries.RUNS:
                    return True
        return False

    def unbuilt(
        self, arguments: Sequence[Sequence[str]], codes: Sequence[str]
    ) -> tuple[Unbuilt, ...]:
        """Return the `Unbuilt` modules that starts will compile, because the cache lacks them.

        Args:
            arguments: The arguments of each engine that is started.
            codes: The accepted architectures of modules in the cache.
        """
        by_name = {}
        for words in arguments:
            for module in unbuilt(words):
                by_name[module.name] = module
        return tuple(module for module in by_name.values() if not self._has(module, codes))

    def _has(self, module: Unbuilt, codes: Sequence[str]) -> bool:
        if module.module is None:
            return False
        pattern = f"{module.module}/*.so"
        return any(any(folder.glob(pattern)) for folder in self._cached(codes))

    def _cached(self, codes: Sequence[str]) -> list[Path]:
        """Return the folders of cached modules that were compiled for these architectures."""
        folders = []
        for folder in self.folder.glob(f"{self.version or '*'}/*"):
            if not architectures_of(folder).isdisjoint(codes):
                folders.append(folder / "cached_ops")
        return folders


def architectures_of(folder: Path) -> frozenset[str]:
    """Return the architectures of the kernels in a folder of FlashInfer's cache.

    Args:
        folder: A folder with the name that FlashInfer gives it, such as ``90a_121a``.

    Returns:
        The architectures; empty if the folder has another name.
    """
    if _CACHE_NAME.fullmatch(folder.name) is None:
        return frozenset()
    return frozenset(folder.name.split("_"))


def _is_in_cache(module: JitModule, folders: Sequence[Path]) -> bool:
    for folder in folders:
        for library in folder.glob("*/*.so"):
            if module.is_compiled(library):
                return True
    return False


@dataclass(frozen=True)
class JobLimit:
    """The limit on concurrent compile jobs. It depends on the memory that the engine leaves.

    Attributes:
        fitting: The number of jobs for which the memory is sufficient; 0 if it is not sufficient
            for one.
        jobs: The number of jobs to run. This is `fitting`, but at most one job for each core.
        reason: The required and the available memory, as text.
    """

    fitting: int
    jobs: int
    reason: str

    def __str__(self) -> str:
        return self.reason


def bound(
    modules: Sequence[JitModule], environment: Mapping[str, str], *, resident_gib: float = 0.0
) -> JobLimit:
    """Return the limit on the compile jobs for some modules.

    Args:
        modules: The modules, at least one.
        environment: The engine's environment, which may set the number of nvcc's threads.
        resident_gib: The memory that the engine uses while it compiles.
    """
    reserve = load_jit().reserve_gib.value
    # With several threads, nvcc compiles one source for several architectures at the same time.
    architectures = len(environment.get(_ARCHITECTURES, "").split()) or 1
    text = environment.get(_THREADS, "").strip()
    threads = int(text) if text.isdecimal() else 1
    at_once = max(1, min(threads, architectures))
    job = at_once * max(module.memory_gib for module in modules)
    available = psutil.virtual_memory().available / _GIB
    fitting = max(0, int((available - resident_gib - reserve) / job))
    return JobLimit(
        fitting,
        min(fitting, os.cpu_count() or 1),
        f"{job:.1f} GiB for a compile job, {resident_gib:.0f} GiB for the weights and "
        f"{reserve:.0f} GiB of reserve are needed, {available:.1f} GiB are available",
    )


def bounding_variables(
    needs: engine_settings.Needs, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that limit the compilers of a start.

    They are set even if the cache is warm, because an update of FlashInfer's sources invalidates
    the cache.

    Args:
        needs: The profile's table of requirements.
        arguments: The engine's arguments.
        environment: The engine's environment. A variable that the user has set is not replaced.

    Raises:
        UsageError: The profile names an unknown module.
    """
    modules = needed(needs, arguments, environment)
    if not modules:
        return {}
    jobs = bound(modules, environment, resident_gib=needs.weights_gib or 0.0).jobs
    variables = {_JOBS: str(max(1, jobs)), _THREADS: "1"}
    return {name: value for name, value in variables.items() if not environment.get(name)}


def other_release(package: str | None, flashinfer: str | None) -> bool:
    """Return whether a package's version is known and is not that of FlashInfer.

    Args:
        package: The version of the package. Its local part, for example ``+cu130``, is ignored.
        flashinfer: The version of FlashInfer, whose local part is ignored, too. If one of the
            versions is None, it is not known, and the result is false.
    """
    if package is None or flashinfer is None:
        return False
    return _public(package) != _public(flashinfer)


def _public(version: str) -> str:
    """Return a version without its local part.

    Text that is not a PEP 440 version is returned unchanged.
    """
    try:
        return Version(version).public
    except InvalidVersion:
        return version
