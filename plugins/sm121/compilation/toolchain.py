"""nvcc, cuobjdump and nvdisasm: from the system, or from pip wheels alone."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.compilation import child
from sm121.core import unmet, verdict
from sm121.core.errors import Sm121Error

WHEELS = (
    "nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 "
    "nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"
)
"""What pip installs for nvcc. All of one release: nvcc's own requirements are not pinned."""

READER_WHEELS = "nvidia-cuda-cuobjdump==13.4.92 nvidia-cuda-nvdisasm==13.5.37"
"""What pip installs for reading SASS: cuobjdump needs nvdisasm and does not say so."""

_RELEASE = re.compile(r"release \d+\.\d+, V(\S+)")
_OLDEST = (12, 9)
_SYSTEM = Path("/usr/local/cuda/bin")


@dataclass(frozen=True)
class Compiler:
    """An nvcc that works."""

    nvcc: Path
    root: Path
    """The toolkit's folder, with ``include`` in it. What FlashInfer takes as CUDA_HOME."""
    version: str

    def __str__(self) -> str:
        return f"nvcc {self.version} ({self.nvcc})"


@dataclass(frozen=True)
class Disassembler:
    """A cuobjdump with the nvdisasm that it calls."""

    cuobjdump: Path
    nvdisasm: Path
    version: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which cuobjdump finds its nvdisasm."""
        path = f"{self.nvdisasm.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**os.environ, "PATH": path}

    def __str__(self) -> str:
        return f"cuobjdump {self.version} ({self.cuobjdump})"


@dataclass(frozen=True)
class Tools:
    """What compiles and what reads the result, and the folder that it is written to."""

    compiler: Compiler
    disassembler: Disassembler
    folder: Path


def lacking(required: str, observed: str, remedy: str) -> verdict.NotRun:
    """That nothing can be compiled here, and what helps."""
    return verdict.NotRun(unmet.Fact(required, observed, evidence=f"remedy: {remedy}"))


def site_packages(python: str | None = None) -> list[Path]:
    """Where wheels are: this interpreter's import path, and the folders beside ``python``."""
    folders = [Path(entry) for entry in sys.path if entry]
    if python is not None:
        folders += sorted(Path(python).absolute().parent.parent.glob("lib/python3*/*-packages"))
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def find_compiler(packages: Sequence[Path]) -> Compiler:
    """The first nvcc of CUDA_HOME, PATH, /usr/local/cuda and the pip wheels in ``packages``. Raises
    NotRun: there is none, it does not start, or it is older than CUDA 12.9."""
    nvcc = _first("nvcc", packages)
    if nvcc is None:
        observed = "none in CUDA_HOME, PATH, /usr/local/cuda or pip wheels"
        raise lacking("nvcc 12.9 or newer", observed, f"pip install --no-deps {WHEELS}")
    version = _version(nvcc)
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < _OLDEST:
        raise lacking(
            "nvcc 12.9 or newer, which knows sm_121",
            f"{version} at {nvcc}",
            f"set CUDA_HOME, or pip install --no-deps {WHEELS}",
        )
    if shutil.which("g++") is None:
        raise lacking("g++, which nvcc calls", "none in PATH", "install g++")
    # Its toolkit is asked of it, because what is on PATH is often a wrapper.
    match = re.search(r"(?m)^#\$ TOP=(.+)$", _ask(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull))
    if match is None:
        raise Sm121Error(unmet.Fact("nvcc --dryrun names its TOP folder", f"none from {nvcc}"))
    return Compiler(nvcc, Path(match[1].strip()).resolve(), version)


def find_disassembler(packages: Sequence[Path]) -> Disassembler:
    """The first cuobjdump and nvdisasm there, or Triton's. Raises NotRun: one does not start."""
    paths = {}
    for tool in ("cuobjdump", "nvdisasm"):
        path = _first(tool, packages)
        if path is None:
            observed = "none in CUDA_HOME, PATH, /usr/local/cuda, pip wheels or Triton"
            remedy = f"pip install --no-deps {READER_WHEELS}"
            raise lacking(f"{tool}, to read SASS", observed, remedy)
        paths[tool] = path
    return Disassembler(paths["cuobjdump"], paths["nvdisasm"], _version(paths["cuobjdump"]))


def _first(tool: str, packages: Sequence[Path]) -> Path | None:
    paths = (path for path in _candidates(tool, packages) if path.is_file())
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def _candidates(tool: str, packages: Sequence[Path]) -> Iterator[Path]:
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        yield Path(home) / "bin" / tool
    if on_path := shutil.which(tool):
        yield Path(on_path)
    yield _SYSTEM / tool
    for folder in packages:
        yield from sorted(folder.glob(f"nvidia/cu*/bin/{tool}"), reverse=True)
    for folder in packages:
        yield folder / "triton" / "backends" / "nvidia" / "bin" / tool


def _version(tool: Path) -> str:
    answer = _ask(tool, "--version")
    match = _RELEASE.search(answer)
    if match is None:
        observed = f"{tool} does not tell its version: {answer.strip()[:200] or 'no output'}"
        raise lacking(f"a working {tool.name}", observed, "set CUDA_HOME to another toolkit")
    return match[1]


def _ask(tool: Path, *arguments: str) -> str:
    try:
        return child.run([tool, *arguments], timeout_s=60).output
    except (OSError, child.TookTooLong) as error:
        raise verdict.NotRun(unmet.Fact(f"a working {tool.name}", f"{tool}: {error}")) from error
