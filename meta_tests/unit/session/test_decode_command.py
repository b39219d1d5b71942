"""`sm121 profile`: its output, its refusals, and its exit status."""

import json

import httpx
import pytest

from meta_tests.fakes import decode_traces
from meta_tests.fakes.decode_traces import LAYER_US
from meta_tests.folders import DATA, ROOT
from meta_tests.unit.evidence.kernel_tables import TABLES_OF_GB10
from sm121.core import architecture
from sm121.core import profile as profiles
from sm121.evidence import decode_time, profiler
from sm121.evidence.decode_time import StreamTime
from sm121.evidence.profiler import DecodeTrace
from sm121.session import decode_command, decode_limits

STATUS_USAGE = 4
STATUS_NOT_RUN = 5
NO_ROUTE = httpx.Client(
    base_url="http://127.0.0.1", transport=httpx.MockTransport(lambda _: httpx.Response(404))
)
DATA_FILE = TABLES_OF_GB10 / "fused_0804_kernels.csv"
#: These numbers are for gpt-oss-120b with all weights in MXFP4, at the 235 GB/s of a healthy GB10.
TOKEN_LIMIT = "limit: 20 ms (gate tpot_p50 of profile sm121-gpt-oss-120b) |"
STEP_BOUND = "the memory allows 11."
MOE_BOUND = "limit for batch 1: 1 ms; the memory allows 0.225"


def test_a_trace_of_a_gpu_has_the_table_of_the_plan(profiled, tmp_path):
    trace = decode_traces.write(tmp_path / "w.pt.trace.json.gz")
    words = ("--backend", "CUTLASS", "--profile", "sm121-gpt-oss-120b")
    status, out, _ = profiled(trace, *words)
    assert status == 0, out
    for words in (
        MOE_BOUND,
        TOKEN_LIMIT,
        STEP_BOUND,
        "openai/gpt-oss-120b with all weights in MXFP4",
        "| MoE FC1 | 38.9% | 4.320 | 120.0 | 36.0 |",
        "| MoE FC2 | 19.4% | 2.160 | 60.0 | 36.0 |",
        "| routing |",
        "| norms |",
        "| host: no kernel runs | 0.2% |",
        "| host: no kernel runs | at most 0.2% |",
        "| a step, with the cost of the profiler (ms) | 11.11 |",
        "| MoE GEMM of a layer, batch 1 (ms) | 0.180 | limit for batch 1: 1 ms; the memory",
        "| kernels of a token (ms) | 11.09 | limit: 20 ms",
        "1.0 launches by the host and 468.0 kernels a step",
        "- MoE takes 63% of the step (more than 50%): work on the MoE kernel (CUTLASS, tiles)",
    ):
        assert words in out, words
    assert (tmp_path / "report" / "decode.md").read_text() == out
    record = json.loads((tmp_path / "report" / "decode.json").read_text())
    assert record["faults"] == record["not_run"] == [] and record["decode"]["steps"] == 8


@pytest.mark.parametrize(
    ("configuration", "prompt", "token_ms", "source"),
    [
        ("stock", 2048, 33.1, "gate tpot_p50 of configuration stock"),
        ("stock", None, 33.1, "gate tpot_p50 of configuration stock"),
        ("eagle3-short", 2048, 22.9, "gate tpot_p50 of configuration eagle3-short"),
        ("mxfp4", 2048, 20.0, "gate tpot_p50 of configuration mxfp4"),
        (None, 2048, 20.0, "gate tpot_p50 of profile sm121-gpt-oss-120b"),
        (None, 4096, 21.3, "gate tg32@d4096 of profile sm121-gpt-oss-120b, as a time"),
        ("stock", 32768, 41.7, "gate tg32@d32768 of configuration stock, as a time"),
        ("stock", 65536, None, "configuration stock: expected a gate on a rate after a prompt of "
         "65536 tokens, got none. Give a shorter --prompt"),
    ],
)  # fmt: skip
def test_the_limit_of_a_token_is_that_of_the_configuration(configuration, prompt, token_ms, source):
    chosen = profiles.load("sm121-gpt-oss-120b").judging(configuration)
    limits = decode_limits.limits_of(chosen, prompt)
    assert limits.token_ms == (token_ms and pytest.approx(token_ms, abs=0.05))
    assert (limits.token_source, limits.moe_ms) == (source, 1.0)


def test_a_profile_without_gates_has_the_limits_of_the_guide():
    limits = decode_limits.limits_of(profiles.load("cpu-tiny-gpt-oss"), 2048)
    assert limits == decode_time.Limits(20.0, "guide", 1.0)


@pytest.mark.parametrize(
    ("reads", "bound"),
    [
        pytest.param("reads = { weights = 23.5e6, source = 'headers' }", "allows 0.1", id="known"),
        pytest.param("", "No roofline: the model's configuration lacks", id="not known"),
    ],
)
def test_a_dense_model_has_the_bound_of_its_bytes(profiled, tmp_path, reads, bound):
    trace = decode_traces.write(tmp_path / "w.pt.trace.json")
    mine = tmp_path / "mine.toml"
    model = f"id = '{DATA / 'small-models' / 'qwen3'}'\nserved_name = 'x'\nsource = 'here'"
    mine.write_text(f"name = 'ours'\nextends = 'sm121-gpt-oss-120b'\n[model]\n{model}\n{reads}")
    status, out, errors = profiled(trace, "--profile", mine)
    assert status == 0 and bound in out, (out, errors)


def test_marlin_where_cutlass_was_asked_for_fails(profiled, tmp_path):
    trace = decode_traces.write(tmp_path / "w.pt.trace.json", experts="MARLIN")
    status, out, _ = profiled(trace, "--backend", "CUTLASS")
    assert status == 1 and "**Fault**: MoE: expected kernels of CUTLASS, got" in out
    assert profiled(trace, "--backend", "MARLIN")[0] == 0


def test_a_trace_of_a_cpu_says_that_kernels_are_null(profiled, tmp_path):
    trace = tmp_path / "w.pt.trace.json"
    trace.write_text(json.dumps({"traceEvents": [decode_traces.event("a", "cpu_op", 0.0, 5.0)]}))
    status, out, _ = profiled(trace, "--json")
    record = json.loads(out)
    assert status == STATUS_NOT_RUN
    assert record["decode"] is None and record["kernels"]["kind"] == "cpu"
    _, out, _ = profiled(trace)
    assert "has operators and no kernels, so that the table of kernels" in out
    assert "**NOT_RUN**: kernels: expected a trace of a GPU" in out


def test_limits_that_cannot_be_judged_are_not_run(profiled):
    status, out, _ = profiled(DATA_FILE)
    assert status == STATUS_NOT_RUN
    assert "**NOT_RUN**: limits of a token, the experts and the host: expected a profile" in out
    status, out, _ = profiled(DATA_FILE, "--backend", "MARLIN")
    assert status == 1 and "**Fault**" in out and "**NOT_RUN**" in out


def test_a_running_server_without_its_route_is_not_run(
    profiled, fault_server, tmp_path, monkeypatch
):
    server = fault_server()
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    status, _, err = profiled(server.base_url)
    assert status == STATUS_NOT_RUN and err.startswith("NOT_RUN: --traces: expected the folder")
    assert '--profiler-config \'{"profiler": "torch", "torch_profiler_dir": "DIR", ' in err
    monkeypatch.setattr(
        decode_command,
        "profile_decode",
        lambda *_, **__: profiler._post(NO_ROUTE, "/start_profile"),
    )
    status, _, err = profiled(server.base_url, "--traces", tmp_path)
    assert status == STATUS_NOT_RUN and err.startswith("NOT_RUN: the server has no route of the")
    assert "start vLLM (0.13 or later) with" in err and err.count("0.13") == 1
    status, _, err = profiled(server.base_url, "--traces", tmp_path / "none")
    assert status == STATUS_USAGE and "expected a folder on this machine" in err


def test_a_running_server_is_profiled(profiled, fault_server, tmp_path, monkeypatch):
    server = fault_server()
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    trace = decode_traces.write(tmp_path / "w.pt.trace.json.gz")
    asked: dict = {}
    taken = DecodeTrace(trace, StreamTime(2 * 36 * LAYER_US / 1e6))
    monkeypatch.setattr(
        decode_command, "profile_decode", lambda *_, **asked_for: asked.update(asked_for) or taken
    )
    words = ("--prompt", "512", "--tokens", "16", "--traces", tmp_path)
    status, out, err = profiled(server.base_url, *words)
    assert status == 1, err
    assert (len(asked["prompt"]), asked["steps"], asked["timed"]) == (512, 16, 16)
    assert "**Fault**: decode: expected at most 20 ms a token (guide), got 22.2 ms" in out
    assert "- the host takes 50% of the step (more than 25%): see that CUDA graphs" in out
    assert "| a token (ms) | 22.18 | limit: 20 ms (guide) |" in out
    assert "| a step (ms) | 22.18 | 11.11 ms with the profiler |" in out
    assert f"# Decode of {server.base_url}" in out
    assert "No roofline: profile cpu-tiny-gpt-oss has no bandwidth of a healthy machine" in out
    _, out, _ = profiled(server.base_url, *words, "--profile", "sm121-gpt-oss-120b")
    assert f"| {TOKEN_LIMIT}" in out and f"| {STEP_BOUND}" in out and f"| {MOE_BOUND}" in out
    drafter = StreamTime(36 * LAYER_US / 1e6 / 2.5, 2.5)
    decode_traces.write(trace, step_tokens=4)
    monkeypatch.setattr(
        decode_command, "profile_decode", lambda *_, **__: DecodeTrace(trace, drafter)
    )
    status, out, _ = profiled(server.base_url, *words)
    assert status == 0, out
    assert "Speculative decoding: a step computes 4 tokens and generates 2.50 of them." in out
    assert "| a token (ms) | 4.44 |" in out and "| a step (ms) | 11.09 |" in out
    assert "| MoE GEMM of a layer, batch 4 (ms) |" in out
    refused = DecodeTrace(trace, StreamTime(36 * LAYER_US / 1e6, 1.0))
    monkeypatch.setattr(decode_command, "profile_decode", lambda *_, **__: refused)
    _, out, _ = profiled(server.base_url, *words)
    assert "a step computes 4 tokens and generates 1.00 of them" in out, "no draft is accepted"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "nothing: expected the URL of a server, a file of a profiler, or a config"),
        (["float32", "--engine-env", "A"], "--engine-env A: expected KEY=VALUE"),
        (["float32", "--tokens", "0"], "--prompt, --tokens: expected at least 1"),
        (
            ["http://127.0.0.1:9", "--layout", "HND"],
            "--layout: expected --server-log FILE with the URL of a server, whose log shows the "
            "layout. To request a layout, start the server with VLLM_KV_CACHE_LAYOUT=HND",
        ),
        (["float32", "--server-log", "x"], "--server-log: expected the URL of a server with it"),
        ([DATA_FILE, "--server-log", "x"], "--server-log: expected the URL of a server with it"),
        (["http://127.0.0.1:9", "--engine-arg", "x"], "--engine-arg: expected a configuration"),
        ([__file__, "--layout", "HND"], "got a file; sm121 path LOG shows the layout"),
        ([__file__, "--engine-python", "x"], "--engine-python: expected a configuration"),
        ([__file__, "--traces", "x"], "--traces: expected the URL of a server with it"),
        ([DATA_FILE, "--prompt", "9"], "--prompt: expected a URL or a configuration, got a file"),
        ([DATA_FILE, "--prompt", "9", "--tokens", "9"], "--prompt, --tokens: expected a URL or a"),
        (["float32", "--traces", "x"], "--traces: expected the URL of a server with it"),
        (["float32", "--engine-python", "/no"], "--engine-python /no: expected a Python interp"),
        (["float32", "--configuration", "x"], "--configuration: expected a URL or a file with it"),
        ([DATA_FILE, "--configuration", "x"], "--configuration x: expected one of profile cpu"),
    ],
    ids=[
        "target",
        "variable",
        "tokens",
        "layout of a URL without a log",
        "log of a configuration",
        "log of a file",
        "argument of a URL",
        "layout of a file",
        "interpreter of a file",
        "traces of a file",
        "prompt of a file",
        "prompt and tokens of a file",
        "traces of a configuration",
        "interpreter",
        "configuration twice",
        "unknown configuration",
    ],
)
def test_a_wrong_request_is_refused(profiled, words, message):
    status, _, err = profiled(*words, "--profile", "cpu-tiny-gpt-oss")
    assert status == STATUS_USAGE and message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["default", "--profile", "cpu-tiny-gpt-oss-llama-cpp"],
            "NOT_RUN: llama-cpp takes no --profiler-config",
        ),
        (
            ["cutlass", "--profile", "sm121-gpt-oss-120b"],
            "NOT_RUN: cutlass: expected a machine with sm121, this one is cpu. Run the command "
            "there, or give a file of a profiler that was written there, with --configuration "
            "cutlass",
        ),
        (
            ["http://127.0.0.1:9", "--traces", "."],
            "URL http://127.0.0.1:9: expected an OpenAI-compatible server",
        ),
        (["http://127.0.0.1:x"], "URL http://127.0.0.1:x: expected http://HOST:PORT"),
    ],
    ids=["engine without a profiler", "another machine", "no server", "no address"],
)
def test_a_message_names_only_options_of_the_command(words, message, profiled, monkeypatch):
    """A message names only options of `sm121 profile`.

    Before, messages named --base-url, --arch and --engine-binary, which the command does not have.
    """
    monkeypatch.setattr(architecture, "detect", lambda: architecture.Detection("cpu", ""))
    status, _, err = profiled(*words)
    assert status == (STATUS_NOT_RUN if message.startswith("NOT_RUN") else STATUS_USAGE), err
    assert message in err
    for foreign in ("--base-url", "--arch ", "--engine-binary", "--model"):
        assert foreign not in err, foreign


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--prompt", "5000"],
            "--prompt 5000 --tokens 64: expected a context of at least 5224 tokens, got 4608. "
            "Give a shorter --prompt",
        ),
        (
            ["--prompt", "500", "--engine-arg=--max-model-len=512"],
            "expected a context of at least 724 tokens, got 512",
        ),
        (["--tokens", "600"], "--tokens 600: expected at most 464"),
    ],
    ids=["prompt", "context of an argument", "tokens"],
)
def test_lengths_beyond_the_context_are_refused_before_a_start(
    words, message, profiled, monkeypatch
):
    """Lengths beyond the context are refused before a server is started.

    Before, they were refused only after the start."""

    def start(_settings):
        raise AssertionError("expected no start")

    monkeypatch.setattr(architecture, "detect", lambda: architecture.Detection("cpu", ""))
    monkeypatch.setattr(decode_command, "open_session", start)
    status, _, err = profiled("float32", "--profile", "cpu-tiny-gpt-oss", *words)
    assert status == STATUS_USAGE and message in err


@pytest.mark.slow("a start of vLLM; what follows from a trace is tested above")
@pytest.mark.timeout(900)
def test_a_configuration_is_started_profiled_and_stopped(profiled, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    words = ("--profile", "cpu-tiny-gpt-oss", "--prompt", "512", "--tokens", "16")
    status, out, err = profiled("float32", *words)
    assert status == STATUS_NOT_RUN, err
    assert "is a trace of a CPU: it has operators and no kernels" in out
    assert "_C::cpu_fused_moe" in out
    record = json.loads((tmp_path / "report" / "decode.json").read_text())
    assert record["kernels"]["decoding"] and record["kernels"]["steps"] >= 16
