"""What an engine compiles at its first start, and how many compilers the machine bears meanwhile.
FlashInfer compiles with ninja, which takes every core where ``MAX_JOBS`` is not set. On a machine
of unified memory that freezes it: the weights are resident by then."""

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
_BLOCK_SIZE = re.compile(r"--block-size (\d+)")
_PAGE = 16
"""Tokens a page where the arguments do not say it (vLLM's CacheConfig.DEFAULT_BLOCK_SIZE)."""
_DRAFTS = re.compile(r"num[-_]speculative[-_]tokens[\"']?\s*[: ]\s*(\d+)")
_JOBS, _THREADS = "MAX_JOBS", "FLASHINFER_NVCC_THREADS"


#: Modules with kernels that are installed beside FlashInfer, and their packages' names.
_BESIDE = {"flashinfer_cubin": "flashinfer-cubin", "flashinfer_jit_cache": "flashinfer-jit-cache"}


class JitModule(DataTable):
    """A module of FlashInfer that gpt-oss may need."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    module: str
    """Pattern (as of a shell) on the name of its folder in the cache; ``{page}`` stands for the
    tokens a page of the KV cache, ``{queries}`` for the queries of a sequence in a decode step."""
    generated: Regex | None = None
    """Where the name does not say what the module was compiled for: what the line of its generated
    configuration has to be."""
    shares_name: Versions = ""
    """Releases of FlashInfer in which modules of the same pattern have one name: the one that was
    compiled last is there, the others are not."""
    flashinfer: Versions = ""
    """Releases of FlashInfer with which the engine calls it; of an unknown one it may."""
    arguments: Regex | None = None
    unless_arguments: Regex | None = None
    unless_environment: Regex | None = None
    memory_gib: float = Field(gt=0)
    """What one compile job takes at its peak."""
    cpu_s: float = Field(gt=0)
    """What the whole module takes of one core, in seconds."""
    source: str = Field(min_length=3)

    def is_compiled(self, library: Path) -> bool:
        """Whether a library in the cache is this module.

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
        """Whether compiling it makes another module compile again at its next start."""
        if self.name == other.name or self.module != other.module or not self.shares_name:
            return False
        return flashinfer is None or within(flashinfer, self.shares_name)

    def is_needed(self, arguments: str, environment: Mapping[str, str]) -> bool:
        """Whether an engine with these arguments, on one line, may call it in this environment."""
        if self.arguments is not None and self.arguments.search(arguments) is None:
            return False
        if self.unless_arguments is not None and self.unless_arguments.search(arguments):
            return False
        without = self.unless_environment
        return without is None or not any(
            without.fullmatch(f"{name}={value}") for name, value in environment.items()
        )


class Unbuilt(DataTable):
    """What a start compiles and ``sm121 warm`` does not."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    module: str | None = None
    """Pattern on the name of its folder in the cache; None: it is not known."""
    arguments: Regex
    why: str = Field(min_length=3)
    source: str = Field(min_length=3)


class JitData(DataTable):
    """The content of ``fixtures/compilation/jit.toml``."""

    reserve_gib: profile_fields.Sourced
    module: Entries[JitModule]
    unbuilt: Entries[Unbuilt]


def load_jit() -> JitData:
    """The known modules. Raises DataFileError when the file is wrong."""
    return data_file.load("compilation/jit.toml", JitData)


@dataclass(frozen=True)
class Decoding:
    """What XQA is compiled for, beside its types."""

    page: int
    """Tokens a page of the KV cache."""
    queries: int
    """Queries of a sequence in a decode step: with N drafts N + 1."""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Decoding":
        """Of an engine with these arguments."""
        line = one_line(arguments)
        pages, drafts = _BLOCK_SIZE.findall(line), _DRAFTS.findall(line)
        return cls(
            page=int(pages[-1]) if pages else _PAGE,
            queries=1 + int(drafts[-1]) if drafts else 1,
        )

    def in_name(self, module: str) -> str:
        """The pattern of a module's name, without placeholders."""
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
    line, decoding = one_line(arguments), Decoding.of(arguments)
    modules = [data_file.named(load_jit().module, name, "module") for name in needs.jit_modules]
    return [
        module.model_copy(update={"module": decoding.in_name(module.module)})
        for module in modules
        if module.is_needed(line, environment)
        and (flashinfer is None or within(flashinfer, module.flashinfer))
    ]


def unbuilt(arguments: Sequence[str]) -> list[Unbuilt]:
    """What an engine with these arguments compiles and ``sm121 warm`` does not."""
    line = one_line(arguments)
    return [each for each in load_jit().unbuilt if each.arguments.search(line) is not None]


@dataclass(frozen=True)
class FlashInferModules:
    """The modules that an engine's FlashInfer has compiled."""

    #: Of FlashInfer. None: not known, so that any version's cache counts.
    version: str | None
    #: The cache: ``<version>/<architectures>/cached_ops/<module>`` is under it.
    folder: Path
    #: Where modules lie that were compiled before they were installed.
    ahead: tuple[Path, ...] = ()
    installed: bool = True
    #: Versions of the packages with kernels that are installed beside it, by their names.
    beside: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, python: str, environment: Mapping[str, str]) -> "FlashInferModules":
        """Of an interpreter in its engine's environment. Raises NoAnswer: it does not answer."""
        cache = caches.CompileCaches.of(environment).flashinfer
        modules = {"flashinfer": "flashinfer", **_BESIDE}
        found = interpreter.packages(python, [*modules], environment)
        place, version = found["flashinfer"]
        if place is None:
            return cls(None, cache, installed=False)
        folder = Path(place)
        ahead = [folder / "data" / "aot", *sorted(folder.parent.glob("flashinfer_jit_cache*"))]
        versions = {name: found[module][1] for module, name in _BESIDE.items()}
        beside = {name: each for name, each in versions.items() if each is not None}
        return cls(version, cache, tuple(filter(Path.is_dir, ahead)), beside=beside)

    def missing(
        self, modules: Sequence[JitModule], codes: Sequence[str], gpu: int
    ) -> list[JitModule]:
        """Those of ``modules`` that are not there for any of ``codes``, names of machine code in
        the cache such as ``121a``, or for ``gpu``, a compute capability such as 121."""
        cached = self._cached(codes)
        return [
            module
            for module in modules
            if not any(
                module.is_compiled(library)
                for parent in cached
                for library in parent.glob("*/*.so")
            )
            and not any(
                module.generated is None and libraries.judge(file, gpu).state in libraries.RUNS
                for parent in self.ahead
                for file in parent.rglob("*.so")
                if fnmatch.fnmatchcase(file.stem, module.module)
            )
        ]

    def unbuilt(
        self, arguments: Sequence[Sequence[str]], codes: Sequence[str]
    ) -> tuple[Unbuilt, ...]:
        """Return what starts compile beside the modules and what is not in the cache yet.

        Args:
            arguments: Of each engine that is started.
            codes: Names of machine code in the cache.
        """
        found = {each.name: each for line in arguments for each in unbuilt(line)}
        return tuple(each for each in found.values() if not self._has(each, codes))

    def _has(self, each: Unbuilt, codes: Sequence[str]) -> bool:
        if each.module is None:
            return False
        return any(any(folder.glob(f"{each.module}/*.so")) for folder in self._cached(codes))

    def _cached(self, codes: Sequence[str]) -> list[Path]:
        return [
            folder / "cached_ops"
            for folder in self.folder.glob(f"{self.version or '*'}/*")
            if set(folder.name.split("_")) & set(codes)
        ]


@dataclass(frozen=True)
class Bound:
    """How many compile jobs the machine bears beside what an engine holds."""

    #: 0 where not even one fits.
    jobs: int
    #: What is needed, and what there is.
    reason: str

    def __str__(self) -> str:
        return self.reason


def bound(
    modules: Sequence[JitModule], environment: Mapping[str, str], *, resident_gib: float = 0.0
) -> Bound:
    """The bound for these modules, at least one. What the engine's ``environment`` says of nvcc's
    threads counts; the engine holds ``resident_gib`` while it compiles."""
    reserve = load_jit().reserve_gib.value
    # Threads compile one source for several architectures at the same time.
    architectures = len(environment.get("FLASHINFER_CUDA_ARCH_LIST", "").split()) or 1
    threads = environment.get(_THREADS, "").strip()
    at_once = min(int(threads) if threads.isdecimal() else 1, architectures) or 1
    job = at_once * max(module.memory_gib for module in modules)
    available = psutil.virtual_memory().available / _GIB
    fitting = int((available - resident_gib - reserve) / job)
    jobs = max(0, min(fitting, os.cpu_count() or 1))
    return Bound(
        jobs,
        f"{job:.1f} GiB for a compile job, {resident_gib:.0f} GiB for the weights and "
        f"{reserve:.0f} GiB of reserve are needed, {available:.1f} GiB are available",
    )


def bounding_variables(
    needs: engine_settings.Needs, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """What bounds the compilers of a start; nothing of what the user has given. They are set also
    where the cache is warm: an update of the sources makes it cold."""
    if not (modules := needed(needs, arguments, environment)):
        return {}
    jobs = bound(modules, environment, resident_gib=needs.weights_gib or 0.0).jobs
    bounded = {_JOBS: str(max(1, jobs)), _THREADS: "1"}
    return {name: value for name, value in bounded.items() if not environment.get(name)}
