"""A driver that is older than the CUDA version of the engine's torch is reported before a start,
with the kind of the problem."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from meta_tests.fakes.installed import dist_info
from meta_tests.unit.engines.preflight_starts import found
from sm121.core import profile
from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_settings import Needs
from sm121.engines import registry
from sm121.engines.cuda_versions import CudaVersion, CudaVersions
from sm121.engines.preflight import PreflightFinding
from sm121.plugin import planning
from sm121.run import start_checks
from sm121.run.record import Target
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings

OF_TORCH = (
    "from typing import Optional\n__version__ = '2.13.0'\ndebug = False\ncuda: Optional[str] = "
)


def environment_of(folder: Path, cuda: str | None, libcuda: int | None = None) -> dict[str, str]:
    """Return the environment of an engine with these versions of torch and of the driver's
    library."""
    torch = folder / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise ImportError('torch is looked at, not imported')\n")
    (torch / "version.py").write_text(f"{OF_TORCH}{cuda!r}\nhip: Optional[str] = '6.4'\n")
    if libcuda is not None:
        source = f"int cuDriverGetVersion(int *number) {{ *number = {libcuda}; return 0; }}"
        command = ["cc", "-x", "c", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), "-"]
        subprocess.run(command, input=source, text=True, check=True)
    return {**os.environ, "PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(folder)}


def nvml(number: int | None) -> SimpleNamespace:
    """Return NVML of a driver for this CUDA version. None stands for no driver."""

    class Failed(Exception):
        pass

    def answer() -> int:
        if number is None:
            raise Failed("Driver Not Loaded")
        return number

    return SimpleNamespace(
        NVMLError=Failed, nvmlInit=answer, nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion_v2=answer,
    )  # fmt: skip


def findings(versions: CudaVersions) -> list[PreflightFinding]:
    return [each for each in found(cuda=versions) if each.check == "cuda_driver"]


def look(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], of_nvml: int | None
) -> CudaVersions:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(of_nvml))
    return CudaVersions.of(registry.engine("vllm"), sys.executable, environment)


@pytest.mark.parametrize("asked", ["libcuda.so.1", "NVML"])
@pytest.mark.parametrize(
    ("driver", "toolkit", "severity", "says"),
    [
        (12080, "13.0", "warning", ("expected 13.x", "got 12.8", "35 or 803", "cuda-compat-13-0")),
        (13000, "13.2", "note", ("expected 13.2", "got 13.0", "222")),
    ],
    ids=["an older major version", "an older minor version"],
)
def test_an_older_driver_is_reported_before_a_start(
    asked, driver, toolkit, severity, says, monkeypatch, tmp_path
):
    of_library = driver if asked == "libcuda.so.1" else None
    environment = environment_of(tmp_path, toolkit, of_library)
    versions = look(monkeypatch, environment, driver if of_library is None else None)
    (finding,) = findings(versions)
    assert finding.severity == severity
    for words in says:
        assert words in finding.message
    assert finding.remedy


@pytest.mark.parametrize(
    ("driver", "toolkit"),
    [(13000, "13.0"), (13020, "13.0"), (14000, "13.2"), (13000, "12.9")],
    ids=["the same", "a newer minor", "a newer major, older minor", "an older major, newer minor"],
)
def test_a_driver_that_is_as_new_is_no_finding(driver, toolkit, monkeypatch, tmp_path):
    versions = look(monkeypatch, environment_of(tmp_path, toolkit, driver), None)
    assert versions.driver == CudaVersion.of_number(driver)
    assert str(versions.toolkit) == toolkit
    assert findings(versions) == []


@pytest.mark.parametrize(
    ("toolkit", "of_nvml"),
    [("13.0", None), (None, 12080), ("of the vendor", 12080)],
    ids=["no driver", "torch without CUDA", "torch of an unknown CUDA"],
)
def test_unknown_versions_give_no_finding(toolkit, of_nvml, monkeypatch, tmp_path):
    versions = look(monkeypatch, environment_of(tmp_path, toolkit), of_nvml)
    assert versions.driver is None or versions.toolkit is None
    assert findings(versions) == []


def test_the_library_of_cuda_compat_counts_as_the_driver(monkeypatch, tmp_path):
    """The library of the package cuda-compat counts as the driver.

    In NGC's images, the driver is older than the library that the engine loads."""
    versions = look(monkeypatch, environment_of(tmp_path, "13.0", libcuda=13000), of_nvml=12080)
    assert findings(versions) == []


def test_a_stub_of_the_driver_library_is_ignored(monkeypatch, tmp_path):
    environment = environment_of(tmp_path, "13.0")
    (tmp_path / "libcuda.so.1").write_text("a stub")
    (finding,) = findings(look(monkeypatch, environment, 12080))
    assert finding.severity == "warning"


def test_an_interpreter_that_does_not_answer_is_no_finding(tmp_path):
    versions = CudaVersions.of(registry.engine("vllm"), str(tmp_path / "none"), {})
    assert findings(versions) == []


def test_an_engine_without_torch_is_not_asked(tmp_path):
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    assert CudaVersions.of(registry.engine("llama-cpp"), str(program), {}) == CudaVersions()
    assert not (tmp_path / "started").exists()


def test_a_run_and_a_plan_say_it(monkeypatch, tmp_path):
    environment = environment_of(tmp_path, "13.0", libcuda=12080)
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, environment[name])
    cpu = profile.load("cpu-tiny-gpt-oss")
    engine = cpu.engine.model_copy(update={"needs": Needs()})
    of = cpu.model_copy(update={"engine": engine})
    configuration = ServerConfiguration(
        name="a", engine="vllm", python=sys.executable, model="m", served_name="m"
    )
    (finding,) = start_checks.find_obstacles(
        "cpu", engine, [configuration, configuration], lambda _: environment,
        directory=tmp_path, version=None, node_facts={},
    )  # fmt: skip
    assert (finding.check, finding.severity) == ("cuda_driver", "warning")
    target = Target(of.arch, profile=of, obstacle=None)
    (line,) = planning._start(
        Settings(target=GivenTarget(profile=of), report_dir=tmp_path), target, of
    )
    assert line.startswith("start: warning: CUDA of the driver: expected 13.x")


def floors(versions: CudaVersions, arch: str = "sm121") -> list[PreflightFinding]:
    return [each for each in found(cuda=versions, arch=arch) if each.check == "cuda_floor"]


def of_texts(driver: str, toolkit: str, cudnn: str) -> CudaVersions:
    return CudaVersions(*map(CudaVersion.of_text, (driver, toolkit, cudnn)), asked=True)


@pytest.mark.parametrize("versions", [("13.0", "13.0", "9.14.0.64"), ("13.1", "13.1", "9.15.1.9")])
def test_a_spark_on_its_floors_has_no_finding(versions):
    assert floors(of_texts(*versions)) == []


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        (("12.9", "12.9", "9.15"), ["CUDA of the driver: expected 13.0", "torch: expected 13.0"]),
        (("13.0", "12.8", "9.15"), ["CUDA of the engine's torch: expected 13.0 or newer"]),
        (("13.0", "13.0", "9.13.1.26"), ["cuDNN: expected 9.14 or newer on sm121, got 9.13"]),
        (("13.0", "13.0", "9.9"), ["got 9.9"]),
    ],
    ids=["driver and toolkit", "toolkit", "cuDNN", "9.9 is older than 9.14"],
)
def test_each_version_below_its_minimum_gives_one_line(versions, says):
    found_here = floors(of_texts(*versions))
    assert [each.severity for each in found_here] == ["warning"] * len(says)
    for finding, words in zip(found_here, says, strict=True):
        assert words in finding.message and finding.remedy


def test_a_driver_older_than_the_toolkit_is_reported_once():
    versions = of_texts("12.8", "13.0", "9.15")
    assert len(findings(versions)) == 1 and floors(versions) == []


def test_an_unknown_version_is_not_proven():
    (finding,) = floors(of_texts("13.0", "", ""))
    assert finding.severity == "note" and "not proven" in finding.message
    assert "cuDNN 9.14" in finding.message and "driver 13.0" not in finding.message


def test_floors_are_of_their_architecture_and_of_engines_with_torch():
    assert floors(of_texts("12.0", "12.0", "8.0"), arch="cpu") == []
    assert floors(CudaVersions()) == []


@pytest.mark.parametrize(
    ("driver", "toolkit", "cudnn", "below"),
    [
        (12080, "12.8", "9.13.1.26", ["CUDA of the driver", "CUDA of the engine's torch", "cuDNN"]),
        (13000, "13.0", "9.14.0.64", []),
    ],
    ids=["all three below", "all three on their floors"],
)
def test_a_start_and_a_plan_of_a_spark_read_all_three_parts(
    driver, toolkit, cudnn, below, monkeypatch, tmp_path
):
    """A start and a plan on a Spark read driver, torch and cuDNN.

    The test covers the whole rule, from the files of an engine's environment to the printed lines.
    """
    environment = environment_of(tmp_path, toolkit, libcuda=driver)
    dist_info(tmp_path, "nvidia-cudnn-cu13", cudnn)
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, environment[name])
    gb10 = profile.load("sm121-gpt-oss-120b")
    configuration = ServerConfiguration(
        name="a", engine="vllm", python=sys.executable, model="m", served_name="m"
    )
    obstacles = start_checks.find_obstacles(
        gb10.arch, gb10.engine, [configuration], lambda _: environment,
        directory=tmp_path, version=None, node_facts={},
    )  # fmt: skip
    found_here = [each for each in obstacles if each.check == "cuda_floor"]
    assert [each.message.partition(":")[0] for each in found_here] == below
    assert {each.severity for each in found_here} <= {"warning"}
    target = Target(gb10.arch, profile=gb10, obstacle=None)
    settings = Settings(target=GivenTarget(profile=gb10), report_dir=tmp_path)
    lines = [
        line for line in planning._start(settings, target, gb10) if "or newer on sm121" in line
    ]
    assert len(lines) == len(below)


@pytest.mark.parametrize("asked", ["package", "variable", "neither"])
def test_cudnn_is_that_of_the_engine(asked, monkeypatch, tmp_path):
    environment = environment_of(tmp_path, "13.0", 13000)
    environment.pop("CUDNN_VERSION", None)
    if asked == "package":
        dist_info(tmp_path, "nvidia-cudnn-cu13", "9.15.1.9")
    if asked != "neither":
        environment["CUDNN_VERSION"] = "9.13.0.50"
    expected = {"package": CudaVersion(9, 15), "variable": CudaVersion(9, 13)}.get(asked)
    assert look(monkeypatch, environment, None).cudnn == expected
