"""`sm121 record`, and the requests and FlashInfer in a run's record."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from meta_tests.fakes.run_events import new_file, with_events
from sm121 import cli
from sm121.core import profile
from sm121.core.configuration import ServerConfiguration
from sm121.evidence import flashinfer_config
from sm121.evidence.flashinfer_config import FlashInferConfig
from sm121.evidence.host import read_container
from sm121.session import show_config, workload
from sm121.session.settings import Settings

CPU = profile.load("cpu-tiny-gpt-oss")
#: The names of sampling settings in the plan's workload and in the record.
EIGHT = {
    "temperature": 0.0,
    "top_p": 1.0,
    "seed": None,
    "tokenizer": "m",
    "batch_size": 1,
    "concurrency": [1, 2, 8],
    "warm_up_requests": 6,
    "prompt_tokens": 512,
    "generated_tokens": [32, 128],
}


@pytest.fixture
def flashinfer(tmp_path, monkeypatch):
    """Put a FlashInfer on PYTHONPATH whose command line runs some lines."""

    def make(*lines: str) -> dict[str, str]:
        package = tmp_path / "site" / "flashinfer"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text("\n".join(("import sys", *lines)))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
        return {"PYTHONPATH": str(tmp_path / "site")}

    return make


def test_the_workload_has_the_fields_of_the_plan():
    found = workload.describe_workload(Settings(), CPU, tokenizer="m")
    assert {name: found[name] for name in EIGHT} == EIGHT


def test_the_workload_has_the_sampling_of_each_sampled_metric():
    """The recorded workload has the sampling parameters of each metric that is measured with
    sampling.

    Before, it had temperature 0 for a metric at temperature 1.0."""
    plan = {"temperature": 1.0, "top_p": 1.0, "seed": None}
    found = workload.describe_workload(Settings(), CPU, tokenizer="m")["sampled"]
    assert found == {
        "tg32_sampled@d0": plan,
        "tg128_sampled@d0": plan,
        "tg_chat": dict.fromkeys(plan, "default of the server"),
    }


@pytest.mark.parametrize(
    ("arguments", "tokenizer"),
    [((), "/model"), (("--tokenizer", "/other"), "/other"), (("--tokenizer={model}",), "/model")],
    ids=["the model's", "its own", "named as the model's"],
)
def test_the_tokenizer_is_the_option_or_the_model(arguments, tokenizer):
    configuration = ServerConfiguration("a", "vllm", "python", "/model", "m", arguments)
    assert workload.tokenizer_of(configuration) == tokenizer


def test_the_configuration_of_flashinfer_is_read(flashinfer):
    variables = flashinfer("print('=== Version Info ===', *sys.argv[1:])", "print('HF_KEY secret')")
    config = flashinfer_config.run_show_config(sys.executable, {**variables, "MY_TOKEN": "secret"})
    assert config.text is not None and config.problem == ""
    assert "=== Version Info === show-config" in config.text and "secret" not in config.text


def test_a_flashinfer_that_fails_is_null_with_the_reason(flashinfer, monkeypatch):
    variables = flashinfer("raise SystemExit('no torch here')")
    config = flashinfer_config.run_show_config(sys.executable, variables)
    assert config == FlashInferConfig(None, "flashinfer show-config: no torch here")
    assert "No such file" in flashinfer_config.run_show_config("/nowhere/python", {}).problem


def test_the_sections_before_the_time_limit_are_kept(flashinfer, monkeypatch):
    """If FlashInfer's command exceeds the time limit, the record keeps the sections printed before.

    On an H200 without a network, 0.6.12 repeats its requests for more than a minute.
    """
    variables = flashinfer("print('=== Version Info ===')", "import time", "time.sleep(60)")
    monkeypatch.setattr(flashinfer_config, "_WITHIN_S", 2.0)
    config = flashinfer_config.run_show_config(sys.executable, variables)
    assert config.text == "=== Version Info ===\n"
    assert config.problem.startswith("flashinfer show-config: expected its end within 2 s")


def test_the_sections_before_a_failure_are_kept(flashinfer):
    """If FlashInfer's command fails, the record keeps the sections that it printed before.

    The last sections need a network."""
    variables = flashinfer("print('=== Version Info ===')", "raise SystemExit('no manifest')")
    config = flashinfer_config.run_show_config(sys.executable, variables)
    assert config.text == "=== Version Info ===\n" and config.problem.endswith("no manifest")


@pytest.mark.parametrize(
    "config",
    [FlashInferConfig("text"), FlashInferConfig(problem="why"), FlashInferConfig("text", "why")],
    ids=["whole", "none", "not whole"],
)
def test_the_record_of_a_run_gets_it_as_soon_as_it_is_read(config, monkeypatch):
    may_answer = threading.Event()

    def read(*_):
        assert may_answer.wait(30.0)
        return config

    monkeypatch.setattr(flashinfer_config, "run_show_config", read)
    file = new_file()
    file.environment = {"engine_packages": {"python": "3.12"}, "unknown": {"gpus": "no NVML"}}
    run = with_events(SimpleNamespace(record=SimpleNamespace(file=file))).record
    thread = show_config.note_later(run, "python", {})
    before = dict(run.file.environment)
    may_answer.set()
    thread.join(30.0)
    assert before["unknown"][show_config.NAME].endswith("the run ended before its answer")
    packages = {"python": "3.12", "flashinfer_config": config.text}
    assert run.file.environment["engine_packages"] == packages
    unknown = {"gpus": "no NVML"}
    if config.problem:
        unknown[show_config.NAME] = config.problem
    assert run.file.environment["unknown"] == unknown


def test_an_image_is_named_from_outside(tmp_path):
    named = read_container({"SM121_IMAGE": "spark:1", "VLLM_IMAGE_TAG": "v1"}, tmp_path)
    assert named is not None and (named.runtime, named.image) == ("unknown", "spark:1")
    (tmp_path / ".dockerenv").touch()
    of_vllm = read_container({"VLLM_IMAGE_TAG": "v1"}, tmp_path)
    assert of_vllm is not None and (of_vllm.runtime, of_vllm.image) == ("docker", "v1")


@pytest.mark.usefixtures("canary_bf16")
def test_the_command_prints_the_record_without_a_run(flashinfer, capsys):
    flashinfer("print('=== Version Info ===')")
    started = time.monotonic()
    words = ("--profile", "cpu-tiny-gpt-oss", "--image-id", "sha256:1f2e", "--engine-arg=--seed=7")
    assert cli.main(["record", *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["container"]["image_id"] == "sha256:1f2e"
    assert record["engine_packages"]["flashinfer_config"] == "=== Version Info ===\n"
    assert record["workload"]["temperature"] == 0.0
    assert record["engine_arguments"][-1] == "--seed=7"
    assert time.monotonic() - started < 120.0
    assert cli.main(["record", "--profile", "cpu-tiny-gpt-oss", "--configuration", "x"]) == 4
    assert "--configuration x: expected one of cpu-tiny-gpt-oss" in capsys.readouterr().err
