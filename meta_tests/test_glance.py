"""What ``sm121 path`` and ``sm121 box`` print for people."""

import io
import sys
from pathlib import Path

import pytest

from sm121 import cli
from sm121.core.level_settings import Box
from sm121.measure import box
from sm121.report import glance

GB10 = Path(__file__).parent / "data" / "gb10"


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The rows of the table that a command prints."""
    assert cli.main(arguments) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    return {name.strip(): text for name, _, text in (line.partition("  ") for line in lines)}


def test_a_log_on_standard_input_is_a_table(monkeypatch, capsys) -> None:
    log = (GB10 / "unfused_0804_clean.log").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log)))
    rows = printed(["path", "-"], capsys)
    assert len(rows) == 6 and "FLASHINFER_CUTLASS_MXFP4_MXFP8" in rows["MoE experts"], rows
    assert "requested: --attention-backend FLASHINFER" in rows["attention"]
    assert "no evidence shows what became of o, qkv" in rows["quantised beyond the checkpoint"]
    assert rows["CUDA graphs"].strip() == "captured"


def test_a_dead_server_has_cause_owner_and_remedy(capsys) -> None:
    rows = printed(["path", str(GB10 / "crash_tile_128x128.log")], capsys)
    assert rows["failed"].strip().startswith("engine_dead: ") and rows["ask"] and rows["remedy"]


@pytest.mark.parametrize("text", ["", "hello\n", "Traceback of nothing\n" * 3])
def test_what_is_no_log_is_refused(text: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "server.log"
    file.write_text(text)
    assert cli.main(["path", str(file)]) == 4
    assert "expected the log of a server" in capsys.readouterr().err


def test_the_box_beside_what_is_required() -> None:
    least = {"value": 200.0, "source": "eight nodes"}
    reference = Box.model_validate({"bandwidth_gb_s": least})
    reading = box.Reading(device=None, memory_available_gib=12.5, other_load=0.25, seconds=1.0)
    judgement = box.judge(reference, reading)
    text = glance.table("box.txt.j2", reference=reference, reading=reading, judgement=judgement)
    text = " ".join(text.split())
    assert "memory bandwidth not measured (required: 200)" in text
    assert "memory available 12.5 GiB" in text and "taken by others 25% of the CPU" in text
