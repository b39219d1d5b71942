"""The modules that an engine compiles at its first start, and a bound of its compile jobs.

FlashInfer compiles with ninja, which takes every core if ``MAX_JOBS`` is not set. On a machine of
unified memory that freezes the machine, because the weights are resident by then.
"""

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pydantic import Field

from sm121.compilation import caches, libraries
from sm121.core import data_file, engine_settings, interpreter, profile_fields
from sm121.core.data_file import DataTable, Entries, Regex
from sm121.core.engine_arguments import one_line
from sm121.core.versions import Versions, within

_GIB = 1 << 30
#: The engine's arguments for the page of the KV cache and for the drafts of speculative decoding.
_BLOCK_SIZE = re.compile(r"--block-size (\d+)")
_DRAFTS = re.compile(r"num[-_]speculative[-_]tokens[\"']?\s*[: ]\s*(\d+)")
#: Tokens a page without such an argument (vLLM's CacheConfig.DEFAULT_BLOCK_SIZE).
_PAGE = 16
#: Variables of FlashInfer: the number of compile jobs, and of the threads of each nvcc.
_JOBS = "MAX_JOBS"
_THREADS = "FLASHINFER_NVCC_THREADS"
_ARCHITECTURES = "FLASHINFER_CUDA_ARCH_LIST"

#: Modules with kernels that are installed beside FlashInfer, and their packages' names.
_BESIDE = {"flashinfer_cubin": "flashinfer-cubin", "flashinfer_jit_cache": "flashinfer-jit-cache"}
#: Packages whose import fails beside another release of one that they require.
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
    #: Pattern (as of a shell) on the name of its folder in the cache; ``{page}`` stands for the
    #: tokens a page of the KV cache, ``{queries}`` for the queries of a sequence in a decode step.
    module: str
    #: If the name does not tell what the module was compiled for: a pattern on a line of its
    #: generated configuration.
    generated: Regex | None = None
    #: Releases of FlashInfer in which modules of the same pattern have one name, so that only the
    #: one that was compiled last is in the cache.
    shares_name: Versions = ""
    #: Releases of FlashInfer with which the engine calls it; with an unknown one it may.
    flashinfer: Versions = ""
    arguments: Regex | None = None
    unless_arguments: Regex | None = None
    unless_environment: Regex | None = None
    #: Peak memory of one compile job.
    memory_gib: float = Field(gt=0)
    #: Time of one core for the whole module, in seconds.
    cpu_s: float = Field(gt=0)
    source: str = Field(min_length=3)

    def is_compiled(self, library: Path) -> bool:
        """Return whether a library in the cache is this module.

        Args:
            library: ``<architectures>/cached_ops/<name>/<file>.so``; FlashInfer writes the module's
                sources to ``<architectures>/generated/<name>`` and compiles it again where they
                are newer.
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
        """Return whether another module is compiled again at its next start after this one.

        Args:
            other: The other module.
            flashinfer: The release of FlashInfer; None if it is not known.
        """
        if self.name == other.name or self.module != other.module or not self.shares_name:
            return False
        return flashinfer is None or within(flashinfer, self.shares_name)

    def is_needed(self, arguments: str, environment: Mapping[str, str]) -> bool:
        """Return whether an engine may call it.

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
    """A module that a start compiles and ``sm121 warm`` does not."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    #: Pattern on the name of its folder in the cache; None if it is not known.
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
    """The sizes that XQA is compiled for, beside its types.

    Attributes:
        page: Tokens a page of the KV cache.
        queries: Queries of a sequence in a decode step: with N drafts N + 1.
    """

    page: int
    queries: int

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Decoding":
        """Return the sizes of an engine.

        Args:
            arguments: The engine's arguments; the last one of a kind counts.
        """
        line = one_line(arguments)
        pages = _BLOCK_SIZE.findall(line)
        drafts = _DRAFTS.findall(line)
        return cls(
            page=int(pages[-1]) if pages else _PAGE,
            queries=1 + int(drafts[-1]) if drafts else 1,
        )

    def in_name(self, module: str) -> str:
        """Return the pattern of a module's name, without placeholders.

        Args:
            module: The pattern of `JitModule`.
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
        needs: The profile's.
        arguments: The engine's.
        environment: The engine's.
        flashinfer: The release of FlashInfer; None: not known.

    Raises:
        UsageError: A module is not known.
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
    """Return the modules that a start compiles and ``sm121 warm`` does not.

    Args:
        arguments: The engine's arguments.
    """
    line = one_line(arguments)
    return [module for module in load_jit().unbuilt if module.arguments.search(line) is not None]


@dataclass(frozen=True)
class FlashInferModules:
    """The modules that an engine's FlashInfer has compiled.

    Attributes:
        version: The release of FlashInfer; None if it is not known: any release's cache counts.
        folder: The cache: ``<version>/<architectures>/cached_ops/<module>`` is below it.
        ahead: Folders of modules that were compiled before they were installed.
        installed: Whether FlashInfer is installed.
        beside: Versions of the packages with kernels that are installed beside it, by their names.
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
        """Return the modules of an interpreter.

        Args:
            python: The engine's interpreter.
            environment: The engine's environment.

        Raises:
            NoAnswer: The interpreter does not answer.
        """
        cache = caches.CompileCaches.of(environment).flashinfer
        found = interpreter.packages(python, ["flashinfer", *_BESIDE], environment)
        place, version = found["flashinfer"]
        if place is None:
            return cls(None, cache, installed=False)
        folder = Path(place)
        ahead = [folder / "data" / "aot", *sorted(folder.parent.glob("flashinfer_jit_cache*"))]
        beside = {}
        for module, name in _BESIDE.items():
            _, version_beside = found[module]
            if version_beside is not None:
                beside[name] = version_beside
        unmet = interpreter.unmet_requirements(python, _OF_ONE_TIME, environment)
        return cls(version, cache, tuple(filter(Path.is_dir, ahead)), beside=beside, unmet=unmet)

    def missing(
        self, modules: Sequence[JitModule], codes: Sequence[str], gpu: int
    ) -> list[JitModule]:
        """Return the modules that are neither in the cache nor installed.

        Args:
            modules: The modules.
            codes: Names of machine code in the cache, such as ``121a``; one of them is enough.
            gpu: The compute capability that installed libraries need, such as 121.
        """
        folders = self._cached(codes)
        missing = []
        for module in modules:
            if not _is_in_cache(module, folders) and not self._is_installed(module, gpu):
                missing.append(module)
        return missing

    def _is_installed(self, module: JitModule, gpu: int) -> bool:
        """Return whether a library that was compiled ahead is this module, and runs on the GPU."""
        if module.generated is not None:
            return False
        for folder in self.ahead:
            for file in folder.rglob("*.so"):
                is_named = fnmatch.fnmatchcase(file.stem, module.module)
                if is_named and libraries.judge(file, gpu).state in libraries.RUNS:
                    return True
        return False

    def unbuilt(
        self, arguments: Sequence[Sequence[str]], codes: Sequence[str]
    ) -> tuple[Unbuilt, ...]:
        """Return the modules that starts compile beside the known ones, and not in the cache yet.

        Args:
            arguments: The arguments of each engine that is started.
            codes: Names of machine code in the cache.
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
        """Return the folders of modules in the cache for one of these names of machine code."""
        folders = []
        for folder in self.folder.glob(f"{self.version or '*'}/*"):
            architectures = folder.name.split("_")
            if not set(codes).isdisjoint(architectures):
                folders.append(folder / "cached_ops")
        return folders


def _is_in_cache(module: JitModule, folders: Sequence[Path]) -> bool:
    for folder in folders:
        for library in folder.glob("*/*.so"):
            if module.is_compiled(library):
                return True
    return False


@dataclass(frozen=True)
class Bound:
    """The number of compile jobs for which the machine has memory beside the engine.

    Attributes:
        fitting: The number for which there is memory; 0 if there is none for one.
        jobs: The number to run: at most one for each core.
        reason: The memory that is needed, and the memory that is available.
    """

    fitting: int
    jobs: int
    reason: str

    def __str__(self) -> str:
        return self.reason


def bound(
    modules: Sequence[JitModule], environment: Mapping[str, str], *, resident_gib: float = 0.0
) -> Bound:
    """Return the bound for modules.

    Args:
        modules: The modules, at least one.
        environment: The engine's environment, with the number of nvcc's threads.
        resident_gib: The memory that the engine holds while it compiles.
    """
    reserve = load_jit().reserve_gib.value
    # Threads compile one source for several architectures at the same time.
    architectures = len(environment.get(_ARCHITECTURES, "").split()) or 1
    text = environment.get(_THREADS, "").strip()
    threads = int(text) if text.isdecimal() else 1
    at_once = max(1, min(threads, architectures))
    job = at_once * max(module.memory_gib for module in modules)
    available = psutil.virtual_memory().available / _GIB
    fitting = max(0, int((available - resident_gib - reserve) / job))
    return Bound(
        fitting,
        min(fitting, os.cpu_count() or 1),
        f"{job:.1f} GiB for a compile job, {resident_gib:.0f} GiB for the weights and "
        f"{reserve:.0f} GiB of reserve are needed, {available:.1f} GiB are available",
    )


def bounding_variables(
    needs: engine_settings.Needs, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that bound the compilers of a start.

    They are set also if the cache is warm, because an update of the sources makes it cold.

    Args:
        needs: The profile's.
        arguments: The engine's arguments.
        environment: The engine's environment; a variable that the user has set is not replaced.

    Raises:
        UsageError: A module of the profile is not known.
    """
    modules = needed(needs, arguments, environment)
    if not modules:
        return {}
    jobs = bound(modules, environment, resident_gib=needs.weights_gib or 0.0).jobs
    variables = {_JOBS: str(max(1, jobs)), _THREADS: "1"}
    return {name: value for name, value in variables.items() if not environment.get(name)}
