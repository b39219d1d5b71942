"""The output of ``sm121 checkpoint``, and its exit status."""

import json

from meta_tests.fakes import checkpoints
from sm121 import cli


def test_a_true_label_is_status_0(tmp_path, capsys):
    folder = checkpoints.load("openai/gpt-oss-120b").write(tmp_path)
    assert cli.main(["checkpoint", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}: 687 tensors in 2 files, 65.25 GB"
    assert lines[1] == "declared quantisation: mxfp4 (config.json)"
    assert lines[4].split("  ")[0] == "experts"
    assert lines[4].endswith("60.99 GB        1.91 GB")
    text = "\n".join(lines)
    assert "experts: 128 a layer, of which a token uses 4" in text
    assert "36.86 kB per token" in text
    assert lines[-1] == "the declared quantisation and the tensors agree"


def test_a_wrong_label_has_status_1_and_one_line(tmp_path, capsys):
    public = checkpoints.load("openai/gpt-oss-120b")
    public.config["quantization_config"] = {"quant_method": "fp8"}
    assert cli.main(["checkpoint", str(public.write(tmp_path))]) == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = [line for line in lines if line.startswith("WRONG: ")]
    assert wrong[0].startswith(
        "WRONG: experts, layers 0 to 35: expected fp8 (fp8 in config.json), got mxfp4 (72 "
    )
    assert wrong[1].startswith("WRONG: attention, layers 0 to 35: expected fp8 ")


def test_what_was_not_judged_has_status_5(tmp_path, capsys):
    public = checkpoints.load("openai/gpt-oss-120b")
    public.config["quantization_config"] = {"quant_method": "spqr"}
    assert cli.main(["checkpoint", str(public.write(tmp_path))]) == 5
    assert capsys.readouterr().out.splitlines()[-1] == (
        "NOT_RUN: the declared quantisation spqr: no row of checkpoint.toml describes it"
    )


def test_json_has_the_facts(tmp_path, capsys):
    public = checkpoints.load("openai/gpt-oss-120b")
    del public.config["quantization_config"]
    assert cli.main(["checkpoint", str(public.write(tmp_path)), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (fact,) = report["facts"]
    assert fact["observed"] == "mxfp4"
    assert fact["required"] == "not quantised (no quantization_config in config.json)"
    assert report["kv_cache"] == {
        "full_layers": 18,
        "sliding_layers": 18,
        "window": 128,
        "values": 1024,
    }
    assert round(report["token_bytes"] / 1e9, 2) == 5.0


def test_a_model_that_is_not_here_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert cli.main(["checkpoint", "somebody/something"]) == 4
    assert "Download it first: hf download somebody/something" in capsys.readouterr().err


def test_a_model_of_the_hubs_cache(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--Qwen--Qwen3-8B"
    checkpoints.load("Qwen/Qwen3-8B").write(folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc", "utf-8")
    assert cli.main(["checkpoint", "Qwen/Qwen3-8B"]) == 0
    assert "16.38 GB" in capsys.readouterr().out
