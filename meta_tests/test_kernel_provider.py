"""`--kernel-provider`: which kernels are tested, and what a run says when they cannot be."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(300)

NUMERICS = ("tests/test_kernel.py", "-k", "routing_takes", "--arch", "cpu")


def judged(run) -> list[dict]:
    return [t for t in run.verdict["tests"] if "routing_takes" in t["id"]]


def test_a_wrong_name_is_a_usage_error(run_pytest):
    status, run = run_pytest(*NUMERICS, "--kernel-provider", "cuda")
    assert status == 4
    assert "--kernel-provider cuda: expected one of torch, torch-cuda, vllm-cpu, vllm" in run.output


def test_a_provider_of_ones_own_is_judged(run_pytest, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from sm121.kernels.torch_provider import TorchProvider\n"
        "class Wrong(TorchProvider):\n"
        "    name = 'mine'\n"
        "    def route(self, logits, k):\n"
        "        shares, ids = super().route(logits, k)\n"
        "        return shares * 1.01, ids\n"
        "wrong = Wrong()\n"
    )
    status, run = run_pytest(
        *NUMERICS, "--kernel-provider", "mine:wrong", environment={"PYTHONPATH": str(tmp_path)}
    )
    assert status == 1, run.output
    failed = [t for t in judged(run) if t["verdict"] == "FAIL"]
    assert failed
    assert "required at most" in failed[0]["message"]


def test_what_a_provider_lacks_is_not_run(run_pytest, tmp_path):
    (tmp_path / "bare.py").write_text("name = 'bare'\nempty = object()\n")
    status, run = run_pytest(
        *NUMERICS, "--kernel-provider", "bare:empty", environment={"PYTHONPATH": str(tmp_path)}
    )
    assert status == 5, run.output
    assert {t["verdict"] for t in judged(run)} == {"NOT_RUN"}
    assert "provider object has no route" in judged(run)[0]["message"]


def test_cases_and_plugin_are_there_without_torch():
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import sm121.kernels.cases, sm121.kernels.registry, sm121.plugin.kernels, sm121.cli\n"
        "print(len(sm121.kernels.cases.GROUPS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
