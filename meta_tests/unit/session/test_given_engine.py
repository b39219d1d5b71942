"""Options that contradict each other, or name something that does not exist, are refused in one
line."""

from pathlib import Path
from typing import Any

import pytest

from sm121.core import waivers
from sm121.core.errors import UsageError
from sm121.core.options import Option
from sm121.session import given_engine

URL = "http://127.0.0.1:9"


def option(**given: Any) -> Option:
    """Return the value of each given option, by its name."""
    values = {"--engine-arg": (), "--engine-args": (), "--engine-env": ()}
    values |= {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    return values.get


@pytest.mark.parametrize(
    ("given", "url", "words"),
    [
        pytest.param(
            {"model": "a/b", "served_model_name": "b"}, URL,
            "--model and --served-model-name: expected one of them", id="two names of a model",
        ),
        pytest.param(
            {"engine_arg": ("--enforce-eager",)}, URL,
            "--engine-arg with --base-url: expected a server that the suite starts",
            id="an argument of a server that runs",
        ),
        pytest.param(
            {"server_log": "x.log"}, None,
            "--server-log.* with no --base-url: expected the URL of the attached server",
            id="a log without a URL",
        ),
        pytest.param(
            {"engine_arg": ("--port=1",)}, None, "--port is set by the suite itself", id="a port"
        ),
        pytest.param(
            {"engine_args": ("--served-model-name x",)}, None,
            "--served-model-name is set by the suite itself", id="a name among several arguments",
        ),
        pytest.param(
            {"engine_arg": ("--served_model_name=x",)}, None,
            "--engine-arg --served_model_name=x: --served-model-name is set by the suite itself",
            id="a name with underscores",
        ),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(given, url, words):
    with pytest.raises(UsageError, match=words):
        given_engine.refuse_conflicts(option(**given), url)


def test_options_that_agree():
    given_engine.refuse_conflicts(option(model="a/b", engine_arg=("--enforce-eager",)), None)
    given_engine.refuse_conflicts(option(served_model_name="b", server_log="x.log"), URL)


def test_a_missing_waiver_file_is_refused():
    with pytest.raises(UsageError, match=r"--waivers /nowhere\.toml: .*expected"):
        waivers.load(Path("/nowhere.toml"))


@pytest.mark.parametrize(
    ("arch", "engine", "judged_as"),
    [
        ("sm121", "sglang", "sglang"),
        ("sm121", "llama-cpp", "llama-cpp"),
        ("sm121", "openai", "vllm"),
        ("sm100", "sglang", "vllm"),
        ("sm121", None, "vllm"),
    ],
)
def test_an_attached_server_has_the_profile_of_its_engine(arch, engine, judged_as):
    given = option(arch=arch, engine=engine)
    assert given_engine.started(given, None, URL) == judged_as
