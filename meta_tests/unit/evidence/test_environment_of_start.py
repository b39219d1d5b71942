"""Two starts of one image differ in the image's id, or in the tactics that the autotuner has
saved."""

from pathlib import Path

import pytest

from sm121.evidence import environment
from sm121.evidence.host import read_container


def saved(cache: Path, text: str, folder: str = "0.7.2/121a/5f3c") -> None:
    place = cache / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "autotune_configs.json").write_text(text)


def test_the_digest_of_tactics_does_not_depend_on_their_order(tmp_path: Path) -> None:
    variables = {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": str(tmp_path)}
    assert environment.autotune_sets(variables) == {}
    saved(tmp_path, '{"a": [1, 2], "b": [3]}')
    first = environment.autotune_sets(variables)
    assert list(first) == ["0.7.2/121a/5f3c"]
    saved(tmp_path, '{"b": [3], "a": [1, 2]}')
    assert environment.autotune_sets(variables) == first
    saved(tmp_path, '{"b": [3], "a": [1, 4]}')
    assert environment.autotune_sets(variables) != first
    saved(tmp_path, '{"b": [3], "a"')
    assert environment.autotune_sets(variables) != first


def test_the_sets_of_vllms_own_cache_are_found(tmp_path: Path) -> None:
    saved(tmp_path / "flashinfer_autotune_cache", "{}")
    assert len(environment.autotune_sets({"VLLM_CACHE_ROOT": str(tmp_path)})) == 1


@pytest.mark.parametrize("mark", [".dockerenv", "kubernetes"])
def test_the_image_is_known_by_its_variable(mark: str, tmp_path: Path) -> None:
    variables = {"SM121_IMAGE_ID": "sha256:1f2e"}
    if mark == "kubernetes":
        variables["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
    else:
        (tmp_path / mark).touch()
    record = read_container(variables, tmp_path)
    assert record is not None and record.image_id == "sha256:1f2e"
    without = read_container({**variables, "SM121_IMAGE_ID": ""}, tmp_path)
    assert without is not None and without.image_id is None


def test_podman_knows_its_image_itself(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".containerenv").write_text('image="nvcr.io/x:1"\nimageid="abc"\n')
    record = read_container({"SM121_IMAGE_ID": "sha256:1f2e"}, tmp_path)
    assert record is not None and record.image_id == "abc"
