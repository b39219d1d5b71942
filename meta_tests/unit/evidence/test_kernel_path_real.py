"""The real vLLM on the CPU is started with requests that it cannot satisfy.

They are reported, and the server is profiled."""

import json

import pytest

#: test_requested.py and test_kernel_profile.py read logs and profiles of such a start.
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow("a start of vLLM")]


def test_a_real_engine_that_does_something_else_is_invalid(run_pytest, canary_bf16):
    """A real engine that does something else is INVALID.

    The requests are for an unavailable attention backend, and a variable of a fork."""
    status, run = run_pytest(
        "--arch", "cpu", "tests/test_kernel.py",
        "-k", "test_what_was_asked_for or test_decode_runs",
        "--engine-arg=--attention-backend", "--engine-arg=TRITON_ATTN",
        "--engine-env", "VLLM_MXFP4_BACKEND=marlin",
        timeout_s=500,
    )  # fmt: skip
    assert status == 1, run.output
    verdict = run.verdict
    request = next(test for test in verdict["tests"] if "asked_for" in test["id"])
    decode = next(test for test in verdict["tests"] if "decode_runs" in test["id"])
    assert request["verdict"] == "INVALID", run.output
    assert "VLLM_MXFP4_BACKEND=marlin: not applicable" in request["message"]
    different = "--attention-backend TRITON_ATTN: requested, but attention resolved to CPU_ATTN"
    assert different in request["message"]
    path = verdict["engine"]["path"]
    assert len(path["differences"]) == 2
    resolved = ("--enforce-eager true", "--dtype float32", "--max-model-len 4608")
    assert {report["by"]: report["state"] for report in path["requested"]} == {
        "VLLM_MXFP4_BACKEND=marlin": "not_applicable",
        "--attention-backend TRITON_ATTN": "different",
        **dict.fromkeys(resolved, "resolved"),
    }

    # The same start also has a real profile of the engine.
    assert decode["verdict"] == "PASS", decode
    kernels = verdict["engine"]["kernels"]
    assert kernels["kind"] == "cpu"
    # The profile has 16 tokens after the profiler has started, and those that were generated while
    # it stopped.
    assert 14 <= kernels["steps"] <= 48
    assert sum(part["share"] for part in kernels["parts"].values()) == pytest.approx(1, abs=1e-4)
    for part in ("attention", "moe", "dense"):
        assert kernels["parts"][part]["share"] > 0.001, kernels["parts"]
    assert "| `_C::cpu_fused_moe` | moe |" in (run.report / "kernels-float32.md").read_text()
    own_times = {kernel["name"]: kernel["seconds"] for kernel in kernels["kernels"]}
    table = next((run.report / "traces").glob("*.profiler_out.txt")).read_text()
    for name in ("_C::onednn_mm", "_C::cpu_fused_moe"):
        # torch's own table of the same steps has the name, the share, and the self time with its
        # unit
        time = next(line for line in table.splitlines() if line.split()[:1] == [name]).split()[2]
        seconds = float(time.rstrip("mus")) * {"us": 1e-6, "ms": 1e-3}.get(time[-2:], 1.0)
        assert own_times[name] == pytest.approx(seconds, rel=0.01)
    assert json.dumps(verdict).count("api_key") == 0
