"""The output of ``sm121 path`` and ``sm121 box`` for people."""

import io
import json
import sys
from pathlib import Path

import pytest

from meta_tests.folders import DATA
from sm121 import cli
from sm121.core.level_settings import Box
from sm121.machine import box, box_judgement
from sm121.report import glance

GB10 = DATA / "gb10"


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the rows of a command's table."""
    assert cli.main(arguments) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    rows = {}
    for line in lines:
        name, _, text = line.partition("  ")
        rows[name.strip()] = text
    return rows


def test_a_log_on_standard_input_is_a_table(monkeypatch, capsys) -> None:
    log = (GB10 / "unfused_0804_clean.log").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log)))
    rows = printed(["path", "-"], capsys)
    assert len(rows) == 9 and "FLASHINFER_CUTLASS_MXFP4_MXFP8" in rows["MoE experts"], rows
    assert "requested: --attention-backend FLASHINFER" in rows["attention"]
    assert ("no evidence shows the resolved value of o, qkv") in rows[
        "quantised beyond the checkpoint"
    ]
    assert rows["CUDA graphs"].strip() == "captured"


def test_a_dead_server_has_cause_owner_and_remedy(capsys) -> None:
    rows = printed(["path", str(GB10 / "crash_tile_128x128.log")], capsys)
    assert rows["failed"].strip().startswith("engine_dead: ") and rows["ask"] and rows["remedy"]


def start_of_stock_vllm(folder: Path, *more: str, model: str = "openai/gpt-oss-120b") -> Path:
    """Return the log of a release on a GB10, with the lines that the rows read."""
    prefix = "(APIServer pid=1) INFO 11-20 10:00:00 "
    lines = [
        f"{prefix}[api_utils.py:339] vLLM API server version 0.33.0",
        f"{prefix}[api_utils.py:273] non-default args: {{'model_tag': '{model}', "
        f"'model': '{model}', 'port': 8123}}",
        f"{prefix}[core.py:97] Initializing a V1 LLM engine (v0.33.0) with config: "
        f"model='{model}', speculative_config=None, dtype=torch.bfloat16, kv_cache_dtype=auto",
        f"{prefix}[mxfp4.py:300] Using 'MARLIN' Mxfp4 MoE backend.",
        *(f"{prefix}{line}" for line in more),
    ]
    file = folder / "server.log"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


FP4 = (
    "[marlin_utils_fp4.py:226] Your GPU does not have native support for FP4 computation but FP4 "
    "quantization is being used."
)


def test_the_bound_of_a_release_names_what_reads_less(tmp_path: Path, capsys) -> None:
    log = start_of_stock_vllm(tmp_path)
    rows = printed(["path", str(log)], capsys)
    assert (
        rows["bound"].strip().startswith("5.17 GB a token: 45.4 tok/s at most on a GB10 (235 GB/s)")
    )
    assert "--mxfp4-layers moe,qkv,o,lm_head" in rows["bound"] and "reads 2.83" in rows["bound"]
    assert rows["speculation"].strip() == "off"
    command = f"sm121 run --base-url http://localhost:8123 --server-log {log}"
    assert rows["next"].strip() == command


def test_a_fallback_has_the_options_of_a_start_without_it(tmp_path: Path, capsys) -> None:
    rows = printed(["path", str(start_of_stock_vllm(tmp_path, FP4))], capsys)
    assert "fp4_weight_only" in rows["fallbacks"]
    assert "start the server with --moe-backend flashinfer_cutlass" in rows["next"]


def test_no_bound_and_no_run_of_a_model_that_no_profile_judges(tmp_path: Path, capsys) -> None:
    log = start_of_stock_vllm(tmp_path, FP4, model="Qwen/Qwen3.6-35B-A3B")
    rows = printed(["path", str(log)], capsys)
    assert "bound" not in rows and "the suite has no profile for Qwen/" in rows["next"]


def test_no_bound_where_the_log_shows_no_arguments(tmp_path: Path, capsys) -> None:
    """If the log shows no arguments, the requests are unknown, and no bound is guessed."""
    log = start_of_stock_vllm(tmp_path)
    lines = [line for line in log.read_text().splitlines() if "non-default" not in line]
    log.write_text("\n".join(lines) + "\n")
    assert "bound" not in printed(["path", str(log)], capsys)


@pytest.mark.parametrize(
    ("device", "line"),
    [
        pytest.param("cpu", (), id="a CPU"),
        pytest.param(
            "cuda", ("[flash_attn.py:1117] Using FlashAttention version 3",), id="a Hopper GPU"
        ),
    ],
)
def test_no_bound_of_a_device_that_is_no_gb10(tmp_path: Path, capsys, device, line) -> None:
    log = start_of_stock_vllm(tmp_path, *line)
    settings = f"kv_cache_dtype=auto, device_config={device}"
    log.write_text(log.read_text().replace("kv_cache_dtype=auto", settings))
    assert "bound" not in printed(["path", str(log)], capsys)


def test_the_build_that_speculates_has_no_bound(tmp_path: Path, capsys) -> None:
    log = start_of_stock_vllm(tmp_path)
    method = "SpeculativeConfig(method='eagle3', model='nvidia/x', num_spec_tokens=3)"
    log.write_text(
        log.read_text().replace("speculative_config=None", f"speculative_config={method}")
    )
    rows = printed(["path", str(log)], capsys)
    assert rows["speculation"].strip() == "eagle3, 3 tokens per draft, drafter nvidia/x"
    assert "bound" not in rows


@pytest.mark.parametrize(
    ("name", "failed"),
    [("unfused_0804_clean", False), ("crash_tile_128x128", True), ("issue5_illegal_address", True)],
)
def test_json_has_cause_owner_and_remedy_of_a_failure_alone(
    name: str, failed: bool, capsys
) -> None:
    assert cli.main(["path", str(GB10 / f"{name}.log"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    for key in ("cause", "owner", "remedy"):
        assert isinstance(answer[key], str) is failed, key
        assert failed or answer[key] is None
    assert (answer["failure"] is not None) is failed and answer["next"]
    bound = answer["bound"]
    assert (bound is None) == (name == "issue5_illegal_address")
    assert bound is None or (bound["bytes_per_token"], bound["tok_s"]) == (2834060544, 82.9)


@pytest.mark.parametrize("text", ["", "hello\n", "Traceback of nothing\n" * 3])
def test_a_file_that_is_no_log_is_refused(text: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "server.log"
    file.write_text(text)
    assert cli.main(["path", str(file)]) == 4
    assert "expected the log of a server" in capsys.readouterr().err


def test_the_box_beside_what_is_required() -> None:
    least = {"value": 200.0, "source": "eight nodes"}
    reference = Box.model_validate({"bandwidth_gb_s": least})
    reading = box.Reading(device=None, memory_available_gib=12.5, other_load=0.25, seconds=1.0)
    judgement = box_judgement.judge_machine(reference, reading)
    text = glance.table("box.txt.j2", reference=reference, reading=reading, judgement=judgement)
    text = " ".join(text.split())
    assert "memory bandwidth not measured (minimum: 200)" in text
    assert (
        "memory available 12.5 GiB" in text and "CPU use of other processes 25% of the CPU" in text
    )
