"""The variables that the installed engine knows are found."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meta_tests.fakes.servers import configuration
from meta_tests.folders import DATA
from sm121.engines.request_rules import load_requests
from sm121.engines.requested import compare, different
from sm121.evidence import kernel_path, variables
from sm121.evidence.variables import Registry


@pytest.mark.slow("it imports vLLM")
def test_registry_is_the_installed_engines_own() -> None:
    rules = load_requests("vllm").registry
    answer = variables.ask(sys.executable, os.environ, rules)
    names = answer["VLLM_"].known
    assert "VLLM_KV_CACHE_LAYOUT" in names
    assert "VLLM_MXFP4_BACKEND" not in names
    wants = {"VLLM_MXFP4_BACKEND": "marlin", "VLLM_KV_CACHE_LAYOUT": "HND"}
    reports = compare(configuration(**wants), kernel_path.KernelPath(kv_layout="LBHNC"), wants)
    assert [report.state for report in reports] == ["not_applicable", "resolved"]


def test_variables_are_searched_in_sources_without_import(tmp_path: Path) -> None:
    package = tmp_path / "flashinfer"
    (package / "csrc").mkdir(parents=True)
    (package / "__init__.py").write_text("import nothing_that_exists\n")
    (package / "env.py").write_text('import os\nx = os.environ.get("FLASHINFER_LOGLEVEL")\n')
    (package / "csrc" / "a.cu").write_text('auto y = getenv("FLASHINFER_FROM_C");\n')
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    wants = {"FLASHINFER_LOGLEVEL": "3", "FLASHINFER_FROM_C": "1", "FLASHINFER_NOBODY": "1"}
    reports = compare(configuration(**wants), kernel_path.KernelPath(), {**environment, **wants})
    assert [report.by for report in reports] == ["FLASHINFER_NOBODY=1"]


def test_shell_variables_of_absent_packages_are_no_request() -> None:
    registry = Registry(
        prefix="NOSUCH_", package="no_such_package", suffixes=(".py",), source="a test"
    )
    answer = variables.ask(sys.executable, {}, [registry])
    assert not answer["NOSUCH_"].installed


def test_registry_that_cannot_be_read_proves_nothing(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "envs.py").write_text("raise RuntimeError('broken')\n")
    environment = {"PYTHONPATH": str(tmp_path), "VLLM_X": "1"}
    answer = variables.ask(sys.executable, environment, load_requests("vllm").registry[:1])
    assert "broken" in answer["VLLM_"].problem
    changed = dataclasses.replace(configuration(), environment=(("VLLM_X", "1"),))
    assert compare(changed, kernel_path.KernelPath(), environment) == []


def test_log_of_a_real_engine_that_ignored_what_was_asked() -> None:
    """The suite finds the requests that a real engine ignored.

    The log is of vLLM 0.32 on a CPU. It ignored an attention backend of a GPU and a fork's
    variable."""
    path = kernel_path.read_log(DATA / "vllm-0.32-cpu-asked-otherwise.log")
    wants = configuration("--attention-backend", "TRITON_ATTN", VLLM_MXFP4_BACKEND="marlin")
    wrong = different(compare(wants, path, {"VLLM_MXFP4_BACKEND": "marlin"}))
    assert len(wrong) == 2, wrong
    assert "VLLM_MXFP4_BACKEND=marlin: not applicable" in wrong[0]
    assert (
        "--attention-backend TRITON_ATTN: requested, but attention resolved to CPU_ATTN"
        in (wrong[1])
    )
    # The log has the engine's own message, and the same name.
    assert path.unknown_env == ["VLLM_MXFP4_BACKEND"]
    assert "attention_cpu_override" in path.fallbacks


def test_probe_uses_the_standard_library_alone() -> None:
    source = Path(variables.__file__).with_name("engine_probe.py")
    isolated = subprocess.run(
        [sys.executable, "-I", "-S", str(source)], input="[]", capture_output=True, text=True
    )
    assert isolated.stdout.strip() == "[]", isolated.stderr
