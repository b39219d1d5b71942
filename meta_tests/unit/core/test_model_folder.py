"""The folder of a checkpoint's revision in the hub's cache is found."""

import pytest

from sm121.core import model_folder
from sm121.core.configuration import ServerConfiguration

NAME = "Qwen/Qwen3-8B"
MAIN = "a" * 40
OTHER = "b" * 40


@pytest.fixture
def hub(tmp_path):
    """Create a hub cache with snapshots, of which the refs name some."""

    def make(*snapshots: str, **refs: str) -> dict[str, str]:
        folder = tmp_path / "models--Qwen--Qwen3-8B"
        for commit in snapshots:
            (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "refs").mkdir(parents=True)
        for name, commit in refs.items():
            (folder / "refs" / name).write_text(commit)
        return {"HF_HUB_CACHE": str(tmp_path)}

    return make


def name_of(folder) -> str | None:
    return folder.name if folder is not None else None


@pytest.mark.parametrize(
    ("revision", "commit"),
    [
        pytest.param(None, MAIN, id="no revision is main"),
        pytest.param("fp8", OTHER, id="a branch"),
        pytest.param(OTHER, OTHER, id="a commit"),
        pytest.param("v2", None, id="a revision that is not here"),
        pytest.param("../../x", None, id="no path"),
    ],
)
def test_a_revision_names_its_snapshot(hub, revision, commit):
    cache = hub(MAIN, OTHER, main=MAIN, fp8=OTHER)
    assert name_of(model_folder.folder_of(NAME, cache, revision)) == commit


def test_the_only_snapshot_is_that_of_a_running_server(hub):
    """If there is only one snapshot, a running server uses it. An engine that is started without a
    revision would download main instead."""
    cache = hub(OTHER)
    assert name_of(model_folder.served_folder(NAME, None, cache)) == OTHER
    assert model_folder.folder_of(NAME, cache) is None


def test_two_snapshots_without_main_are_ambiguous(hub):
    assert model_folder.served_folder(NAME, None, hub(MAIN, OTHER)) is None


@pytest.mark.parametrize(
    ("asked", "commit"),
    [
        ("{'model': 'x', 'revision': 'fp8', 'tokenizer_revision': 'v1'}", OTHER),
        ("{'model': 'x', 'tokenizer_revision': 'fp8'}", MAIN),
        (f"ServerArgs(model_path='x', revision='{OTHER}', seed=1)", OTHER),
        (None, MAIN),
    ],
    ids=["vLLM", "only the tokenizer", "SGLang", "no log"],
)
def test_the_log_names_the_revision(hub, asked, commit):
    cache = hub(MAIN, OTHER, main=MAIN, fp8=OTHER)
    assert name_of(model_folder.served_folder(NAME, asked, cache)) == commit


def test_the_log_of_a_container_names_the_snapshot(hub):
    named = f"/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/{OTHER}"
    cache = hub(MAIN, OTHER, main=MAIN)
    assert name_of(model_folder.served_folder(named, None, cache)) == OTHER


def test_a_configuration_has_the_revision_of_its_arguments():
    configuration = ServerConfiguration(
        name="a", engine="vllm", python="", model=NAME, served_name="a",
        arguments=("--revision", "fp8"),
    )  # fmt: skip
    assert configuration.revision == "fp8"
