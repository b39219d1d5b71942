"""The canary is built once in the user's cache, and never only partly."""

import threading
import time
from pathlib import Path

import pytest

from meta_tests.releases import needs_torch
from sm121.checkpoint import canary, tokenizer
from sm121.core import profile
from sm121.engines.options import GivenEngine
from sm121.session import target
from sm121.session.settings import Settings


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, "home/.cache/sm121/canary-", id="the user's cache"),
        pytest.param({"XDG_CACHE_HOME": "xdg"}, "xdg/sm121/canary-", id="XDG_CACHE_HOME"),
        pytest.param({"XDG_CACHE_HOME": ""}, "home/.cache/sm121/canary-", id="empty is not set"),
        pytest.param({"SM121_CANARY": "own", "XDG_CACHE_HOME": "xdg"}, "own", id="SM121_CANARY"),
    ],
)
def test_the_folder_is_the_users_and_not_the_projects(variables, expected, tmp_path, monkeypatch):
    for name in ("SM121_CANARY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value and str(tmp_path / value))
    assert str(canary.folder()).startswith(str(tmp_path / expected))


def test_other_weights_have_another_folder(monkeypatch):
    """Two releases of the suite on one machine have separate checkpoints."""
    monkeypatch.delenv("SM121_CANARY", raising=False)
    ours = canary.folder()
    monkeypatch.setattr(canary, "_inputs_digest", lambda: "f" * 64)
    assert canary.folder() != ours and canary.folder().parent == ours.parent


@needs_torch
def test_a_run_serves_the_canary_of_that_folder(tmp_path, monkeypatch):
    project = tmp_path / "project"
    monkeypatch.setenv("SM121_CANARY", str(tmp_path / "canary"))
    monkeypatch.setattr(canary, "build", lambda directory, twin, progress: directory)
    settings = Settings(
        engine=GivenEngine(name="vllm"), root=project, report_dir=project / "report"
    )
    chosen = profile.load("cpu-tiny-gpt-oss")
    configured = target.configurations(settings, chosen, notify=print)
    models = {configuration.model for configuration in configured.values()}
    assert models == {str(tmp_path / "canary" / "bf16")}
    assert not project.exists()


class Slow:
    """A replacement for the functions that write the tokenizer and the weights.

    It counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def write(self, directory: Path) -> None:
        self.calls += 1
        time.sleep(0.3)
        for name in tokenizer.FILES:
            (directory / name).write_text("{}")


@pytest.fixture
def slow(monkeypatch) -> Slow:
    writer = Slow()
    monkeypatch.setattr(canary.tokenizer, "write", writer.write)
    monkeypatch.setattr(canary, "tensors", lambda twin: {})
    monkeypatch.setattr(canary, "drafter_tensors", dict)
    return writer


def test_two_runs_at_once_build_it_once(slow, tmp_path):
    lines: list[str] = []
    seen: list[set[str]] = []

    def build() -> None:
        made = canary.build(tmp_path / "bf16", "bf16", progress=lines.append)
        seen.append({path.name for path in made.iterdir()})

    runs = [threading.Thread(target=build) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert slow.calls == 1, "each built it"
    assert len(seen) == 3 and all(canary.MANIFEST in names for names in seen)
    assert sum("waiting for another process" in line for line in lines) == 2


def test_files_of_a_killed_build_are_removed(slow, tmp_path):
    left = tmp_path / ".bf16.draft.abc"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(1000))
    canary.build(tmp_path / "bf16", "bf16", progress=str)
    assert {path.name for path in tmp_path.iterdir()} == {"bf16", ".bf16.lock"}


def test_a_folder_that_cannot_be_written_is_used_where_it_is_up_to_date(slow, tmp_path):
    made = canary.build(tmp_path / "canary" / "bf16", "bf16", progress=str)
    (made.parent / ".bf16.lock").unlink()
    made.parent.chmod(0o555)
    try:
        assert canary.build(made, "bf16", progress=str) == made
        assert not (made.parent / ".bf16.lock").exists()
    finally:
        made.parent.chmod(0o755)
