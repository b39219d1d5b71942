"""Installed libraries and caches of compiled kernels: which of them have code for a GPU."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

PACKAGES = ("vllm", "flashinfer", "flashinfer_jit_cache", "flashinfer_cubin", "sgl_kernel", "torch")
"""What of an engine's environment is looked through when no path is given."""

_SUFFIXES = (".so", ".cubin", ".fatbin", ".o")
_SASS_TIMEOUT_S = 600.0
_TRAPPING_SHOWN = 5


class CodeState(StrEnum):
    """What a file's device code means for a GPU."""

    FULL = "full"
    """Machine code that runs there and may use all instructions: for GB10 121a, 121f, 120f."""
    PLAIN = "plain"
    """Machine code that runs there, compiled without a suffix: no block-scaled FP4."""
    PTX_ONLY = "ptx_only"
    """Nothing but PTX runs there: the driver translates it when it is loaded."""
    OTHER = "other_architecture"
    """Device code, and none of it runs there."""
    HOST = "no_device_code"
    """A library without device code."""
    UNREADABLE = "unreadable"
    """Neither can be said."""


#: Machine code that runs there.
RUNS = (CodeState.FULL, CodeState.PLAIN)


@dataclass(frozen=True)
class LibraryReport:
    """One file, judged."""

    path: Path
    state: CodeState
    sass: tuple[str, ...]
    """Architectures of its machine code: ``sm_121a``."""
    ptx: tuple[str, ...]
    """Architectures of its PTX: ``compute_90``."""
    reason: str
    kernels: int | None = None
    """Kernels that run on the GPU; None unless its instructions were read."""
    only_trapping: tuple[str, ...] | None = None
    """Of them those in which every thread traps, by mangled name."""

    def as_json(self) -> dict[str, object]:
        """Plain data, in the words of `sm121 path --libraries`."""
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


def judge(path: Path, gpu: int = GB10, disassembler: Disassembler | None = None) -> LibraryReport:
    """What a file's device code means for a GPU of that compute capability (121). With a
    ``disassembler`` kernels that only trap are found, too (8 s for a million instructions)."""
    try:
        images = device_code.read(path)
    except (device_code.UnreadableCode, OSError) as error:
        return LibraryReport(path, CodeState.UNREADABLE, (), (), str(error))
    state, reason = _state(images, gpu)
    machine = tuple(image.architecture.sass for image in images if image.kind == "sass")
    virtual = tuple(
        f"compute_{image.architecture.number}{image.architecture.suffix}"
        for image in images
        if image.kind == "ptx"
    )
    if disassembler is None or state not in RUNS:
        return LibraryReport(path, state, machine, virtual, reason)
    kernels, trapping = 0, []
    try:
        running = (i.architecture for i in images if i.kind == "sass")
        # cuobjdump takes ``sm_120`` and ``sm_120f`` for one.
        names = {(a.number, a.suffix.replace("f", "")) for a in running if a.sass_runs_on(gpu)}
        for architecture in sorted(CodeArchitecture(*name) for name in names):
            for kernel in sass.disassemble(
                path, disassembler, only=architecture, timeout_s=_SASS_TIMEOUT_S
            ):
                kernels += 1
                if kernel.only_traps:
                    trapping.append(kernel.name)
    except UnreadableSass as error:
        return LibraryReport(path, CodeState.UNREADABLE, machine, virtual, str(error))
    if trapping:
        reason = (
            f"{reason}; {len(trapping)} of {kernels} kernels only trap: compiled for an "
            "architecture without their instructions"
        )
    return LibraryReport(path, state, machine, virtual, reason, kernels, tuple(trapping))


def _state(images: Sequence[device_code.Image], gpu: int) -> tuple[CodeState, str]:
    if not images:
        return CodeState.HOST, "no device code"
    machine = [i for i in images if i.kind == "sass" and i.architecture.sass_runs_on(gpu)]
    if full := [image for image in machine if image.architecture.is_full(gpu)]:
        return CodeState.FULL, f"{', '.join(map(str, full))} runs on sm_{gpu}"
    if machine:
        return (
            CodeState.PLAIN,
            f"{', '.join(map(str, machine))} runs on sm_{gpu}, without its FP4 instructions",
        )
    observed = ", ".join(map(str, images))
    if any(image.kind == "ptx" and image.architecture.ptx_runs_on(gpu) for image in images):
        return (
            CodeState.PTX_ONLY,
            f"no machine code for sm_{gpu}, only PTX that runs there; has {observed}",
        )
    return CodeState.OTHER, str(unmet.Fact(f"code that runs on sm_{gpu}", observed))


class _Required(data_file.DataTable):
    engine: str
    package: str
    files: str
    """Pattern on the path below the package's folder."""
    why: str = Field(min_length=3)
    source: str = Field(min_length=3)


def without_code(engine: str, origins: Mapping[str, str | None], gpu: int) -> list[unmet.Fact]:
    """Libraries that the engine cannot do without and that have no machine code for a GPU (121), a
    fact each. ``origins``: where its packages are imported from, by name."""
    lines = []
    for entry in data_file.load_key("compilation/libraries.toml", "library", tuple[_Required, ...]):
        if entry.engine != engine:
            continue
        origin = origins.get(entry.package)
        reports = [
            judge(path, gpu)
            for path in (sorted(Path(origin).parent.glob(entry.files)) if origin else [])
        ]
        if not reports:
            lines.append(unmet.Fact(f"{entry.package}/{entry.files} ({entry.why})"))
        lines.extend(
            unmet.Fact(
                f"machine code that runs on sm_{gpu}",
                ", ".join((*report.sass, *report.ptx)) or report.reason,
                f"{report.path.name} ({entry.why})",
            )
            for report in reports
            if report.state not in RUNS
        )
    return lines


def engine_places(python: str, environment: Mapping[str, str] | None = None) -> list[Path]:
    """Folders of an engine's libraries and of the caches that it compiles into; those that exist.
    Raises sm121.core.errors.Sm121Error: the interpreter does not answer."""
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
    """Files that may hold device code, each once: those named, and those under folders."""
    identities: set[tuple[int, int]] = set()
    for root in paths:
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            is_library = path.suffix in _SUFFIXES or ".so." in path.name
            if path == root or (is_library and path.is_file()):
                status = path.stat()
                identity = (status.st_dev, status.st_ino)
                if identity not in identities:
                    identities.add(identity)
                    yield path


def write_report(
    paths: Sequence[Path],
    stream: IO[str],
    *,
    gpu: int = GB10,
    disassembler: Disassembler | None = None,
) -> Counter[CodeState]:
    """Judge every file of some places and write one JSON object, file by file as they are read.
    Returns: How many files are in which state. Raises UsageError: a place does not exist."""
    for root in paths:
        if not root.exists():
            raise errors.UsageError(f"{root}: expected a file or a folder")
    counts: Counter[CodeState] = Counter()
    trapping = 0
    stream.write(f'{{"gpu": "sm_{gpu}", "libraries": [')
    for number, path in enumerate(files_of(paths)):
        report = judge(path, gpu, disassembler)
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
