"""Log lines of the engine in a whole run on the simulated GB10 (`gb10/`)."""

import re
from pathlib import Path

import pytest

from meta_tests.fakes.gb10.machine import PROFILE, Behind, Machine

RATES = {"MARLIN": [[2048, 200.0, 40000.0], [34816, 180.0, 20000.0]]}
#: This profile only requires XQA for decode. The other fields are those of the real profile.
DECODES_BY_XQA = """
name = "decodes-by-xqa"
extends = "{profile}"

[kernel_path]
attention_decode = ["xqa"]
source = "a test"
"""


def machine(folder: Path, timed_server, **settings: object) -> Machine:
    """Return a simulated GB10 on which a fast test server answers the requests that are not
    timed."""
    server = timed_server("--rate", "2000", "--prefill-rate", "1e6")
    box = Machine(
        folder / "gb10", "0.33.0", Behind(server.base_url, "none"), rates=RATES, settings=settings
    )
    box.build()
    return box


HEALTHY_TWIN = pytest.mark.slow("the healthy twin of the case beside it")


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("compiles_at", "verdict"),
    [
        pytest.param(9, "INVALID", id="a line in a timed request"),
        pytest.param(0, "PASS", id="no line", marks=HEALTHY_TWIN),
    ],
)
def test_a_kernel_compiled_in_a_timed_request_makes_its_number_invalid(
    compiles_at, verdict, timed_server, tmp_path
):
    box = machine(tmp_path, timed_server, compiles_at=compiles_at)
    done = box.run("--configuration", "stock", "--depths", "0", "--plan", "quick",
                   "tests/test_performance.py", "-k", "decode_rate")  # fmt: skip
    assert box.verdict["verdict"] == verdict, done.stdout
    assert done.returncode == (verdict != "PASS")
    assert box.verdict["metrics"]["tg32@d0"]["verdict"] == verdict
    assert re.search(rf"^tg32@d0 .* {verdict}$", done.stdout, re.M), done.stdout
    (test,) = box.verdict["tests"]
    line = "Triton kernel JIT compilation during inference: _fwd_kernel"
    log = (box.report / "server-stock.log").read_text()
    assert (line in log) is (verdict == "INVALID")
    if verdict == "INVALID":
        said = "compiled_meanwhile: the engine compiled kernels while timed requests ran (1 lines "
        assert f"{said}in its log): {line}" in test["message"]
        assert "known bug of >=0.20: " in test["message"]
        assert "vllm/issues/43009" in test["message"]
        assert line in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        pytest.param("decodes-natively", "FAIL", id="another kernel"),
        pytest.param("decodes-by-xqa", "PASS", id="the required kernel", marks=HEALTHY_TWIN),
    ],
)
def test_a_profile_that_requires_a_decode_kernel_judges_the_path(
    fault, verdict, timed_server, tmp_path
):
    box = machine(tmp_path, timed_server, faults=[fault])
    box.profile = tmp_path / "decodes-by-xqa.toml"
    box.profile.write_text(DECODES_BY_XQA.format(profile=PROFILE))
    done = box.run("--configuration", "stock", "--plan", "quick",
                   "tests/test_kernel.py", "-k", "kernel_path_is")  # fmt: skip
    assert box.verdict["verdict"] == verdict, done.stdout
    path = box.verdict["engine"]["path"]
    assert path["attention_decode"] == ("xqa" if verdict == "PASS" else "flashinfer-native")
    if verdict == "FAIL":
        assert "attention_decode: expected xqa, got flashinfer-native" in done.stdout
        assert "decode_backend=flashinfer-native" in box.verdict["tests"][0]["message"]
