"""Which checkpoint it is, wherever it lies."""

import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from sm121.core import digest, model_folder

#: In front of the name of a model whose files are not here.
_ON_THE_HUB = "hub:"
_SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok", "vocab_size",
)  # fmt: skip


def identity(model: str, environment: Mapping[str, str] = os.environ) -> str:
    """A digest of a checkpoint's files; of a name on the hub that is not in the cache, the name.
    `model`: a folder, a file, or owner/name; `environment`: says where the hub's cache is. Raises
    OSError: a file of it cannot be read."""
    path = Path(model)
    if path.is_file():
        return digest.of_files(path.parent, [path])
    if (folder := model_folder.folder_of(model, environment)) is None:
        return f"{_ON_THE_HUB}{model}"
    return digest.of_files(folder, (file for file in folder.iterdir() if _counts(file)))


def is_name(identity: str) -> bool:
    """Whether an `identity` is the name of a model that is not here, and no digest."""
    return identity.startswith(_ON_THE_HUB)


def is_here(model: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a checkpoint is on this machine, so that an engine need not download it."""
    return Path(model).exists() or model_folder.folder_of(model, environment) is not None


def is_of_shape(folder: str, name: str) -> bool:
    """Whether the checkpoint in a folder has the shape of a model that the suite knows. `name`: of
    the model on the hub, as openai/gpt-oss-120b."""
    return _shape_differences(Path(folder), name) == []


def contradiction(
    name: str, expected: str | None, model: str, environment: Mapping[str, str] = os.environ
) -> str | None:
    """What of the model that was loaded is not as the profile says, by its digest (``expected``;
    None: any) and shape; None: nothing, or it is not here. Raises OSError: not readable."""
    if not is_here(model, environment):
        return None
    if expected is not None and (observed := identity(model, environment)) != expected:
        return f"model's digest: required {expected}, seen {observed} ({model})"
    folder = model_folder.folder_of(model, environment)
    if folder is not None and (differences := _shape_differences(folder, name)):
        return f"model: required the shape of {name}, seen {', '.join(differences)} ({folder})"
    return None


def _shape_differences(folder: Path, name: str) -> list[str] | None:
    """Keys of config.json with another value than the model's of that name; None where the suite
    does not know the model, or where the folder has no configuration."""
    file = files("sm121.fixtures") / "models" / f"{name.rpartition('/')[2]}.json"
    try:
        expected = json.loads(file.read_text("utf-8"))
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    return [f"{k} {config.get(k)}" for k in _SHAPE if config.get(k) != expected[k]]


def _counts(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".") and file.suffix not in (".md", ".lock")
