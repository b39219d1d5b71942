"""Headers of safetensors files are read without the weights, and an incomplete file is reported."""

import json
import os
import struct

import pytest

from meta_tests.fakes import checkpoints
from sm121.checkpoint import safetensors_header
from sm121.core.errors import Sm121Error


@pytest.fixture
def folder(tmp_path):
    return checkpoints.load("Qwen/Qwen3-8B").write(tmp_path, files=3)


def test_whole_files(folder):
    stored = safetensors_header.read_headers(folder)
    assert len(stored.files) == 3 and stored.facts == ()
    assert str(stored.tensors[0]) == "model.embed_tokens.weight BF16 [151936, 4096]"


def test_a_cut_file_is_named(folder):
    path = folder / "model-00002-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    (fact,) = safetensors_header.read_headers(folder).facts
    assert (fact.about, fact.observed) == (path.name, "a truncated file")
    assert "download it again" in fact.evidence


def test_a_missing_file_is_named(folder):
    (folder / "model-00003-of-00003.safetensors").unlink()
    (fact,) = safetensors_header.read_headers(folder).facts
    assert fact.observed == "model-00003-of-00003.safetensors is missing"


def test_a_tensor_that_the_index_has_and_no_file(folder):
    checkpoints.write_header(
        folder / "model-00003-of-00003.safetensors", {"other.weight": ("BF16", [1])}
    )
    (fact,) = safetensors_header.read_headers(folder).facts
    assert fact.observed == "some are missing" and fact.evidence.startswith("133, such as ")


def test_files_that_the_index_does_not_name_do_not_count(folder):
    checkpoints.write_header(folder / "consolidated.safetensors", {"x.weight": ("BF16", [1])})
    assert len(safetensors_header.read_headers(folder).tensors) == 399


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", id="a pointer of Git LFS"),
        pytest.param(struct.pack("<Q", 20) + b"{}", id="a header that is cut"),
        pytest.param(struct.pack("<Q", 2) + b"[]", id="no table"),
        pytest.param(struct.pack("<Q", 11) + b'{"a": {}  }', id="no place"),
    ],
)
def test_an_invalid_header_gives_one_line(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(Sm121Error, match="expected a header of safetensors"):
        safetensors_header.read_headers(tmp_path)


@pytest.mark.parametrize(
    "index",
    ["no json", "[]", '{"weight_map": {"a": "../other/model.safetensors"}}', '{"weight_map": 1}'],
)
def test_a_wrong_index_is_one_line(index, folder):
    (folder / safetensors_header.INDEX).write_text(index, "utf-8")
    with pytest.raises(Sm121Error, match="expected"):
        safetensors_header.read_headers(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"shape": [2, 4]}, "expected 16 bytes for b BF16", id="another-shape"),
        pytest.param({"data_offsets": [0, 32]}, "one after the other", id="two-in-one-place"),
        pytest.param({"data_offsets": [32, 0]}, "one after the other", id="a-negative-length"),
        pytest.param({"data_offsets": [64, 96]}, "one after the other", id="a-hole"),
    ],
)
def test_a_header_that_safetensors_refuses_is_one_line(change, said, tmp_path):
    table = {
        "a": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [32, 64], **change},
    }
    text = json.dumps(table).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(96)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(Sm121Error, match=said):
        safetensors_header.read_headers(tmp_path)
