"""A number is INVALID if a kernel was compiled while its requests were timed."""

from pathlib import Path

import pytest

from sm121.core.level_settings import Measuring
from sm121.core.server import Endpoint
from sm121.evidence.compile_watch import CompileWatch
from sm121.measure.cells import MeasuredCell
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.metrics.tg import DecodeRate
from sm121.measure.plan import Plan

PLAN = Plan(512, (16, 64), (0,), Measuring(rounds=4, short_rounds=2))
REQUEST = '(APIServer pid=1) INFO:     10.0.0.7:5 - "POST /v1/completions HTTP/1.1" 200 OK\n'
CORE = "(EngineCore pid=7) WARNING 11-20 10:00:00 [jit_monitor.py:147] "


@pytest.mark.alone
@pytest.mark.parametrize(
    ("compiles_at", "reasons"),
    [
        pytest.param(7, {"compiled_meanwhile"}, id="within a timed window"),
        pytest.param(2, set(), id="before the window"),
        pytest.param(0, set(), id="never", marks=pytest.mark.slow("as before the window")),
    ],
)
def test_a_number_with_a_compiler_in_it_is_invalid(
    compiles_at, reasons, timed_server, tmp_path
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(REQUEST)
    server = timed_server(
        "--rate", "200", "--compiles-at", str(compiles_at), "--engine-log", str(log)
    )
    endpoint = Endpoint(server.base_url, "none", "gpt-oss-120b")
    watch = CompileWatch(log, "vllm")
    with MeasuredServer.open(endpoint, PLAN, tmp_path, compiled=watch.new) as measured:
        cell = MeasuredCell(measured, 0).gather(4)
        measurement = DecodeRate(64).settle(cell)
    assert {item.reason for item in measurement.invalid} == reasons
    assert measurement.valid is (not reasons)
    assert ("Triton kernel JIT" in log.read_text()) is (compiles_at > 0)


@pytest.mark.parametrize(
    ("line", "compiled"),
    [
        (CORE + "Triton kernel JIT compilation during inference: _fwd. This causes a spike.", True),
        (CORE + "CuTeDSL JIT compilation during inference: gemm (a=1). This causes a spike.", True),
        (CORE + "TileLang JIT compilation during inference: f. This causes a spike.", True),
        (CORE + "Kernel JIT monitor activated; monitored JIT compilations during inference", False),
        (
            "INFO 11-20 10:00:00 [a.py:1] Received request x: 'JIT compilation during inference: '",
            False,
        ),
        ("", False),
    ],
    ids=["triton", "cute", "tilelang", "the monitor itself", "a user's words", "nothing"],
)
def test_lines_of_the_compile_monitor_are_found(line: str, compiled: bool, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"{line}\n")
    assert bool(CompileWatch(log, "vllm").new()) is compiled


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    line = CORE + "Triton kernel JIT compilation during inference: _fwd. This causes a spike.\n"
    log.write_text(line[:40])
    watch = CompileWatch(log, "vllm")
    assert watch.new() == [], "the line is still being written"
    log.write_text(line)
    assert len(watch.new()) == 1
    assert watch.new() == []
    log.write_text("cut\n")
    assert watch.new() == []
    assert CompileWatch(None, "vllm").new() == []
    assert CompileWatch(log, "another").new() == []
