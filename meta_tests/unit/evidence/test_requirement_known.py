"""If a log shows the symptom of a known bug, the message contains the bug's row with its link."""

import re
from pathlib import Path

import pytest

from sm121.core.engine_settings import KernelPathRequirement
from sm121.core.unmet import Unmet, require
from sm121.engines import capabilities
from sm121.engines.preflight import load_preflight
from sm121.evidence import requirement
from sm121.evidence.compile_watch import CompileWatch
from sm121.evidence.failure import classify_lines
from sm121.evidence.kernel_path import read_log
from sm121.measure import validity
from sm121.measure.validity import Findings

CORE = "(EngineCore pid=7) {} 11-20 10:00:00 "
COMPILED = (
    CORE.format("WARNING") + "[jit_monitor.py:147] CuTeDSL JIT compilation during inference: "
    "FlashAttentionForwardSm120. This causes a latency spike; consider extending warmup to cover "
    "this shape/config."
)
PIECEWISE = (
    CORE.format("WARNING") + "[compilation.py:1458] CUDAGraphMode.FULL_AND_PIECEWISE is not "
    "supported with spec-decode for attention backend FlashInferBackend (support: "
    "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE); setting cudagraph_mode=PIECEWISE"
)
CUBIN = (
    "RuntimeError: flashinfer-cubin version (0.6.13) does not match flashinfer version (0.6.15). "
    "Please install the same version of both packages."
)


def of_a_timed_window(log: Path) -> list[str]:
    findings = Findings()
    validity.check_compiled(CompileWatch(log, "vllm").new(), findings)
    return [str(item) for item in findings.invalid]


def of_the_path(log: Path) -> list[str]:
    required = KernelPathRequirement(source="a test")
    found = requirement.contradictions(required, read_log(log), log, "stock")
    return [str(contradiction) for contradiction in found]


def of_a_failed_start(log: Path) -> list[str]:
    return [classify_lines(log.read_text().splitlines(), 1).summary]


def of_a_preflight(_log: Path) -> list[str]:
    return [rule.message for rule in load_preflight().rule if rule.id == "sink_module_two_caches"]


def of_a_tools_name(_log: Path) -> list[str]:
    with pytest.raises(Unmet) as error:
        require(False, "a call of weather.get", ["weather"])
    return [fact.requirement for fact in error.value.facts]


@pytest.mark.parametrize(
    ("line", "finding", "version", "link"),
    [
        pytest.param(COMPILED, of_a_timed_window, "0.27.1", "vllm/issues/43009", id="13, JIT"),
        pytest.param(PIECEWISE, of_the_path, "0.27.1", "vllm/issues/49547", id="13, MTP"),
        pytest.param(CUBIN, of_a_failed_start, "0.27.1", "flashinfer/issues/4781", id="9, cubin"),
        pytest.param("", of_a_tools_name, "0.32.0", "vllm/issues/51977", id="14, a tool's name"),
        pytest.param("", of_a_preflight, "0.32.0", "flashinfer-sink-module-name", id="4, one name"),
    ],
)
def test_the_symptom_has_its_row(line, finding, version, link, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(f"{line}\n")
    texts = finding(log)
    assert texts
    bugs = capabilities.capabilities_of("vllm", version).bugs("tests/test_any.py::test_any")
    known = []
    for bug in bugs:
        for text in texts:
            if re.search(bug.says, text):
                known.append(bug)
    assert [link in bug.source for bug in known] == [True], texts


@pytest.mark.parametrize("finding", [of_a_timed_window, of_the_path])
def test_a_healthy_log_has_none(finding, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(CORE.format("INFO") + "[core.py:1] Graph capturing finished in 4 secs\n")
    assert finding(log) == []
