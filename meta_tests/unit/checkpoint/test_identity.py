"""Whether the checkpoint of a start's drafter is on this machine, and is complete."""

import json
from pathlib import Path

import pytest

from sm121.checkpoint.identity import drafter_obstacle

NAME = "nvidia/gpt-oss-120b-Eagle3-short-context"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def snapshot(home: Path, *files: str, shards: tuple[str, ...] = ()) -> Path:
    """Write a snapshot into a hub cache, with an index if the checkpoint has several files."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc", "utf-8")
    (repository / "blobs").mkdir()
    folder = repository / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for name in ("config.json", *files):
        (folder / name).write_text("{}", "utf-8")
    if shards:
        weights = {f"layer.{number}": name for number, name in enumerate(shards)}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weights}), "utf-8")
    return folder


def obstacle(name: str, home: Path) -> str | None:
    config = json.dumps({"method": "eagle3", "model": name, "num_speculative_tokens": 3})
    return drafter_obstacle(("--speculative-config", config), {"HF_HOME": str(home)})


def test_an_interrupted_download_of_a_drafter_is_named(tmp_path):
    """An interrupted download of a drafter is reported.

    hf download writes config.json first, and the weights to blobs/HASH.incomplete."""
    folder = snapshot(tmp_path)
    (folder.parents[1] / "blobs" / "ad5c.incomplete").write_bytes(b"half")
    assert obstacle(NAME, tmp_path) == (
        f"the drafter {NAME}: expected all files of its checkpoint, got no weights in {folder}. "
        f"Run `hf download {NAME}`, which continues an interrupted download"
    )


def test_a_drafter_without_a_file_of_its_index_is_named(tmp_path):
    folder = snapshot(tmp_path, SHARDS[0], shards=SHARDS)
    (folder / SHARDS[1]).symlink_to("../../blobs/removed")
    assert obstacle(NAME, tmp_path) == (
        f"the drafter {NAME}: expected all files of its checkpoint, got no {SHARDS[1]} in "
        f"{folder}. Run `hf download {NAME}`, which continues an interrupted download"
    )


def test_a_folder_without_a_file_of_its_index_is_named(tmp_path):
    folder = snapshot(tmp_path, shards=SHARDS)
    assert obstacle(str(folder), tmp_path) == (
        f"the drafter {folder}: expected all files of its checkpoint, got no {SHARDS[0]} and "
        f"1 more. Copy them to this folder, or continue its download: "
        f"hf download MODEL --local-dir {folder}"
    )


@pytest.mark.parametrize(
    ("files", "shards"),
    [
        pytest.param(("model.safetensors",), (), id="one-file"),
        pytest.param(("pytorch_model.bin",), (), id="torch"),
        pytest.param(SHARDS, SHARDS, id="index"),
    ],
)
def test_a_complete_drafter_is_present(files, shards, tmp_path):
    """A complete drafter counts as present, even if an interrupted download of another revision
    left a blob."""
    folder = snapshot(tmp_path, *files, shards=shards)
    (folder.parents[1] / "blobs" / "ad5c.incomplete").write_bytes(b"half")
    assert obstacle(NAME, tmp_path) is None
    assert obstacle(str(folder), tmp_path) is None


def test_one_complete_format_of_two_is_enough(tmp_path):
    folder = snapshot(tmp_path, *SHARDS, shards=SHARDS)
    other = {"weight_map": {"layer.0": "pytorch_model-00001-of-00001.bin"}}
    (folder / "a_pytorch_model.bin.index.json").write_text(json.dumps(other), "utf-8")
    assert obstacle(NAME, tmp_path) is None


@pytest.mark.parametrize(
    ("file", "is_present"),
    [
        pytest.param("model.safetensors", True, id="the whole weights"),
        pytest.param("training_args.bin", False, id="no weights"),
        pytest.param("pytorch_model.bin", False, id="a file that its index replaces"),
    ],
)
def test_one_whole_file_is_enough_without_the_shards_of_another_format(file, is_present, tmp_path):
    folder = snapshot(tmp_path, file)
    other = {"weight_map": {"layer.0": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(other), "utf-8")
    assert (obstacle(NAME, tmp_path) is None) == is_present


@pytest.mark.parametrize(
    ("shards_here", "is_present"),
    [
        pytest.param(SHARDS[:1], False, id="one shard of two"),
        pytest.param((), True, id="only the index"),
    ],
)
def test_a_whole_bin_file_is_not_enough_beside_some_shards(shards_here, is_present, tmp_path):
    """Engines load safetensors files if there are any, and a .bin file only otherwise."""
    snapshot(tmp_path, "pytorch_model.bin", *shards_here, shards=SHARDS)
    found = obstacle(NAME, tmp_path)
    assert (found is None) == is_present, found
    assert is_present or f"got no {SHARDS[1]} in" in found


def test_an_index_that_cannot_be_read_is_left_to_the_engine(tmp_path):
    folder = snapshot(tmp_path, SHARDS[0], shards=SHARDS)
    (folder / "model.safetensors.index.json").write_text("[]", "utf-8")
    assert obstacle(NAME, tmp_path) is None
