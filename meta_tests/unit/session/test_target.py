"""The target of a run: a model that is missing refuses the run before its start."""

import pytest

from sm121.checkpoint import canary
from sm121.core import profile
from sm121.session import target
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings

CPU = profile.load("cpu-tiny-gpt-oss")


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("canary:gguf", "the profile's model is the canary as GGUF: expected it at "),
        ("canary:fp5", "model canary:fp5: expected canary:bf16 or canary:mxfp4"),
        ("canary:bf16", "and building it needs packages that are missing: no_such_package"),
        ("openai/gpt-oss-120b", None),
    ],
)
def test_a_missing_canary_is_known_before_the_start(model, missing, tmp_path, monkeypatch):
    monkeypatch.setattr(canary, "folder", lambda: tmp_path)
    monkeypatch.setattr(target, "_CANARY_NEEDS", ("no_such_package",))
    settings = Settings(target=GivenTarget(model=model))
    refusal = target.missing_model(settings, CPU)
    assert refusal is None if missing is None else missing in refusal


def test_a_built_canary_is_not_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(canary, "folder", lambda: tmp_path)
    monkeypatch.setattr(target, "_CANARY_NEEDS", ("no_such_package",))
    (tmp_path / "canary.gguf").touch()
    (tmp_path / "bf16").mkdir()
    (tmp_path / "bf16" / "config.json").touch()
    for model in ("canary:gguf", "canary:bf16"):
        assert target.missing_model(Settings(target=GivenTarget(model=model)), CPU) is None
