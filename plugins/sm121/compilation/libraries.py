"""Check whether installed libraries and caches of compiled kernels have code for a GPU."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import IO

from pydantic import Field

from sm121.compilation import device_code, sass
from sm121.compilation.architecture import GB10, CodeArchitecture
from sm121.compilation.caches import CompileCaches
from sm121.compilation.sass import UnreadableSass
from sm121.compilation.toolchain import Disassembler
from sm121.core import data_file, errors, interpreter, unmet

#: The packages of an engine's environment that are searched if no path is given.
PACKAGES = ("vllm", "flashinfer", "flashinfer_jit_cache", "flashinfer_cubin", "sgl_kernel", "torch")

#: The suffixes of files that may contain device code.
_SUFFIXES = (".so", ".cubin", ".fatbin", ".o")
#: The time limit for disassembling a file, in seconds.
_SASS_TIMEOUT_S = 600.0
#: A report lists the names of at most this many kernels that only trap.
_TRAPPING_SHOWN = 5


class CodeState(StrEnum):
    """How a file's device code can be used on a GPU."""

    #: The machine code runs on the GPU and can use all its instructions (for GB10: 121a, 121f or
    #: 120f).
    FULL = "full"
    #: The machine code runs on the GPU, but was compiled without a suffix, so that it has no
    #: block-scaled FP4.
    PLAIN = "plain"
    #: Only PTX can be used on the GPU. The driver compiles it when it is loaded.
    PTX_ONLY = "ptx_only"
    #: The file has device code, but none of it runs on the GPU.
    OTHER = "other_architecture"
    #: The file is a library without device code.
    HOST = "no_device_code"
    #: The file, or its device code, cannot be read.
    UNREADABLE = "unreadable"


#: The states in which machine code runs on the GPU.
RUNS = (CodeState.FULL, CodeState.PLAIN)


@dataclass(frozen=True)
class LibraryReport:
    """The result for one file.

    Attributes:
        path: The file.
        state: How its device code can be used on the GPU.
        sass: The architectures of its machine code, such as ``sm_121a``.
        ptx: The architectures of its PTX, such as ``compute_90``.
        reason: The evidence for the state.
        kernels: The number of kernels that run on the GPU; None if no instructions were read.
        only_trapping: The mangled names of the kernels in which every thread traps; None if no
            instructions were read.
    """

    path: Path
    state: CodeState
    sass: tuple[str, ...]
    ptx: tuple[str, ...]
    reason: str
    kernels: int | None = None
    only_trapping: tuple[str, ...] | None = None

    def as_json(self) -> dict[str, object]:
        """Return plain data for JSON, with the keys that `sm121 path --libraries` writes."""
        plain: dict[str, object] = {
            "path": str(self.path),
            "state": self.state.value,
            "sass": list(self.sass),
            "ptx": list(self.ptx),
            "reason": self.reason,
        }
        if self.only_trapping is not None:
            plain["kernels"] = self.kernels
            plain["only_trapping"] = len(self.only_trapping)
            plain["only_trapping_names"] = list(self.only_trapping[:_TRAPPING_SHOWN])
        return plain


def check_file(
    path: Path, gpu: int = GB10, disassembler: Disassembler | None = None
) -> LibraryReport:
    """Check how a file's device code can be used on a GPU.

    Args:
        path: The file.
        gpu: The compute capability, such as 121.
        disassembler: The tool for reading instructions, to find kernels that only trap. It takes 8
            s for a million instructions. If None, no instructions are read.
    """
    try:
        images = device_code.read_device_code(path)
    except (device_code.UnreadableCode, OSError) as error:
        return LibraryReport(path, CodeState.UNREADABLE, (), (), str(error))
    state, reason = _state(images, gpu)
    machine = []
    virtual = []
    for image in images:
        if image.kind == "sass":
            machine.append(image.architecture.sass)
        else:
            virtual.append(f"compute_{image.architecture.number}{image.architecture.suffix}")
    report = LibraryReport(path, state, tuple(machine), tuple(virtual), reason)
    if disassembler is None or state not in RUNS:
        return report
    try:
        return _with_instructions(report, images, gpu, disassembler)
    except UnreadableSass as error:
        return replace(report, state=CodeState.UNREADABLE, reason=str(error))


def _with_instructions(
    report: LibraryReport,
    images: Sequence[device_code.Image],
    gpu: int,
    disassembler: Disassembler,
) -> LibraryReport:
    """Add the kernels that only trap to a report. Raises UnreadableSass."""
    architectures = set()
    for image in images:
        if image.kind == "sass" and image.architecture.sass_runs_on(gpu):
            # cuobjdump does not distinguish ``sm_120`` from ``sm_120f``.
            suffix = image.architecture.suffix.replace("f", "")
            architectures.add(CodeArchitecture(image.architecture.number, suffix))
    count = 0
    trapping = []
    for architecture in sorted(architectures):
        for kernel in sass.disassemble(
            report.path, disassembler, only=architecture, timeout_s=_SASS_TIMEOUT_S
        ):
            count += 1
            if kernel.only_traps:
                trapping.append(kernel.name)
    reason = report.reason
    if trapping:
        reason = (
            f"{reason}; {len(trapping)} of {count} kernels only trap: compiled for an "
            "architecture without their instructions"
        )
    return replace(report, reason=reason, kernels=count, only_trapping=tuple(trapping))


def _state(images: Sequence[device_code.Image], gpu: int) -> tuple[CodeState, str]:
    """Return the state of device code, and the evidence for it."""
    if not images:
        return CodeState.HOST, "no device code"
    running = []
    full = []
    has_ptx = False
    for image in images:
        if image.kind == "ptx":
            has_ptx = has_ptx or image.architecture.ptx_runs_on(gpu)
        elif image.architecture.sass_runs_on(gpu):
            running.append(image)
            if image.architecture.is_full(gpu):
                full.append(image)
    if full:
        return CodeState.FULL, f"{_list(full)} runs on sm_{gpu}"
    if running:
        reason = f"{_list(running)} runs on sm_{gpu}, without its FP4 instructions"
        return CodeState.PLAIN, reason
    if has_ptx:
        reason = f"no machine code for sm_{gpu}, only PTX that runs there; has {_list(images)}"
        return CodeState.PTX_ONLY, reason
    return CodeState.OTHER, str(unmet.Fact(f"code that runs on sm_{gpu}", _list(images)))


def _list(images: Sequence[device_code.Image]) -> str:
    return ", ".join(str(image) for image in images)


class _Required(data_file.DataTable):
    engine: str
    package: str
    #: A shell pattern for paths below the package's folder.
    files: str
    why: str = Field(min_length=3)
    source: str = Field(min_length=3)


def without_code(engine: str, origins: Mapping[str, str | None], gpu: int) -> list[unmet.Fact]:
    """Find the libraries that an engine needs, but that have no machine code for a GPU.

    Args:
        engine: The name of the engine.
        origins: For each package, by its name, the file from which it is imported.
        gpu: The compute capability, such as 121.

    Returns:
        One fact for each library that is missing or has no such code.
    """
    facts = []
    for entry in data_file.load_key("compilation/libraries.toml", "library", tuple[_Required, ...]):
        if entry.engine != engine:
            continue
        origin = origins.get(entry.package)
        paths = sorted(Path(origin).parent.glob(entry.files)) if origin else []
        if not paths:
            facts.append(unmet.Fact(f"{entry.package}/{entry.files} ({entry.why})"))
        for path in paths:
            report = check_file(path, gpu)
            if report.state in RUNS:
                continue
            facts.append(
                unmet.Fact(
                    f"machine code that runs on sm_{gpu}",
                    ", ".join((*report.sass, *report.ptx)) or report.reason,
                    f"{path.name} ({entry.why})",
                )
            )
    return facts


def engine_places(python: str, environment: Mapping[str, str] | None = None) -> list[Path]:
    """Return the existing folders with an engine's libraries and its compile caches.

    Args:
        python: The engine's interpreter.
        environment: The engine's environment; None for that of this process.

    Raises:
        Sm121Error: The interpreter does not answer.
    """
    variables = os.environ if environment is None else environment
    folders = []
    for origin in interpreter.imports(python, PACKAGES, variables).origins.values():
        if origin is not None:
            path = Path(origin)
            folders.append(path.parent if path.suffix else path)
    caches = CompileCaches.of(variables)
    folders += [caches.flashinfer, caches.triton, caches.vllm]
    return [folder for folder in folders if folder.is_dir()]


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that may contain device code, each file once.

    Args:
        paths: Files, and folders to search.

    Yields:
        The given files, and the libraries below the given folders.
    """
    identities: set[tuple[int, int]] = set()
    for path in _candidates(paths):
        status = path.stat()
        identity = (status.st_dev, status.st_ino)
        if identity not in identities:
            identities.add(identity)
            yield path


def _candidates(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files of `files_of`; a file that has several names is yielded for each name."""
    for root in paths:
        if root.is_file():
            yield root
            continue
        for path in sorted(root.rglob("*")):
            is_library = path.suffix in _SUFFIXES or ".so." in path.name
            if is_library and path.is_file():
                yield path


def write_report(
    paths: Sequence[Path],
    stream: IO[str],
    *,
    gpu: int = GB10,
    disassembler: Disassembler | None = None,
) -> Counter[CodeState]:
    """Check all files in some places, and write the results as one JSON object, entry by entry.

    Args:
        paths: Files and folders.
        stream: The output, a text file.
        gpu: The compute capability, such as 121.
        disassembler: As in `check_file`.

    Returns:
        The number of files in each state.

    Raises:
        UsageError: A path does not exist.
    """
    for root in paths:
        if not root.exists():
            raise errors.UsageError(
                f"--libraries {root}: expected a file or a folder, got no such path. Give "
                "--libraries without a path to check the engine's packages and caches."
            )
    counts: Counter[CodeState] = Counter()
    trapping = 0
    stream.write(f'{{"gpu": "sm_{gpu}", "libraries": [')
    for number, path in enumerate(files_of(paths)):
        report = check_file(path, gpu, disassembler)
        counts[report.state] += 1
        trapping += len(report.only_trapping or ())
        stream.write(",\n  " if number else "\n  ")
        stream.write(json.dumps(report.as_json()))
        stream.flush()
    summary: dict[str, int] = {state.value: counts[state] for state in CodeState}
    if disassembler is not None:
        summary["only_trapping_kernels"] = trapping
    stream.write(f'\n], "summary": {json.dumps(summary)}}}\n')
    return counts
