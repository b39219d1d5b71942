"""FlashInfer with kernels of another release is reported before a start, and by the kernel
provider."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from sm121.compilation.jit import FlashInferModules
from sm121.core import interpreter
from sm121.core.engine_settings import Needs
from sm121.core.verdict import NotRun
from sm121.engines import nodes
from sm121.engines.preflight import Preflight, PreflightFinding

MISMATCH = "flashinfer-cubin version (0.6.13) does not match flashinfer version (0.6.14). Please"


def installed(folder: Path, packages: dict[str, str]) -> dict[str, str]:
    """The environment of an interpreter with these versions of packages. The keys are modules."""
    for module, version in packages.items():
        (folder / module).mkdir(parents=True)
        (folder / module / "__init__.py").write_text("")
        name = "flashinfer_python" if module == "flashinfer" else module
        metadata = folder / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


#: The commands to download kernels of FlashInfer 0.6.14 to 0.6.16, and of 0.6.17 (__main__.py).
_OLD_COMMAND = "then flashinfer download-cubin "
_COMMAND = "then flashinfer download-kernels"


def findings(folder: Path, packages: dict[str, str], **more: str) -> list[PreflightFinding]:
    environment = installed(folder, packages)
    modules = FlashInferModules.of(sys.executable, environment)
    start = Preflight(
        "sm121", ["--model", "m"], {**environment, **more},
        needs=Needs(), directory=folder, modules=modules,
    )  # fmt: skip
    skews = (
        "cubin_of_another_release",
        "cubin_of_another_release_0_6",
        "cubin_ignored",
        "jit_cache_of_another_release",
        "jit_cache_ignored",
    )
    return [each for each in start.findings() if each.check in skews]


@pytest.mark.parametrize(
    ("packages", "severity", "command"),
    [
        ({"flashinfer": "0.6.14", "flashinfer_cubin": "0.6.13"}, "error", _OLD_COMMAND),
        ({"flashinfer": "0.6.16.post1", "flashinfer_cubin": "0.6.13"}, "error", _OLD_COMMAND),
        ({"flashinfer": "0.6.17", "flashinfer_cubin": "0.6.13"}, "error", _COMMAND),
        ({"flashinfer": "0.6.18.post1", "flashinfer_cubin": "0.6.13"}, "error", _COMMAND),
        ({"flashinfer": "0.7.0", "flashinfer_cubin": "0.6.13"}, "error", _COMMAND),
        ({"flashinfer": "0.7.2.post1", "flashinfer_cubin": "0.6.13"}, "warning", _COMMAND),
        ({"flashinfer": "0.6.14", "flashinfer_jit_cache": "0.6.13+cu130"}, "error", "sm121 warm"),
        ({"flashinfer": "0.7.4", "flashinfer_jit_cache": "0.7.2+cu130"}, "warning", _COMMAND),
    ],
    ids=lambda value: " ".join(map("-".join, value.items())) if isinstance(value, dict) else value,
)
def test_kernels_of_another_release_are_reported_before_a_start(
    packages: dict[str, str], severity: str, command: str, tmp_path: Path
) -> None:
    (finding,) = findings(tmp_path, packages)
    assert finding.severity == severity
    for version in packages.values():
        assert version in finding.message
    assert finding.remedy.startswith("pip uninstall ")
    assert command in finding.remedy
    assert "vllm download-kernels" not in finding.remedy  # vLLM has this command from 0.32 on


@pytest.mark.parametrize(
    "packages",
    [
        {"flashinfer": "0.6.13", "flashinfer_cubin": "0.6.13"},
        {"flashinfer": "0.6.16.post1", "flashinfer_jit_cache": "0.6.16.post1+cu130"},
        {"flashinfer": "0.6.14"},
    ],
    ids=["the same", "the same, with a local part", "none beside it"],
)
def test_kernels_of_the_release_are_healthy(packages: dict[str, str], tmp_path: Path) -> None:
    assert findings(tmp_path, packages) == []


def test_a_disabled_version_check_gives_no_finding(tmp_path: Path) -> None:
    packages = {"flashinfer": "0.6.14", "flashinfer_cubin": "0.6.13"}
    assert findings(tmp_path, packages, FLASHINFER_DISABLE_VERSION_CHECK="1") == []


def requires(folder: Path, package: str, version: str, *lines: str) -> None:
    """Install a package that has requirements."""
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    wanted = "".join(f"Requires-Dist: {line}\n" for line in lines)
    (metadata / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n{wanted}")


@pytest.mark.parametrize(
    ("package", "line", "required", "installed"),
    [
        ("torchvision", "torch==2.9.0", "torch", "2.13.0"),
        ("torchaudio", "torch (==2.9.0)", "torch", "2.10.0.dev20261101"),
        ("vllm", "apache-tvm-ffi<0.2,>=0.1.11", "apache-tvm-ffi", "0.1.0b11"),
        ("flashinfer-python", "nvidia-cutlass-dsl>=4.8.0", "nvidia-cutlass-dsl", "4.4.1"),
    ],
)
def test_conflicting_packages_are_reported_before_a_start(
    package: str, line: str, required: str, installed: str, tmp_path: Path
) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("")
    requires(tmp_path, package, "0.24.0", line, 'torch==1.0; extra == "old"', "torch ==")
    requires(tmp_path, required, installed)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    modules = FlashInferModules.of(sys.executable, environment)
    start = Preflight(
        "sm121", ["--model", "m"], environment, needs=Needs(), directory=tmp_path, modules=modules
    )
    said = (
        # Other packages of this environment may refuse it, too.
        f"{package} 0.24.0 requires {required}"
    )
    (finding,) = [each for each in start.findings() if each.message.startswith(said)]
    # A torch built by the vendor works.
    assert (finding.check, finding.severity) == ("requirement", "note")
    assert f"got {installed}" in finding.message


@pytest.mark.parametrize("installed", ["2.9.0", "2.9.0+cu130", "of the vendor"])
def test_packages_that_fit_are_no_finding(installed: str, tmp_path: Path) -> None:
    requires(tmp_path, "torchvision", "0.24.0", "torch==2.9.0")
    requires(tmp_path, "torch", installed)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    watched = {"torchvision": ("torch",)}
    assert interpreter.unmet_requirements(sys.executable, watched, environment) == []


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (RuntimeError(MISMATCH), "pip uninstall flashinfer-cubin"),
        (OSError("libcuda.so.1: cannot open shared object file"), "cannot open shared object"),
        (ImportError("No module named 'flashinfer'"), "pip install flashinfer-python"),
    ],
    ids=["another release", "a library", "not installed"],
)
def test_a_failed_import_is_not_run_with_its_message(
    raised: Exception, says: str, monkeypatch
) -> None:
    from sm121.kernels import flashinfer_library

    real = importlib.import_module

    def fail(name: str) -> object:
        if name == "flashinfer":
            raise raised
        return real(name)

    monkeypatch.setattr(flashinfer_library.importlib, "import_module", fail)
    with pytest.raises(NotRun) as error:
        flashinfer_library.FlashInferLibrary()
    assert str(raised) in str(error.value) and says in str(error.value)


@pytest.mark.parametrize("package", ["apache-tvm-ffi", "nvidia-cutlass-dsl"])
def test_nodes_must_have_the_same_compilers_of_kernels(package: str) -> None:
    assert package in nodes.bounds().packages
