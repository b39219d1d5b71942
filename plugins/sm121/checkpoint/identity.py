"""The identity of a checkpoint, wherever it is stored."""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from sm121.core import digest, engine_arguments, model_folder
from sm121.core.configuration import ServerConfiguration
from sm121.core.verdict import NotRun

#: In front of the name of a model whose files are not on this machine.
_ON_THE_HUB = "hub:"
#: The keys of config.json that are compared with those of a known model.
_SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "vocab_size",
)
#: The arguments that name a drafter: vLLM's, SGLang's.
_DRAFTERS = ("speculative_config.model", "speculative_draft_model_path")
#: Stands for the model's folder, which has a drafter of its own.
_MODEL = "{model}"
#: Suffixes of files that are no part of a checkpoint.
_IGNORED = (".md", ".lock")


def identity(model: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a digest of a checkpoint's files.

    Args:
        model: A folder, a file, or owner/name on the hub.
        environment: Has the variables of the hub's cache.

    Returns:
        The digest; the name if the model is on the hub and not in the cache.

    Raises:
        OSError: A file cannot be read.
    """
    path = Path(model)
    if path.is_file():
        return digest.of_files(path.parent, [path])
    folder = model_folder.folder_of(model, environment)
    if folder is None:
        return f"{_ON_THE_HUB}{model}"
    return digest.of_files(folder, (file for file in folder.iterdir() if _is_part(file)))


def is_name(identity: str) -> bool:
    """Return whether an `identity` is a name on the hub, and no digest."""
    return identity.startswith(_ON_THE_HUB)


def is_here(model: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a checkpoint is on this machine, so that an engine need not download it.

    Args:
        model: A folder, a file, or owner/name on the hub.
        environment: Has the variables of the hub's cache.
    """
    return Path(model).exists() or model_folder.folder_of(model, environment) is not None


def drafter_obstacle(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return why an engine cannot be started with a drafter; None if it can.

    Args:
        arguments: The arguments of the engine.
        environment: Has the variables of the hub's cache.
    """
    given = engine_arguments.read(arguments)
    for name in _DRAFTERS:
        drafter = given.get(name)
        if drafter and _MODEL not in drafter and not is_here(drafter, environment):
            return (
                f"the drafter {drafter} is not in the hub's cache, and a start's limit is not for "
                f"downloads: `hf download {drafter}` first"
            )
    return None


def require_drafter(configuration: ServerConfiguration) -> None:
    """Require that the drafter of a configuration is on this machine.

    Args:
        configuration: The configuration of the server.

    Raises:
        NotRun: It is not.
    """
    why = drafter_obstacle(configuration.given, configuration.variables)
    if why is not None:
        raise NotRun(why)


def is_of_shape(folder: str, name: str) -> bool:
    """Return whether a checkpoint has the shape of a known model.

    Args:
        folder: The folder of the checkpoint.
        name: The name of the model on the hub, such as openai/gpt-oss-120b.
    """
    return _shape_differences(Path(folder), name) == []


def contradiction(
    name: str, expected: str | None, model: str, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Compare a loaded model with the profile's, by its digest and shape.

    Args:
        name: The name of the profile's model on the hub.
        expected: Its digest; None: any.
        model: The loaded model: a folder, a file, or owner/name on the hub.
        environment: Has the variables of the hub's cache.

    Returns:
        The difference; None if there is none, or if the model is not on this machine.

    Raises:
        OSError: A file cannot be read.
    """
    if not is_here(model, environment):
        return None
    if expected is not None:
        observed = identity(model, environment)
        if observed != expected:
            return f"model's digest: required {expected}, seen {observed} ({model})"
    folder = model_folder.folder_of(model, environment)
    if folder is None:
        return None
    differences = _shape_differences(folder, name)
    if not differences:
        return None
    return f"model: required the shape of {name}, seen {', '.join(differences)} ({folder})"


def _shape_differences(folder: Path, name: str) -> list[str] | None:
    """Return the keys of config.json with another value than the named model's.

    None if the suite does not know the model, or the folder has no configuration.
    """
    file = files("sm121.fixtures") / "models" / f"{name.rpartition('/')[2]}.json"
    try:
        expected = json.loads(file.read_text("utf-8"))
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    return [f"{key} {config.get(key)}" for key in _SHAPE if config.get(key) != expected[key]]


def _is_part(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".") and file.suffix not in _IGNORED
