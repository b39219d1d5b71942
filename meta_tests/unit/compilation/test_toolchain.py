"""If compilers or FlashInfer are missing, the message says how to get them.

None of them is used without a check."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from meta_tests.fakes.servers import executable
from meta_tests.folders import DATA
from sm121.compilation import child, flashinfer, probes, toolchain
from sm121.compilation.architecture import CodeArchitecture
from sm121.core import errors
from sm121.core.unmet import facts_text
from sm121.core.verdict import NotRun

NOWHERE = toolchain.Compiler(Path(), Path(), "13.0")


def test_without_nvcc_it_is_not_run_and_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)})
    with pytest.raises(NotRun, match=r"expected nvcc.*got none.*pip install.*nvidia-cuda-nvcc"):
        toolchain.find_compiler([tmp_path])
    with pytest.raises(NotRun, match=r"expected cuobjdump.*pip install.*nvidia-cuda-nvdisasm"):
        toolchain.find_disassembler([tmp_path])


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(
            "echo 'Cuda compilation tools, release 12.4, V12.4.131'",
            "got 12.4.131",
            id="echo 'Cuda compilation tools, release 12.4, V12.4.131'",
        ),
        ("exit 3", "does not print its version"),
    ],
)
def test_an_nvcc_that_is_of_no_use_is_not_run(tmp_path, monkeypatch, script, reason):
    executable(tmp_path / "nvcc", script)
    monkeypatch.setattr(os, "environ", {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    with pytest.raises(NotRun, match=reason):
        toolchain.find_compiler([])


def test_a_wrapper_on_path_does_not_hide_the_toolkit(compiler, tmp_path, monkeypatch):
    executable(tmp_path / "nvcc", f'exec {compiler.nvcc} "$@"')
    monkeypatch.setattr(os, "environ", {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    wrapped = toolchain.find_compiler([])
    assert wrapped.nvcc == tmp_path / "nvcc" and wrapped.root == compiler.root
    assert (wrapped.root / "include").is_dir()


def test_pip_wheels_alone_suffice(monkeypatch, tmp_path):
    """nvcc and the reader of SASS come from pip wheels.

    CUDA_HOME, PATH and /usr/local are not needed."""
    packages = toolchain.site_packages()
    for tool, wheels in (("nvcc", toolchain.WHEELS), ("cuobjdump", toolchain.READER_WHEELS)):
        if not any(list(folder.glob(f"nvidia/cu*/bin/{tool}")) for folder in packages):
            pytest.skip(f"no {tool} of pip here: pip install --no-deps {wheels}")
    monkeypatch.setattr(toolchain, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin:/bin"})
    if shutil.which("nvcc") is not None:
        pytest.skip("a system nvcc is in /usr/bin and cannot be hidden")
    compiler = toolchain.find_compiler(packages)
    disassembler = toolchain.find_disassembler(packages)
    for program in (compiler.nvcc, disassembler.cuobjdump):
        assert "site-packages/nvidia/" in str(program)
    tools = toolchain.Tools(compiler, disassembler, tmp_path)
    for name in probes.names("probes"):
        probe = probes.probe(name)
        outcomes = {architecture: probe.outcomes[architecture] for architecture in ("121a", "121")}
        assert not probes.contradictions(probe.model_copy(update={"outcomes": outcomes}), tools, {})


def test_an_nvcc_that_makes_another_architecture_is_caught(disassembler, tmp_path):
    """An nvcc that compiles for another architecture is refused, for example a wrapper that adds
    PTX or ignores -gencode."""
    plain = DATA / "moe-mxfp8-mxfp4-plain-sm121.fatbin"
    script = f'while [ "$1" != -o ]; do shift; done; cp "{plain}" "$2"'
    liar = toolchain.Compiler(executable(tmp_path / "nvcc", script), tmp_path, "0")
    tools = toolchain.Tools(liar, disassembler, tmp_path)
    with pytest.raises(
        errors.Sm121Error, match=r"expected code for sm_121a from nvcc, got sm_121$"
    ):
        probes.compile_probe(probes.probe("cvt_e2m1x2"), CodeArchitecture.parse("121a"), tools, {})


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path):
    marker = tmp_path / "pid"
    script = executable(tmp_path / "slow", f"sleep 300 & echo $! > {marker}; wait")
    started = time.monotonic()
    with pytest.raises(child.TookTooLong, match="slow: expected an end within 1 s"):
        child.run([script], timeout_s=1)
    assert time.monotonic() - started < 10
    pid = int(marker.read_text())
    for _ in range(50):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"child {pid} of the compiler is still there")


def test_output_of_a_compiler_is_bounded(tmp_path):
    script = executable(tmp_path / "loud", "yes 'error: something' | head -c 5000000; exit 7")
    ended = child.run([script], timeout_s=60)
    assert ended.status == 7 and len(ended.output) == child.OUTPUT_LIMIT


# FlashInfer


class Answering(flashinfer.FlashInfer):
    """A FlashInfer that gives fixed answers."""

    answers: dict = {}  # noqa: RUF012

    def targets(self, arch_lists, compiler):
        entries = flashinfer.load_resolutions()
        return {e.arch_list: list(e.compiled_for) or e.error for e in entries} | self.answers


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param(
            {"12.1": ["121"]},
            r"'12.1': expected 121a, got \['121'\]",
            id="12.1 121, '12.1': expected 121a, got ('121')",
        ),
        pytest.param(
            {"12.1a": ["121a", "90a"]}, "expected 121a", id="12.1a 121a 90a, expected 121a"
        ),
        pytest.param(
            {"12.1": "RuntimeError: SM 12.1+ requires CUDA >= 12.9"},
            "got RuntimeError",
            id="12.1 RuntimeError: SM 12.1+ requires CUDA >= 12.9",
        ),
        pytest.param(
            {"12.0,12.1": ["120f"]},
            "expected ValueError, got",
            id="12.0,12.1 120f, expected ValueError, got",
        ),
    ],
)
def test_a_flashinfer_that_resolves_gb10_wrongly_is_caught(tmp_path, answer, reason):
    fake = Answering("python", tmp_path)
    object.__setattr__(fake, "answers", answer)
    facts = flashinfer.contradictions(fake, NOWHERE)
    assert re.search(reason, facts_text(facts)) and len(facts) == 1 if reason else not facts, facts


def test_without_flashinfer_it_is_not_run_and_says_how_to_get_it(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    with pytest.raises(NotRun, match=r"expected flashinfer-python.*pip install --no-deps"):
        flashinfer.find(str(tmp_path / "v" / "bin" / "python"))


def test_a_flashinfer_that_does_not_import_is_not_run(tmp_path):
    python = executable(tmp_path / "python", "echo ImportError: no torch >&2; exit 1")
    with pytest.raises(NotRun, match="got ImportError: no torch"):
        flashinfer.FlashInfer(str(python), tmp_path).targets(["12.1"], NOWHERE)
