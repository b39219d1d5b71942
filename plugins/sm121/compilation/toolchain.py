"""Find nvcc, cuobjdump and nvdisasm in the system or in pip wheels."""

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

#: The wheels for nvcc. All have the same release, because nvcc's own requirements are not pinned.
WHEELS = (
    "nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 "
    "nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"
)

#: The wheels for reading SASS. cuobjdump needs nvdisasm, but its wheel does not require that of
#: nvdisasm.
READER_WHEELS = "nvidia-cuda-cuobjdump==13.4.92 nvidia-cuda-nvdisasm==13.5.37"

_RELEASE = re.compile(r"release \d+\.\d+, V(\S+)")
#: The first CUDA release whose nvcc compiles for sm_121.
_OLDEST = (12, 9)
#: The line with the toolkit's folder in the output of nvcc's dry run.
_TOP = re.compile(r"(?m)^#\$ TOP=(.+)$")
#: The time limit of a tool that prints its version, in seconds.
_ANSWER_S = 60.0
_SYSTEM = Path("/usr/local/cuda/bin")


@dataclass(frozen=True)
class Compiler:
    """A working nvcc.

    Attributes:
        nvcc: The path of nvcc.
        root: The toolkit's folder, which contains ``include``. It is FlashInfer's CUDA_HOME.
        version: The version of nvcc.
    """

    nvcc: Path
    root: Path
    version: str

    def __str__(self) -> str:
        return f"nvcc {self.version} ({self.nvcc})"


@dataclass(frozen=True)
class Disassembler:
    """A working cuobjdump, and the nvdisasm that it calls.

    Attributes:
        cuobjdump: The path of cuobjdump.
        nvdisasm: The path of nvdisasm.
        version: The version of cuobjdump.
    """

    cuobjdump: Path
    nvdisasm: Path
    version: str

    @property
    def environment(self) -> dict[str, str]:
        """An environment in which cuobjdump finds nvdisasm."""
        path = f"{self.nvdisasm.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**os.environ, "PATH": path}

    def __str__(self) -> str:
        return f"cuobjdump {self.version} ({self.cuobjdump})"


@dataclass(frozen=True)
class Tools:
    """The tools of a compilation.

    Attributes:
        compiler: The compiler.
        disassembler: The disassembler.
        folder: The folder for the results.
    """

    compiler: Compiler
    disassembler: Disassembler
    folder: Path


def lacking(required: str, observed: str, remedy: str) -> verdict.NotRun:
    """Return the exception for a missing tool.

    Args:
        required: The required tool.
        observed: The tool that was found instead; empty if none was found.
        remedy: How to install the tool.
    """
    return verdict.NotRun(unmet.Fact(required, observed, evidence=f"remedy: {remedy}"))


def site_packages(python: str | None = None) -> list[Path]:
    """Return the folders in which wheels are installed.

    Args:
        python: An interpreter whose folders come after the import path of this process.
    """
    folders = [Path(entry) for entry in sys.path if entry]
    if python is not None:
        folders += sorted(Path(python).absolute().parent.parent.glob("lib/python3*/*-packages"))
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def find_compiler(packages: Sequence[Path]) -> Compiler:
    """Return the first nvcc in CUDA_HOME, PATH, /usr/local/cuda and the pip wheels.

    Args:
        packages: The folders in which wheels are installed.

    Raises:
        NotRun: There is no nvcc, it does not start, or it is older than CUDA 12.9.
        Sm121Error: nvcc does not print its toolkit's folder.
    """
    nvcc = _first("nvcc", packages)
    if nvcc is None:
        observed = "none in CUDA_HOME, PATH, /usr/local/cuda or pip wheels"
        raise lacking("nvcc 12.9 or newer", observed, f"pip install --no-deps {WHEELS}")
    version = _version(nvcc)
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < _OLDEST:
        raise lacking(
            "nvcc 12.9 or newer, which supports sm_121",
            f"{version} at {nvcc}",
            f"set CUDA_HOME, or pip install --no-deps {WHEELS}",
        )
    if shutil.which("g++") is None:
        raise lacking("g++, which nvcc calls", "none in PATH", "install g++")
    # Let nvcc print the toolkit's folder, because the program on PATH is often a wrapper in another
    # folder.
    match = _TOP.search(_run_tool(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull))
    if match is None:
        raise Sm121Error(
            unmet.Fact("the TOP folder in the output of nvcc --dryrun", f"none from {nvcc}")
        )
    return Compiler(nvcc, Path(match[1].strip()).resolve(), version)


def find_disassembler(packages: Sequence[Path]) -> Disassembler:
    """Return the first cuobjdump and nvdisasm in the places of nvcc, or else Triton's.

    Args:
        packages: The folders in which wheels are installed.

    Raises:
        NotRun: One of the two is missing, or cuobjdump does not start.
    """
    cuobjdump = _require_reader("cuobjdump", packages)
    nvdisasm = _require_reader("nvdisasm", packages)
    return Disassembler(cuobjdump, nvdisasm, _version(cuobjdump))


def _require_reader(tool: str, packages: Sequence[Path]) -> Path:
    path = _first(tool, packages)
    if path is None:
        observed = "none in CUDA_HOME, PATH, /usr/local/cuda, pip wheels or Triton"
        remedy = f"pip install --no-deps {READER_WHEELS}"
        raise lacking(f"{tool}, to read SASS", observed, remedy)
    return path


def _first(tool: str, packages: Sequence[Path]) -> Path | None:
    for path in _candidates(tool, packages):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


def _candidates(tool: str, packages: Sequence[Path]) -> Iterator[Path]:
    """Yield the paths at which a tool may be, in search order."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        yield Path(home) / "bin" / tool
    on_path = shutil.which(tool)
    if on_path:
        yield Path(on_path)
    yield _SYSTEM / tool
    for folder in packages:
        yield from sorted(folder.glob(f"nvidia/cu*/bin/{tool}"), reverse=True)
    for folder in packages:
        yield folder / "triton" / "backends" / "nvidia" / "bin" / tool


def _version(tool: Path) -> str:
    output = _run_tool(tool, "--version")
    match = _RELEASE.search(output)
    if match is None:
        observed = f"{tool} does not print its version: {output.strip()[:200] or 'no output'}"
        raise lacking(f"a working {tool.name}", observed, "set CUDA_HOME to another toolkit")
    return match[1]


def _run_tool(tool: Path, *arguments: str) -> str:
    try:
        return child.run([tool, *arguments], timeout_s=_ANSWER_S).output
    except (OSError, child.TookTooLong) as error:
        raise verdict.NotRun(unmet.Fact(f"a working {tool.name}", f"{tool}: {error}")) from error
