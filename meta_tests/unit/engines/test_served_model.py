"""An attached server serves its only model under another name than the profile's."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from meta_tests.fakes.loopback import JsonHandler, serving
from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.session import attached_model, target
from sm121.session.given_attached import GivenServer
from sm121.session.given_judging import GivenJudging
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings

GPT_OSS = profile.load("sm121-gpt-oss-120b")
CANARY = profile.load("cpu-tiny-gpt-oss")


def attached(
    models: Sequence[dict[str, str]], chosen: profile.Profile = GPT_OSS, **groups: object
) -> target.Server:
    """Attach to a server that returns this list of models."""

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.say({"data": models})
            else:
                self.say({}, 404)

    with serving(Handler) as url:
        return target.attached_server(
            Settings(attached=GivenServer(base_url=url), **groups), chosen
        )


@pytest.mark.parametrize(
    ("entry", "remark"),
    [
        pytest.param({"id": "gpt-oss-120b"}, False, id="the profile's name"),
        pytest.param({"id": "openai/gpt-oss-120b"}, False, id="vLLM's default name"),
        pytest.param({"id": "default"}, True, id="a name that states nothing"),
        pytest.param({"id": "gpt-oss"}, True, id="the family alone"),
        pytest.param({"id": "oss-120b-fast"}, True, id="the size alone"),
        pytest.param({"id": "default", "root": "/models/x"}, True, id="a root that states nothing"),
        pytest.param({"id": "d", "root": "openai/gpt-oss-120b"}, False, id="the root states it"),
    ],
)
def test_the_only_model_of_a_server_is_taken_as_it_is(entry, remark):
    server = attached([entry])
    assert server.endpoint.served_name == entry["id"]
    line = attached_model.name_remark(
        server, Settings(attached=GivenServer(base_url="http://x")), GPT_OSS
    )
    assert (line is not None) is remark
    assert line is None or (entry["id"] in line and "judged as gpt-oss-120b" in line)


@pytest.mark.parametrize(
    ("models", "chosen", "serves"),
    [
        pytest.param([{"id": "o/gpt-oss-20b"}], GPT_OSS, "o/gpt-oss-20b", id="a smaller one"),
        pytest.param([{"id": "Qwen3-30B-A3B"}], GPT_OSS, "Qwen3-30B-A3B", id="another family"),
        pytest.param([{"id": "canary"}], GPT_OSS, "canary", id="the model of another profile"),
        pytest.param([{"id": "gpt-oss-120b"}], CANARY, "gpt-oss-120b", id="--arch forgotten"),
        pytest.param(
            [{"id": "default", "root": "openai/gpt-oss-20b"}], GPT_OSS,
            r"default \(openai/gpt-oss-20b\)", id="its root states another one",
        ),
        pytest.param([{"id": "one"}, {"id": "two"}], GPT_OSS, "one, two", id="two models"),
        pytest.param([], GPT_OSS, "nothing", id="none"),
    ],
)  # fmt: skip
def test_a_server_of_another_model_is_refused(models, chosen, serves):
    with pytest.raises(UsageError, match=f"got one of {serves}; name one with --model"):
        attached(models, chosen)


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        pytest.param(("openai/gpt-oss-120b", "gpt-4o"), "openai/gpt-oss-120b", id="the first"),
        pytest.param(("gpt-4o", "other"), "gpt-4o", id="names that state nothing"),
        pytest.param(("gpt-4o", "gpt-oss-120b"), "gpt-oss-120b", id="the profile's name"),
    ],
)
def test_one_model_under_several_names_is_taken(names, taken):
    """One model under several names is accepted. vLLM lists an entry for each value of
    --served-model-name, all with the same root."""
    server = attached([{"id": name, "root": "openai/gpt-oss-120b"} for name in names])
    assert server.endpoint.served_name == taken
    line = attached_model.name_remark(
        server, Settings(attached=GivenServer(base_url="http://x")), GPT_OSS
    )
    assert line is not None and f"lists one model as {', '.join(names)}" in line
    assert f"requests use {taken!r}" in line


@pytest.mark.parametrize(
    "models",
    [
        pytest.param([{"id": "a"}, {"id": "b"}], id="no roots"),
        pytest.param([{"id": "a", "root": None}, {"id": "b", "root": None}], id="empty roots"),
        pytest.param([{"id": "a", "root": "x"}, {"id": "b", "root": "y"}], id="an adapter"),
        pytest.param([{"id": "a", "root": "x"}, {"id": "b"}], id="one root"),
        pytest.param(
            [
                {"id": "gpt-4o", "root": "openai/gpt-oss-20b"},
                {"id": "b", "root": "openai/gpt-oss-20b"},
            ],
            id="one model, and another one",
        ),
    ],
)
def test_names_that_may_be_of_several_models_are_refused(models):
    with pytest.raises(UsageError, match="got one of"):
        attached(models)


def test_files_here_of_another_shape_are_another_model(tmp_path: Path):
    """If the model's files on this machine have another shape, it is another model.

    The bound of a rate depends on the profile's model, and would be wrong for a smaller one."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(UsageError, match="got one of"):
        attached([{"id": str(tmp_path)}])


@pytest.mark.parametrize("certify", [True, False])
def test_a_name_that_is_required_is_required(certify):
    if certify:
        how = {"judging": GivenJudging(certify=True)}
    else:
        how = {"target": GivenTarget(served_name="gpt-oss-120b")}
    with pytest.raises(UsageError, match="expected a server of 'gpt-oss-120b', got one of default"):
        attached([{"id": "default"}], **how)


def test_the_run_has_the_remark(run_pytest, fault_server):
    """The run is judged, and its remark contains the name of the model."""
    server = fault_server("unnamed")
    _, run = run_pytest(*server.options, "--arch", "cpu", "tests/test_smoke.py::test_health")
    (line,) = [line for line in run.verdict["remarks"] if line.startswith("model: ")]
    assert "'my-model', and it is judged as canary" in line
    assert [test["verdict"] for test in run.verdict["tests"]] == ["PASS"], run.output
