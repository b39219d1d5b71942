"""By what `sm121 profile` judges a decode: backend, drafts, layout, limits and bounds."""

import json

import pytest

from meta_tests.fakes import decode_traces
from meta_tests.fakes.decode_traces import LAYER_US
from meta_tests.unit.evidence.kernel_tables import TABLES_OF_GB10
from sm121.engines import attached_log
from sm121.evidence.decode_time import StreamTime
from sm121.evidence.profiler import DecodeTrace
from sm121.session import decode_command, decode_subject

STATUS_USAGE = 4
STATUS_NOT_RUN = 5
#: The first line of vLLM's log.
VLLM_START = (
    "(APIServer pid=7) INFO 11-30 12:00:00 [api_server.py:1292] vLLM API server version 0.33.0\n"
)
DATA_FILE = TABLES_OF_GB10 / "fused_0804_kernels.csv"


def test_a_drafter_that_drafts_nothing_fails(profiled, tmp_path):
    """A drafter that drafts nothing fails, because a step of a configuration with Eagle3 has
    several tokens."""
    words = ("--profile", "sm121-gpt-oss-120b", "--configuration", "eagle3-short")
    fault = "speculative decoding: expected steps with drafts of eagle3, got steps of one token"
    trace = decode_traces.write(tmp_path / "none.pt.trace.json", step_tokens=1)
    status, out, err = profiled(trace, *words)
    assert status == 1 and fault in out, (out, err)
    assert fault not in profiled(trace, *words[:2], "--configuration", "mxfp4")[1]
    trace = decode_traces.write(tmp_path / "drafts.pt.trace.json", step_tokens=4)
    status, out, err = profiled(trace, *words)
    assert fault not in out and status != 1, (out, err)


def test_a_start_without_drafts_fails(profiled, start_with, tmp_path):
    """A start without drafts fails.

    Before, only a file and a URL were checked for drafts."""
    words = ("eagle3-short", "--profile", "sm121-gpt-oss-120b")
    fault = "speculative decoding: expected steps with drafts of eagle3, got steps of one token"
    start_with(decode_traces.write(tmp_path / "none.pt.trace.json", step_tokens=1))
    status, out, err = profiled(*words)
    assert status == 1 and fault in out, (out, err)
    start_with(decode_traces.write(tmp_path / "drafts.pt.trace.json", step_tokens=4))
    assert fault not in profiled(*words)[1]
    start_with(decode_traces.write(tmp_path / "stock.pt.trace.json", experts="MARLIN"))
    status, out, err = profiled("stock", *words[1:])
    assert status == 0, (out, err)


def test_a_drafter_whose_drafts_are_unknown_is_not_run(profiled, start_with, tmp_path):
    """It passed without a line."""
    profile = ("--profile", "sm121-gpt-oss-120b")
    named = (*profile, "--configuration", "eagle3-short")
    missing = "speculative decoding: expected steps with drafts of eagle3, but neither the trace"
    trace = decode_traces.write(tmp_path / "old.pt.trace.json", step_tokens=None)
    status, out, err = profiled(trace, *named)
    assert status == STATUS_NOT_RUN and missing in out, (out, err)
    assert missing not in profiled(trace, *profile, "--configuration", "mxfp4")[1]
    start_with(trace)
    status, out, err = profiled("eagle3-short", *profile)
    assert status == STATUS_NOT_RUN and missing in out, (out, err)
    start_with(trace, tokens_per_step=2.5)
    assert missing not in profiled("eagle3-short", *profile)[1], "the counters show the drafts"


def test_a_file_may_be_of_any_release_of_its_configuration(profiled, tmp_path):
    """A file may come from any release that the configuration allows.

    With its defaults, the MXFP4 build runs CUTLASS, and a release runs Marlin; the file does not
    show the release."""
    words = ("--profile", "sm121-gpt-oss-120b", "--configuration", "stock")
    for experts in ("CUTLASS", "MARLIN"):
        trace = decode_traces.write(tmp_path / f"{experts}.pt.trace.json", experts=experts)
        status, out, err = profiled(trace, *words)
        assert status == 0, (out, err)
        assert (
            "The release is unknown: each backend that configuration stock requires of a release "
            "or a build is accepted (FLASHINFER_CUTLASS_MXFP4_MXFP8, MARLIN, "
        ) in out
        assert "The release is" not in profiled(trace, *words, "--backend", experts)[1]
    assert profiled(trace, *words[:2], "--configuration", "cutlass")[0] == 1
    assert "The release is" not in profiled(trace, *words[:2], "--configuration", "marlin")[1]


@pytest.mark.parametrize("of", ["file", "URL"])
def test_the_named_configuration_has_backends_limits_and_bound(
    of, profiled, fault_server, tmp_path, monkeypatch
):
    """`sm121 profile` uses the backends, the limits and the upper bound of the named configuration.

    Before, it did not detect Marlin, and the limit of the stock release was 20 ms."""
    trace = decode_traces.write(tmp_path / "w.pt.trace.json", experts="MARLIN")
    words = [trace, "--profile", "sm121-gpt-oss-120b"]
    if of == "URL":
        server = fault_server()
        monkeypatch.setenv("OPENAI_API_KEY", server.key)
        taken = DecodeTrace(trace, StreamTime(1.02 * 36 * LAYER_US / 1e6))
        monkeypatch.setattr(decode_command, "profile_decode", lambda *_, **__: taken)
        words[:1] = [server.base_url, "--traces", tmp_path]
    status, out, err = profiled(*words, "--configuration", "mxfp4")
    assert status == 1, err
    assert "**Fault**: MoE: expected kernels of FLASHINFER_CUTLASS_MXFP4_MXFP8, got" in out
    status, out, err = profiled(*words, "--configuration", "stock")
    assert status == 0, (out, err)
    assert "limit: 33.1 ms (gate tpot_p50 of configuration stock)" in out
    assert "The bounds are those of configuration stock: the formats of this server" in out
    assert profiled(*words, "--configuration", "mxfp4", "--backend", "MARLIN")[0] == 0
    status, out, _ = profiled(*words, "--configuration", "eagle3-short", "--backend", "MARLIN")
    assert status == 1, "the trace has no drafts"
    assert "gate tpot_p50 of configuration eagle3-short" in out
    assert "No roofline: the formats of its layers are unknown, or it uses speculative" in out


@pytest.mark.parametrize(
    ("profile", "configuration", "requested", "other"),
    [
        ("sm121-gpt-oss-120b", "cutlass", "CUTLASS", "MARLIN"),
        ("sm121-gpt-oss-120b", "marlin", "MARLIN", "CUTLASS"),
        ("sm121-tiny-gpt-oss", "cutlass", "CUTLASS", "MARLIN"),
        ("sm90-tiny-gpt-oss", "marlin", "MARLIN", "CUTLASS"),
    ],
)
def test_the_backend_in_the_arguments_of_a_configuration_is_judged(
    profile, configuration, requested, other, profiled, tmp_path
):
    """If only the arguments of a configuration name a backend, its kernels are judged by this
    backend.

    Before, they were not judged."""
    words = ("--profile", profile, "--configuration", configuration)
    trace = decode_traces.write(tmp_path / "right.pt.trace.json", experts=requested)
    status, out, err = profiled(trace, *words)
    assert status == 0, (out, err)
    trace = decode_traces.write(tmp_path / "wrong.pt.trace.json", experts=other)
    status, out, _ = profiled(trace, *words)
    assert status == 1 and "**Fault**: MoE: expected kernels of " in out
    assert profiled(trace, *words, "--backend", other)[0] == 0


def test_a_profile_faster_than_the_memory_allows_has_a_remark(profiled, tmp_path):
    words = ("--profile", "sm121-gpt-oss-120b", "--configuration", "mxfp4")
    trace = decode_traces.write(tmp_path / "faster.pt.trace.json")
    status, out, _ = profiled(trace, *words)
    remark = "**Remark**: a step: expected at least 12.1 ms, which the memory allows, got 11.1 ms."
    assert status == 0 and remark in out, out
    assert "MoE GEMM of a layer: expected at least 0.235 ms, which the memory allows, got" in out
    assert "Check that this is a decode of the model of --profile, in the formats" in out
    record = json.loads((tmp_path / "report" / "decode.json").read_text())
    assert len(record["remarks"]) == 2
    trace = decode_traces.write(tmp_path / "right.pt.trace.json", slower=1.4)
    assert "Remark" not in profiled(trace, *words)[1]
    table = profiled(DATA_FILE, *words)[1]
    assert "Remark" not in table, "a table of nsys has no steps"


@pytest.mark.parametrize("words", [(), ("--configuration", "mxfp4"), ("--configuration", "stock")])
def test_a_decode_of_another_model_fails(words, profiled, tmp_path):
    """A decode of another model fails.

    Before, the trace of a model with 24 layers met each limit of gpt-oss-120b, with a remark."""
    words = ("--profile", "sm121-gpt-oss-120b", *words)
    fault = (
        "**Fault**: model: expected a decode step of openai/gpt-oss-120b, with experts in 36 "
        "layers, got 24. Name the profile of the model with --profile"
    )
    trace = decode_traces.write(tmp_path / "smaller.pt.trace.json", layers=24)
    status, out, err = profiled(trace, *words)
    assert status == 1 and fault in out, (out, err)
    trace = decode_traces.write(tmp_path / "right.pt.trace.json")
    assert "model: expected" not in profiled(trace, *words)[1]
    assert "model: expected" not in profiled(DATA_FILE, *words)[1], "no steps, so no layers"


def test_the_layers_of_a_pipeline_are_not_judged(profiled, tmp_path):
    """With pipeline parallelism, the number of layers is not judged, because each rank has only a
    part of them."""
    mine = tmp_path / "mine.toml"
    mine.write_text(
        "name = 'ours'\nextends = 'sm121-gpt-oss-120b'\n"
        "[configurations.halves]\ndescription = 'two ranks'\n"
        "arguments = ['--moe-backend', 'cutlass', '--pipeline-parallel-size', '2']\n"
    )
    trace = decode_traces.write(tmp_path / "half.pt.trace.json", layers=18)
    status, out, err = profiled(trace, "--profile", mine, "--configuration", "halves")
    assert status == 0, (out, err)


def test_a_configuration_without_a_known_backend_is_not_run(profiled, tmp_path):
    trace = decode_traces.write(tmp_path / "w.pt.trace.json")
    mine = tmp_path / "mine.toml"
    mine.write_text(
        "name = 'ours'\nextends = 'sm121-gpt-oss-120b'\n"
        "[configurations.auto]\ndescription = 'no backend'\n"
        "[configurations.unknown]\ndescription = 'x'\narguments = ['--moe-backend', 'deep_gemm']\n"
    )
    for name in ("auto", "unknown"):
        words = (trace, "--profile", mine, "--configuration", name)
        status, out, err = profiled(*words)
        assert status == STATUS_NOT_RUN, (out, err)
        assert f"**NOT_RUN**: MoE: expected a backend in configuration {name}" in out
        assert profiled(*words, "--backend", "CUTLASS")[0] == 0
    assert profiled(trace, "--profile", mine)[0] == 0, "nobody requested a backend"
    mine.write_text(mine.read_text() + "[model]\ndense = true\n")
    _, out, _ = profiled(trace, "--profile", mine, "--configuration", "auto")
    assert "NOT_RUN" not in out, "a dense model has no experts"


@pytest.mark.parametrize(
    ("target", "words", "logged", "experts", "expected"),
    [
        ("cutlass", [], "FLASHINFER_CUTLASS_MXFP4_MXFP8", "CUTLASS", 0),
        ("cutlass", [], "MARLIN", "MARLIN", 1),
        ("stock", [], "MARLIN", "MARLIN", 0),
        ("stock", [], "MARLIN", "CUTLASS", 1),
        ("stock", ["--engine-arg=--moe-backend", "--engine-arg=cutlass"], None, "CUTLASS", 0),
        ("stock", ["--engine-arg=--moe-backend=flashinfer_cutlass"], "MARLIN", "MARLIN", 1),
        ("cutlass", ["--engine-arg=--moe-backend=marlin"], "MARLIN", "MARLIN", 0),
        ("auto", [], None, "CUTLASS", STATUS_NOT_RUN),
        ("auto", [], "EMULATION", "CUTLASS", STATUS_NOT_RUN),
        ("auto", [], "MARLIN", "MARLIN", 0),
        ("auto", [], "MARLIN", "CUTLASS", 1),
        ("auto", ["--engine-arg=--moe-backend=marlin"], "CUTLASS", "CUTLASS", 1),
        ("auto", ["--engine-env=VLLM_MXFP4_USE_MARLIN=1"], "MARLIN", "MARLIN", 0),
        ("auto", ["--engine-env=VLLM_MXFP4_USE_MARLIN=1"], "TRITON", "CUTLASS", STATUS_NOT_RUN),
    ],
)
def test_the_backend_requested_at_a_start_is_judged(
    target, words, logged, experts, expected, profiled, start_with, tmp_path
):
    trace = decode_traces.write(tmp_path / "w.pt.trace.json", experts=experts)
    mine = tmp_path / "mine.toml"
    mine.write_text(
        "name = 'ours'\nextends = 'sm121-gpt-oss-120b'\n"
        "[configurations.auto]\ndescription = 'no backend'\n"
    )

    start_with(trace, moe=logged)
    status, out, err = profiled(target, "--profile", mine, *words)
    assert status == expected, (out, err)
    assert ("**NOT_RUN**: MoE: expected a backend" in out) == (expected == STATUS_NOT_RUN)


@pytest.mark.parametrize(
    ("logged", "requested", "status"),
    [("HND", "HND", 0), ("LBHNC", "HND", 0), ("NHD", "HND", 1), (None, "HND", 1), ("NHD", None, 0)],
)
def test_the_layout_of_a_running_server_is_that_of_its_log(
    logged, requested, status, profiled, fault_server, tmp_path, monkeypatch
):
    server = fault_server()
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    trace = decode_traces.write(tmp_path / "w.pt.trace.json.gz")
    taken = DecodeTrace(trace, StreamTime(1.02 * 36 * LAYER_US / 1e6))
    monkeypatch.setattr(decode_command, "profile_decode", lambda *_, **__: taken)
    monkeypatch.setattr(attached_log, "doubt", lambda *_: None)
    log = tmp_path / "server.log"
    line = f"INFO 11-30 12:00:00 [utils.py:62] Using {logged} KV cache layout.\n"
    log.write_text(VLLM_START + (line if logged else ""))
    words = [server.base_url, "--traces", tmp_path, "--server-log", log]
    words += ["--layout", requested] if requested else []
    got, out, err = profiled(*words)
    assert got == status, (out, err)
    assert (f"| KV layout | {logged} |" in out) == (logged is not None)
    fault = f"KV layout: expected HND, the log shows {logged or 'none'}"
    assert (fault in out) == (status == 1)


def test_the_log_of_another_server_shows_no_layout(profiled, fault_server, tmp_path, monkeypatch):
    server = fault_server()
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    log = tmp_path / "server.log"
    words = [server.base_url, "--traces", tmp_path, "--layout", "HND", "--server-log", log]
    status, _, err = profiled(*words)
    assert status == STATUS_USAGE and f"--server-log {log}: expected the log file of the" in err
    log.write_text("a line\n")
    status, _, err = profiled(*words)
    assert status == STATUS_USAGE and f"{log}: expected the log of a server, from its start" in err
    log.write_text(VLLM_START)
    status, _, err = profiled(*words)
    assert status == STATUS_USAGE and "got the log of another start: expected a log of vllm" in err
    unproven = attached_log.Doubt("the log does not grow", is_of_another=False)
    monkeypatch.setattr(attached_log, "doubt", lambda *_: unproven)
    status, _, err = profiled(*words)
    assert status == STATUS_NOT_RUN and "NOT_RUN: the log does not grow" in err, err


@pytest.mark.parametrize(
    ("requested", "shown", "expected"),
    [
        ("HND", "HND", True),
        ("HND", "LBHNC", True),
        ("NHD", "LBNHC", True),
        ("HND", "NHD", False),
        ("HND", "LBNHC", False),
        ("HND", None, False),
    ],
)
def test_a_layout_is_known_by_the_names_of_all_releases(requested, shown, expected):
    """A cache layout has one name, whatever name a release logs: vLLM 0.29 to 0.33 log HND as
    LBHNC."""
    assert decode_subject.is_layout(requested, shown, "vllm") is expected
