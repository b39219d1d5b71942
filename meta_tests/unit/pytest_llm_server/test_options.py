"""The user's options are read from the command line and from pytest.ini."""

from types import SimpleNamespace

import pytest
from _pytest.config.argparsing import Parser

from pytest_llm_server import ServerFailed, options
from pytest_llm_server.factory import LlmServerFactory

INI = {"llm_engine": "vllm", "llm_args": [], "llm_ready_within": "300"}


def configuration(*words: str, suite: bool = False, theirs: str | None = None, **ini: object):
    """Return the configuration of a run. ``theirs`` is an option of another plugin."""
    parser = Parser(_ispytest=True)
    options.add(parser)
    if theirs is not None:
        parser.addoption(theirs, default="http://their.page")
    made = SimpleNamespace(
        stash=pytest.Stash(),
        pluginmanager=SimpleNamespace(hasplugin=lambda _name: suite),
        getini=lambda name: (INI | ini).get(name, ""),
    )
    options.add_base_url(made, parser)
    made.option = parser.parse(list(words))
    made.getoption = lambda name: getattr(made.option, name.removeprefix("--").replace("-", "_"))
    return made


def test_the_command_line_counts_before_the_ini():
    words = ("--llm-model=m", "--llm-args=--a 'b c'", "--llm-engine=sglang", "--llm-ready-within=9")
    ini = {"llm_model": "n", "llm_args": ["--d"], "llm_ready_within": "8"}
    assert options.read_options(configuration(*words, **ini)) == options.Asked(
        base_url=None, engine="sglang", model="m", arguments=("--a", "b c"), ready_within_s=9.0
    )
    assert options.read_options(configuration(**ini)) == options.Asked(
        base_url=None, engine="vllm", model="n", arguments=("--d",), ready_within_s=8.0
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["--llm-engine=tgi"], "engine tgi: expected one of vllm, ", id="engine"),
        pytest.param(["--llm-args=--port 80"], "argument --port of vllm: the plugin", id="port"),
        pytest.param(["--llm-args=--uds=x"], "argument --uds=x of vllm: the plugin", id="equals"),
        pytest.param(["--llm-args='"], "--llm-args ': No closing quotation", id="quote"),
        pytest.param(["--llm-ready-within=0"], "--llm-ready-within 0: expected", id="no time"),
        pytest.param(["--llm-ready-within=5m"], "--llm-ready-within 5m: expected", id="no number"),
        pytest.param(["--llm-ready-within=inf"], "--llm-ready-within inf: expected", id="for ever"),
        pytest.param(
            ["--llm-ready-within=99999999"], "--llm-ready-within 99999999: expected", id="years"
        ),
        pytest.param(
            ["--base-url=http://h", "--llm-args=--x"], "--llm-args with --base-url", id="both"
        ),
        pytest.param(["--base-url="], "--base-url '': expected a value", id="empty URL"),
        pytest.param(["--llm-model="], "--llm-model '': expected a value", id="empty model"),
        pytest.param(["--llm-engine="], "--llm-engine '': expected a value", id="empty engine"),
        pytest.param(
            ["--llm-ready-within="], "--llm-ready-within '': expected a value", id="empty time"
        ),
    ],
)
def test_a_wrong_value_is_one_line(words, expected):
    with pytest.raises(pytest.UsageError) as refused:
        options.read_options(configuration(*words))
    (line,) = str(refused.value).splitlines()
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        pytest.param(False, None, id="a web page"),
        pytest.param(True, "http://their.page", id="the suite's"),
    ],
)
def test_an_option_of_the_same_name_is_added_once(suite, expected):
    config = configuration(theirs="--base-url", suite=suite)
    assert options.read_options(config).base_url == expected
    named = configuration(theirs="--base-url", llm_base_url="http://model", suite=False)
    assert options.read_options(named).base_url == "http://model"


def test_a_start_without_a_model_names_the_missing_option(tmp_path):
    asked = options.read_options(configuration())
    run = SimpleNamespace(servers=lambda: SimpleNamespace(asked=asked))
    with pytest.raises(ServerFailed, match="expected a model: give --llm-model MODEL"):
        LlmServerFactory(run, tmp_path).of_the_run()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param({"arguments": "--seed 0"}, "got '--seed 0'", id="one-text"),
        pytest.param({"arguments": ["--seed", 0]}, "got 0 in it", id="a-number-among-texts"),
        pytest.param({"arguments": None}, "arguments: expected a list", id="no-list"),
        pytest.param({"environment": {"A": 1}}, "of type int of A", id="a-number-as-variable"),
        pytest.param({"environment": ["A=1"]}, "got a list", id="variables-in-a-list"),
        pytest.param({"arguments": ["a\0b"]}, "no NUL character, got 'a\\x00b'", id="NUL"),
        pytest.param({"model": "m\0"}, "model: expected no NUL", id="NUL-in-the-model"),
        pytest.param({"environment": {"A": "\0"}}, "got one in A", id="NUL-in-a-variable"),
        pytest.param({"environment": {"A=": "1"}}, "got 'A='", id="no-name-of-a-variable"),
        pytest.param(
            {"environment": {"VLLM_API_KEY": "k"}}, "variable VLLM_API_KEY of vllm: the", id="a-key"
        ),
        pytest.param({"arguments": ["--port=1"]}, "argument --port=1 of vllm: the", id="a-port"),
        pytest.param({"ready_within_s": 0}, "above 0, got 0", id="no-time"),
        pytest.param({"ready_within_s": float("nan")}, "above 0, got nan", id="not-a-number"),
        pytest.param({"ready_within_s": "30"}, "above 0, got '30'", id="a-text-as-time"),
    ],
)
def test_a_wrong_call_of_the_factory_is_one_line(tmp_path, call, expected):
    asked = options.read_options(configuration(llm_model="m"))
    servers = SimpleNamespace(asked=asked, started=lambda *_: "started")
    run = SimpleNamespace(servers=lambda: servers, make_room=lambda: None)
    factory = LlmServerFactory(run, tmp_path)
    assert factory(arguments=["--seed", "0"], environment={"A": "1"}) == "started"
    with pytest.raises(ServerFailed) as failed:
        factory(**call)
    assert expected in str(failed.value) and "\n" not in str(failed.value)
