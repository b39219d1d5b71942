"""`sm121 init-profile`: the profile and the exam for a server of another model than gpt-oss."""

import contextlib
import dataclasses
import re
import shutil
from pathlib import Path

import psutil
import pytest

from meta_tests.fakes.another_model import CHECKPOINT, CONTEXT, END, MODEL, PROMPT, another_model
from meta_tests.fakes.fault_engine import FaultEngine
from sm121 import cli
from sm121.answers import exam
from sm121.answers.agreement import TokenAgreement
from sm121.answers.golden_comparison import GoldenComparison
from sm121.checkpoint import inspection
from sm121.clock.measuring import Number, Result
from sm121.core import profile
from sm121.engines import capabilities, registry
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.log_start import LogStart
from sm121.machine import roofline
from sm121.measure.measurement import Measurement
from sm121.measure.statistics import Estimate
from sm121.session import fingerprinting, profile_draft, served_facts
from sm121.session.known_answers import KnownAnswers
from sm121.session.profile_draft import Draft

DATE = "2026-11-30"
ASKED = (
    "{'model': 'tiny', 'host': '127.0.0.1', 'port': 8431, 'api_key': ['secret'], 'dtype': "
    "'float32', 'max_model_len': 4096, 'enforce_eager': True, 'enable_prefix_caching': False, "
    "'tool_call_parser': 'hermes', 'reasoning_parser': 'qwen3'}"
)


@pytest.fixture
def written(tmp_path, capsys):
    """Call the command for a server. Return the text of the profile and the loaded profile."""

    def call(url: str, *words: str):
        output = tmp_path / "mine.toml"
        fixed = ("--arch", "cpu", "--no-rates", "--output", str(output))
        status = cli.main(["init-profile", "--base-url", url, *fixed, *words])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return output.read_text(), profile.load(str(output))

    return call


@pytest.fixture
def draft(monkeypatch):
    """Create a draft without a server, with rates and with a log's kernel path."""
    with another_model() as url:
        request = served_facts_of(url)
    known = KnownAnswers((), (), (), (), asked=0, reasons=False, longest=10)

    def make(arch: str = "sm121", path: KernelPath | None = None, **numbers: float) -> Draft:
        facts = request if path is None else dataclasses.replace(request, path=path)
        measured = Result(MODEL, DATE, 512, {name: of(name, n) for name, n in numbers.items()})
        return Draft("tiny", arch, DATE, facts, known, measured)

    return make


def served_facts_of(url: str) -> served_facts.ServedFacts:
    from sm121.engines import attached
    from sm121.engines.detection import detect

    server = attached.attach(url, api_key=None, served_name=None, default_name="", log=None)
    return served_facts.read_facts(server, detect(server))


def of(name: str, value: float) -> Number:
    metric = name[:2] if name[:2] in ("pp", "tg") else "ttft"
    unit = "ms" if metric == "ttft" else "tok/s"
    samples = [value] * 3
    measurement = Measurement(name=name, unit=unit, samples=samples, higher_is_better=unit != "ms")
    return Number(measurement, Estimate(value, value, value, 0.95, rounds=3), 0, metric)


def test_the_profile_has_what_the_server_shows(written):
    with another_model() as url:
        text, mine = written(url)
    assert mine.model.served_name == MODEL and mine.model.id == str(CHECKPOINT)
    assert mine.model.reads.weights == round(inspection.inspect(str(CHECKPOINT)).read)
    form = mine.correctness.chat_format
    assert (form.prompt, form.end_token, form.reasoning) == (PROMPT, END, True)
    assert form.special == ("<|im_start|>", "<|im_end|>")
    assert mine.performance.depths == (0, 512) and f"context {CONTEXT}" in text
    assert mine.performance.measuring.vocabulary == 1017
    assert [call.tool for call in mine.correctness.tool_calls] == ["get_weather"]
    assert {"oracle", "harmony"} <= mine.correctness.cannot.keys()
    assert "tools" not in mine.correctness.cannot
    assert mine.correctness.cannot["oracle"] == "no oracle for this architecture"


def test_the_exam_has_what_was_right_in_three_rounds(written):
    with another_model() as url:
        _, mine = written(url)
    own = exam.load(mine.correctness.exam)
    assert [each.begins for each in own.completions] == [" Paris"]
    ids = [question.id for question in own.facts.questions]
    # The answer about Peru was wrong in the third round, so its question is missing. Two exams ask
    # about Norway.
    assert ids == ["capital-of-norway", "capital-of-spain", "capital-of-norway-2"]


def test_a_profile_and_its_exam_can_be_moved_together(written, tmp_path):
    """The profile of the other folder also has the same digest in a fingerprint."""
    with another_model() as url:
        before = written(url)[1]
    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("mine.toml", "mine.exam.jsonl"):
        (tmp_path / name).rename(folder / name)
    moved = profile.load(str(folder / "mine.toml"))
    file = folder / "mine.exam.jsonl"
    assert Path(moved.correctness.exam) == file
    digest = fingerprinting.profile_digest(moved)
    (tmp_path / "mine.exam.jsonl").write_bytes(file.read_bytes())
    assert fingerprinting.profile_digest(before) == digest
    file.write_text(file.read_text("utf-8") + '{"prompt": "1, 2,", "begins": " 3"}\n', "utf-8")
    assert fingerprinting.profile_digest(moved) != digest, "another exam"


def test_the_golden_bound_is_the_measured_one(draft, tmp_path):
    """The profile's golden bound is the measured one; other tolerances are those of the shipped
    profile."""
    errors = (0.04, 0.02)
    agreed = TokenAgreement(errors, (True, True), (1e-4, 1e-4), forks=0, disagreement=None)
    made = dataclasses.replace(draft(), spread=GoldenComparison({"one": agreed}, ()))
    file = tmp_path / "mine.toml"
    file.write_text(made.text("canary"))
    mine = profile.load(str(file)).correctness
    shipped = profile.load("sm121-gpt-oss-120b").correctness
    assert mine.golden["auto"].max_abs == 0.1 and mine.golden["auto"].mean_divergence == 6.3e-4
    assert DATE in mine.golden["auto"].source
    assert mine.agreement["auto"] == shipped.agreement["auto"]
    assert draft().tolerances("golden")["auto"]["max_abs"] == shipped.golden["auto"].max_abs


@pytest.mark.parametrize(
    ("unknown", "how"),
    [("the arguments of the start", "--server-log FILE"), ("attention", "--server-log FILE")],
)
def test_unknown_values_become_comments_with_instructions(written, unknown, how):
    with another_model() as url:
        text, mine = written(url)
    assert re.search(rf"^# UNKNOWN: {unknown}[^#]*{how}", text, re.M), text
    assert mine.kernel_path.attention is None


def test_a_server_without_a_parser_of_tools_cannot_call_them(written):
    with another_model(calls_tools=False, thinks=False) as url:
        _, mine = written(url)
    assert "needs --tool-call-parser" in mine.correctness.cannot["tools"]
    assert not mine.correctness.tool_calls and not mine.correctness.chat_format.reasoning


@pytest.fixture
def base_model(tmp_path):
    """A folder with the checkpoint of a model that has no chat template."""
    folder = tmp_path / "base"
    shutil.copytree(CHECKPOINT, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def test_a_base_model_cannot_chat(written, base_model):
    with another_model(chats=False, root=str(base_model)) as url:
        text, mine = written(url)
    assert "no chat template" in mine.correctness.cannot["chats"]
    assert {"tools", "harmony"} <= mine.correctness.cannot.keys() and not mine.correctness.chats
    assert [each.begins for each in exam.load(mine.correctness.exam).completions] == [" Paris"]
    assert "UNKNOWN: the model answered neither chat" not in text
    assert re.search(r"^# UNKNOWN: facts that the model knows: .*no chat template", text, re.M)
    assert mine.correctness.cannot["tools"].endswith(" ...")
    assert mine.correctness.chat_format.end_token == END


def test_a_model_without_its_checkpoint_on_this_machine_must_chat(written):
    """A server that lost the chat template of its model refuses chats like a base model's server,
    so the profile requires chats, and a comment contains the line for a base model."""
    with another_model(chats=False, root="nobody/no-such-base-model") as url:
        text, mine = written(url)
    assert "chats" not in mine.correctness.cannot and mine.correctness.chats
    line = (
        r"^# UNKNOWN: whether the model has a chat template\..*\n# .*default chat template is no "
        r'longer allowed.*\n# .*: chats = "the model has no chat template"$'
    )
    assert re.search(line, text, re.M), text


@pytest.mark.parametrize("content", [None, "[", "[]"], ids=["missing", "not-json", "a-list"])
def test_a_checkpoint_without_a_readable_tokenizer_does_not_show_a_template(
    written, base_model, content
):
    """A folder with GGUF files has no tokenizer_config.json, and its model may have a template."""
    file = base_model / "tokenizer_config.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with another_model(chats=False, root=str(base_model)) as url:
        text, mine = written(url)
    assert "chats" not in mine.correctness.cannot and mine.correctness.chats
    line = r"^# UNKNOWN: whether .* tokenizer_config\.json, .*\n# .*no longer"
    assert re.search(line, text, re.M)


def test_the_command_prints_that_the_chats_of_a_base_model_must_be_edited(tmp_path, capsys):
    """The command prints that the chats of a base model must be edited.

    Otherwise, the first run would fail, although the server is healthy."""
    words = ["init-profile", "--arch", "cpu", "--no-rates", "--output"]
    with another_model(chats=False, root="nobody/no-such-base-model") as url:
        cli.main([*words, str(tmp_path / "mine.toml"), "--base-url", url])
    printed = " ".join(capsys.readouterr().out.split())
    assert "chats: the server refuses them" in printed and "mine.toml" in printed
    assert "edit correctness.chats" in printed
    with another_model() as url:
        cli.main([*words, str(tmp_path / "chats.toml"), "--base-url", url])
    assert "chats: the server refuses" not in capsys.readouterr().out


def test_a_model_with_a_chat_template_must_chat(written):
    """If the chats of such a model fail, the profile still requires chats, and the first run is
    red."""
    with another_model(chats=False) as url:
        text, mine = written(url)
    assert "chats" not in mine.correctness.cannot and mine.correctness.chats
    assert "UNKNOWN: the model answered neither chat" in text


def test_a_profile_of_llama_server_is_based_on_llama_servers(draft):
    """The profile for llama-server has the limits of the suite's llama.cpp profile.

    The limits of vLLM's float32 and bfloat16 are too small for llama.cpp's kernels."""
    made = draft("cpu")
    can = capabilities.capabilities_of("llama-cpp", "b11434")
    facts = dataclasses.replace(made.facts, can=can)
    text = dataclasses.replace(made, facts=facts).text("canary")
    shipped = profile.load("cpu-tiny-gpt-oss-llama-cpp")
    assert f"From here on as {shipped.name}" in text and "speaking_worker" not in text
    assert f"mean_abs = {shipped.correctness.golden['auto'].mean_abs}" in text


def test_tools_whose_results_are_not_read_are_left_out_with_that_reason(written):
    """Tools whose results the model does not use are left out of the profile, with this reason.

    vLLM's parser of a thinking model takes an answer without tags as reasoning."""
    with another_model(reads_results=False) as url:
        _, mine = written(url)
    assert "lacks the call's result" in mine.correctness.cannot["tools"]


def test_the_path_of_a_folder_is_the_served_name(written):
    """If vLLM serves a folder, `sm121 init-profile` takes its path for the name of the model.

    vLLM uses this path as the name, unless it gets another name."""
    with another_model(name="/models/Qwen3-8B:q4") as url:
        _, mine = written(url)
    assert mine.model.served_name == "/models/Qwen3-8B:q4" and mine.name == "cpu-qwen3-8b-q4"


def test_a_model_that_knows_nothing_is_refused(tmp_path, capsys):
    words = ("--arch", "cpu", "--no-rates", "--output", str(tmp_path / "mine.toml"))
    with another_model(knows=False) as url:
        assert cli.main(["init-profile", "--base-url", url, *words]) == 4
    assert "expected the right continuation" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_overwritten(tmp_path, capsys):
    output = tmp_path / "mine.toml"
    output.write_text("ours")
    status = cli.main(["init-profile", "--base-url", "http://127.0.0.1:9", "--output", str(output)])
    assert status == 4 and "exists" in capsys.readouterr().err
    assert output.read_text() == "ours"


@pytest.mark.parametrize("name", ["nodir/mine.toml", "file/mine.toml"])
def test_a_file_that_cannot_be_written_is_refused_before_the_first_request(name, tmp_path, capsys):
    (tmp_path / "file").touch()
    output = str(tmp_path / name)
    status = cli.main(["init-profile", "--base-url", "http://127.0.0.1:9", "--output", output])
    assert status == 4 and "expected a file that can be written" in capsys.readouterr().err


def test_a_model_without_a_checkpoint_here_is_named_with_an_option_that_exists(draft):
    made = draft()
    facts = dataclasses.replace(made.facts, checkpoint=None, why_no_checkpoint="x/y is not here")
    text = dataclasses.replace(made, facts=facts).text("canary")
    assert "sm121 init-profile ... --model DIR" in text and "--checkpoint" not in text


def test_a_server_that_refuses_to_stream_has_no_rates(tmp_path, capsys):
    output = tmp_path / "mine.toml"
    with another_model(streams=False) as url:
        cli.main(["init-profile", "--base-url", url, "--arch", "cpu", "--output", str(output)])
    text = output.read_text()
    assert re.search(r"^# UNKNOWN: rates: .*500", text, re.M), text
    assert "inf ms" not in text and "# no gate" not in text
    assert re.search(r"rates: not measured: .*500", capsys.readouterr().out)


def test_a_golden_bound_that_was_not_measured_is_unknown(draft):
    unmeasured = r"^# UNKNOWN: the golden limits[^#]*\n#[^\n]* sm121 init-profile"
    made = draft()
    assert re.search(unmeasured, made.text("canary"), re.M)
    agreed = TokenAgreement((0.04,), (True,), (1e-4,), forks=0, disagreement=None)
    measured = dataclasses.replace(made, spread=GoldenComparison({"one": agreed}, ()))
    assert not re.search(unmeasured, measured.text("canary"), re.M)
    same = dataclasses.replace(agreed, errors=(0.0,), divergences=(0.0,))
    equal = dataclasses.replace(made, spread=GoldenComparison({"one": same}, ()))
    assert re.search(unmeasured, equal.text("canary"), re.M)


def test_a_path_that_the_log_does_not_show_says_how_to_find_it(draft, tmp_path):
    log = tmp_path / "server.log"
    made = draft("sm121", KernelPath(log=LogStart(asked=ASKED)))
    server = dataclasses.replace(made.facts.server, log=log)
    facts = dataclasses.replace(made.facts, server=server)
    text = dataclasses.replace(made, facts=facts).text("canary")
    assert re.search(r"^# UNKNOWN: attention: no line[^\n]*\n#   [^\n]*attention = \[", text, re.M)


@pytest.mark.parametrize(
    ("arch", "engine", "advice"),
    [
        pytest.param("cpu", "vllm", "vLLM on the CPU does not log it", id="vllm-on-a-cpu"),
        pytest.param("sm121", "vllm", "Give the whole log", id="vllm-on-a-gpu"),
        pytest.param("cpu", "llama-cpp", "Give the whole log", id="llama-server"),
    ],
)
def test_the_whole_log_is_advised_only_if_it_can_help(draft, tmp_path, arch, engine, advice):
    made = draft(arch, KernelPath(log=LogStart(asked=ASKED)))
    server = dataclasses.replace(made.facts.server, log=tmp_path / "server.log")
    can = capabilities.capabilities_of(engine, "1.0")
    facts = dataclasses.replace(made.facts, server=server, can=can)
    text = Draft("tiny", arch, DATE, facts, made.known, None).text("canary")
    (line,) = re.findall(r"^# UNKNOWN: attention: .*", text, re.M)
    assert advice in line, line
    (line,) = re.findall(r"^# UNKNOWN: dtype: .*", text, re.M)
    assert "Give the whole log" in line, line


def test_a_log_that_was_given_and_not_read_is_not_asked_for_again(draft):
    made = draft()
    why = "--server-log server.log is not proven to be this server's: it got no line"
    server = dataclasses.replace(made.facts.server, why_no_log=why)
    facts = dataclasses.replace(made.facts, server=server)
    text = Draft("tiny", "cpu", DATE, facts, made.known, None).text("canary")
    (line,) = re.findall(r"^# UNKNOWN: attention: .*", text, re.M)
    assert why in line and "give the log" not in line, line


def test_a_path_without_a_log_does_not_name_a_log_as_its_source(draft, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(draft().text("canary"))
    assert "no log" in profile.load(str(file)).kernel_path.source
    file.write_text(draft("cpu", KernelPath(attention="CPU_ATTN")).text("canary"))
    assert "the log of the server" in profile.load(str(file)).kernel_path.source


def test_texts_of_the_server_stay_in_their_comments(draft, tmp_path):
    """Texts of the server, such as its version, appear only in comments of the profile.

    A line break in such a text would begin a line of TOML."""
    made = draft(path=KernelPath(fallbacks=["a\nname = 1"]))
    server = dataclasses.replace(made.facts.server, version='1"\nname = "x')
    facts = dataclasses.replace(
        made.facts, server=server, checkpoint=None, why_no_checkpoint="a\nname = 2"
    )
    hostile = dataclasses.replace(made, facts=facts, measured=None, no_rates="b\nname = 3")
    text = hostile.text("canary")
    assert not re.findall('^name = (?:[123]|"x)', text, re.M)
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert profile.load(str(file)).name == "tiny"


def test_arguments_about_tokens_stay_and_secrets_do_not(draft):
    stay = {
        "max_num_batched_tokens": 16384,
        "tokenizer": "/models/x",
        "tokenizer_mode": "slow",
        "long_prefill_token_threshold": 512,
        "num_speculative_tokens": 2,
    }
    secret = {"hf_token": "s3", "api_key": ["s1"], "ssl_keyfile": "s2", "token": "s4", "uds": "s5"}
    made = draft("cpu", KernelPath(log=LogStart(asked=repr({**stay, **secret}))))
    assert made.engine_arguments[::2] == [f"--{name.replace('_', '-')}" for name in stay]


def test_gates_are_as_measured_less_a_tenth(draft):
    made = draft(**{"tg32@d0": 100.0, "ttft_p50": 20.0})
    rate, time = made.gates
    assert (rate["minimum"], rate["source"]) == (90.0, f"10 % below the value measured on {DATE}")
    assert time["at_most"] == 22.0


def test_the_bound_of_a_gate_is_that_of_the_bytes_of_the_checkpoint(draft, tmp_path):
    """The upper bound of a gate follows from the bytes of the checkpoint if the model has no
    experts.

    The bound of gpt-oss needs the sizes of the experts."""
    mine = tmp_path / "mine.toml"
    mine.write_text(draft(**{"tg32@d0": 1e9}).text("exam.jsonl"))
    own = profile.load(str(mine))
    config = roofline.read_config(own.model.id)
    read = roofline.cost(own, own.under_test, 0, config)
    assert read.total == own.model.reads.weights
    (gate,) = own.performance.gates
    assert "at most" in roofline.out_of_reach(own, gate, read, config, 235.0)
    drafts = ("--speculative-config", "{}")
    assert roofline.cost(own, own.under_test, 0, config, drafts) is None


def test_gates_of_a_cpu_are_comments(draft, tmp_path):
    made = draft("cpu", **{"tg32@d0": 100.0})
    assert '#     { metric = "tg32@d0"' in made.text("canary")


def test_a_fallback_that_the_shipped_profile_accepts_is_accepted(draft, tmp_path):
    """`sm121 init-profile` accepts only a fallback that the shipped profile accepts.

    Any other fallback is a comment, and the reader of the profile decides on it."""
    path = KernelPath(fallbacks=["runner_v2_to_v1", "marlin_fallback"], log=LogStart(asked=ASKED))
    mine = tmp_path / "mine.toml"
    mine.write_text(draft("cpu", path).text("exam.jsonl"))
    assert list(profile.load(str(mine)).kernel_path.accepted_fallbacks) == ["runner_v2_to_v1"]
    assert "The log reports the fallback marlin_fallback" in mine.read_text()


def test_arguments_and_path_are_those_of_the_log(draft, tmp_path):
    line = "Using CPU_ATTN backend"
    path = KernelPath(attention="CPU_ATTN", evidence={"attention": line}, log=LogStart(asked=ASKED))
    made = draft("cpu", path)
    assert made.engine_arguments == [
        *("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"),
        *("--no-enable-prefix-caching", "--tool-call-parser", "hermes"),
        *("--reasoning-parser", "qwen3"),
    ]
    file = tmp_path / "mine.toml"
    file.write_text(made.text("canary"))
    mine = profile.load(str(file))
    assert mine.kernel_path.attention == ("CPU_ATTN",)
    assert f'attention = ["CPU_ATTN"] # {line}' in file.read_text()
    assert mine.kernel_path.not_shown == {"moe": "the checkpoint has no experts"}
    assert mine.model.dense


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a b": [1, True]}, '{ "a b" = [1, true] }'),
        ("<|im_end|>\n\x7f", '"<|im_end|>\\n\\u007f"'),
        ({}, "{}"),
    ],
)
def test_toml(value, expected):
    assert profile_draft.toml(value) == expected


def test_a_server_is_started_and_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(registry, "engine", lambda _name: FaultEngine())
    output = tmp_path / "mine.toml"
    words = ("--arch", "cpu", "--no-rates", "--output", str(output))
    engine = ("--model", "canary", "--engine-args", "--fault none")
    shared = fault_servers()  # other tests of this process share a server
    assert cli.main(["init-profile", *engine, *words]) == 0, capsys.readouterr().err
    mine = profile.load(str(output))
    assert mine.engine.arguments == ("--fault", "none") and mine.model.served_name == "canary"
    assert fault_servers() <= shared


def fault_servers() -> set[psutil.Process]:
    """Return the fault servers that this process or one of its children started."""
    return {each for each in psutil.Process().children(recursive=True) if is_fake(each)}


def is_fake(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("fault_server.py" in word for word in process.cmdline())
    return False
