"""The modules that the kernel level compiles, and the folder in which it compiles them.

The tests use FlashInfer's own generators and ninja, and a compiler that records the type of the
requested cache.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from meta_tests.fakes.run_events import stand_in
from meta_tests.folders import FAKES
from meta_tests.releases import needs_torch
from sm121.core.configuration import ServerConfiguration
from sm121.core.verdict import NotRun
from sm121.plugin.kernels import _Processes
from sm121.session.given_attached import GivenServer
from sm121.session.given_judging import GivenJudging
from sm121.session.settings import Settings

# `importorskip` is not used, because each worker would import FlashInfer for these tests.
pytestmark = pytest.mark.skipif(find_spec("flashinfer") is None, reason="no FlashInfer is here")

COMPILER = """#!{python}
import pathlib, sys
given = sys.argv[1:]
if "--version" in given:
    print("Cuda compilation tools, release 13.0, V13.0.88")
log = pathlib.Path({log!r})
if "-o" in given:
    output = pathlib.Path(given[given.index("-o") + 1])
    objects = [pathlib.Path(name) for name in given if name.endswith(".o")]
    text = "".join(file.read_text() for file in objects if file != output)
    for name in given:
        config = pathlib.Path(name).with_name("batch_prefill_config.inc")
        if name.endswith(".cu") and config.is_file():
            lines = config.read_text().splitlines(keepends=True)
            text += "".join(line for line in lines if line.startswith("using DTypeKV"))
    output.write_text(text)
    with log.open("a") as file:
        file.write(output.name + chr(10))
for flag in ("-MF", "--dependency-output"):
    if flag in given:
        pathlib.Path(given[given.index(flag) + 1]).write_text("x:")
"""


class Toolkit:
    """A CUDA toolkit that compiles nothing, and an empty cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "compiled"
        self.cache = folder / ".cache" / "flashinfer"
        binaries = folder / "toolkit" / "bin"
        binaries.mkdir(parents=True)
        for name in ("nvcc", "c++"):
            (binaries / name).write_text(COMPILER.format(python=sys.executable, log=str(self.log)))
            (binaries / name).chmod(0o755)
        path = (binaries, Path(sys.executable).parent, os.environ["PATH"])
        self.environment = {
            **os.environ,
            "CUDA_HOME": str(folder / "toolkit"),
            "CXX": str(binaries / "c++"),
            "PATH": os.pathsep.join(map(str, path)),
            "FLASHINFER_WORKSPACE_BASE": str(folder),
            "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
        }

    def build(self, how: str, *kinds: str, **environment: str) -> dict[str, Path]:
        """Let one process for each kind of cache build a module, all at the same time.

        Returns:
            The libraries, by kind of cache.
        """
        for file in self.folder.glob("ready-*"):
            file.unlink()
        (self.folder / "expected").write_text(f"{len(kinds)}")
        script = FAKES / "building_process.py"
        processes = {
            kind: subprocess.Popen(
                [sys.executable, str(script), str(self.folder), kind, how],
                env={**self.environment, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for kind in kinds
        }
        built = {}
        for kind, process in processes.items():
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            built[kind] = Path(output.splitlines()[-1])
        return built

    @property
    def compiled(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def toolkit(tmp_path: Path) -> Toolkit:
    return Toolkit(tmp_path)


@pytest.mark.timeout(240)
@pytest.mark.slow("two compilations at once; the two names are held by the tests of the sinks")
def test_two_processes_at_once_get_a_module_each(toolkit):
    """Two processes that start with one empty cache get a module each: one for BF16 and one for
    FP8, for which FlashInfer has the same name."""
    built = toolkit.build("suite", "bf16", "fp8")
    types = {kind: set(library.read_text().splitlines()) for kind, library in built.items()}
    assert types == {
        "bf16": {"using DTypeKV = nv_bfloat16;"},
        "fp8": {"using DTypeKV = __nv_fp8_e4m3;"},
    }
    assert built["bf16"].parent.name != built["fp8"].parent.name


@pytest.mark.slow("FlashInfer is imported and its sources are written several times")
@pytest.mark.timeout(240)
def test_by_flashinfers_own_name_two_processes_share_one_module(toolkit):
    """With FlashInfer's own name, two processes share one module: the later one rebuilds the module
    of the other, or gets it. This is the fault."""
    built = toolkit.build("flashinfer", "bf16", "fp8")
    assert built["bf16"] == built["fp8"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_level_leaves_the_engines_sink_module_alone(toolkit):
    engines = toolkit.build("flashinfer", "fp8")["fp8"]
    written = engines.stat().st_mtime_ns
    assert engines not in toolkit.build("suite", "bf16", "fp8").values()
    assert engines.stat().st_mtime_ns == written
    before = toolkit.compiled
    assert toolkit.build("flashinfer", "fp8")["fp8"] == engines
    assert toolkit.compiled == before, "the next start is warm"


def environment_of_the_level(start: dict[str, str], bounds: dict[str, str]) -> dict[str, str]:
    """Return the environment of the kernels' process, for a start in this process."""
    configuration = ServerConfiguration(
        name="c", engine="vllm", model="m", served_name="m", python=sys.executable
    )
    run = stand_in(
        profile=SimpleNamespace(under_test="c"),
        managed=lambda _name: configuration,
        environment=lambda _configuration: start,
        bound_compilers=lambda _configuration: bounds,
    )
    session = SimpleNamespace(run=run, settings=Settings())
    return dict(_Processes(session).engine.environment)


BOUNDS = {"MAX_JOBS": "3", "FLASHINFER_NVCC_THREADS": "1"}


def test_the_compilers_of_the_level_are_bounded_as_those_of_a_start():
    """The kernel level limits its parallel compile jobs as the start of a server does.

    Without the limit, twenty compile jobs of 9 GiB each ran beside the server."""
    level = environment_of_the_level({"HOME": "/home/me"}, BOUNDS)
    assert level == {"HOME": "/home/me", **BOUNDS}


@pytest.mark.parametrize("certify", [False, True])
def test_an_attached_servers_build_is_not_known(certify):
    """The build of an attached server is not known, so the numerics test this machine's build.

    This is a remark, and NOT_RUN in a certificate."""
    remarks: list[str] = []
    settings = Settings(
        attached=GivenServer("http://127.0.0.1:9"), judging=GivenJudging(certify=certify)
    )
    processes = _Processes(SimpleNamespace(settings=settings, run=stand_in(remark=remarks.append)))
    unknown = "it is not known whether the attached server uses that build"
    if certify:
        with pytest.raises(NotRun, match=f"{unknown}: run the kernel level in the engine's"):
            processes.of("vllm-cpu")
        return
    assert processes.of("vllm-cpu") is processes.here
    assert len(remarks) == 1 and unknown in remarks[0]
    assert processes.of("torch") is processes.here and len(remarks) == 1, "of no engine"


@needs_torch
@pytest.mark.timeout(240)
def test_the_engine_starts_warm_after_the_level(toolkit):
    """After the kernel level, the engine starts with warm caches.

    XQA has the engine's name and compile command, so nothing is rebuilt."""
    level = environment_of_the_level(toolkit.environment, BOUNDS)
    library = toolkit.build("xqa", "fp8", **level)["fp8"]
    before = toolkit.compiled
    assert before, "the level has compiled it"
    assert toolkit.build("xqa", "fp8", **BOUNDS)["fp8"] == library
    assert toolkit.compiled == before


@pytest.mark.slow("the twin of the test before")
@pytest.mark.timeout(240)
def test_the_engine_would_start_cold_with_other_flags(toolkit):
    toolkit.build("xqa", "fp8", **environment_of_the_level(toolkit.environment, BOUNDS))
    before = len(toolkit.compiled)
    assert before, "the level has compiled it"
    toolkit.build("xqa", "fp8", **BOUNDS | {"FLASHINFER_NVCC_THREADS": "4"})
    assert len(toolkit.compiled) == 2 * before
