"""The identity of a checkpoint, which does not depend on where it is stored."""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from sm121.checkpoint.safetensors_header import INDEX
from sm121.core import digest, engine_arguments, model_folder
from sm121.core.configuration import ServerConfiguration
from sm121.core.verdict import NotRun

#: The prefix of the identity of a model whose files are not on this machine.
_ON_THE_HUB = "hub:"
#: The keys of config.json that make up the shape of a model.
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
#: The arguments that name a drafter, in vLLM and in SGLang.
_DRAFTERS = ("speculative_config.model", "speculative_draft_model_path")
#: The placeholder for the model's folder, in which the drafter may be.
_MODEL = "{model}"
_SAFETENSORS = ".safetensors"
#: The suffixes of files with weights.
_WEIGHTS = (_SAFETENSORS, ".bin", ".pt", ".pth", ".gguf")
#: The files that contain all weights of a checkpoint, unless they have an index.
_WHOLE = ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors")
#: The suffix of the index of a checkpoint in several files.
_INDEX_SUFFIX = ".index.json"
#: The suffixes of files that are not part of a checkpoint.
_IGNORED = (".md", ".lock")


def identity(
    model: str, environment: Mapping[str, str] = os.environ, revision: str | None = None
) -> str:
    """Return a digest of a checkpoint's files.

    Args:
        model: A folder, a file, or owner/name on the hub.
        environment: The environment variables, which name the hub's cache.
        revision: A branch, a tag or a commit on the hub; None: the branch ``main``.

    Returns:
        The digest; or ``hub:`` and the name if the files are not on this machine.

    Raises:
        OSError: A file cannot be read.
    """
    path = Path(model)
    if path.is_file():
        return digest.of_files(path.parent, [path])
    folder = model_folder.folder_of(model, environment, revision)
    if folder is None:
        return f"{_ON_THE_HUB}{model}"
    return digest.of_files(folder, (file for file in folder.iterdir() if _is_part(file)))


def is_name(identity: str) -> bool:
    """Return whether an identity is a name on the hub, not a digest.

    Args:
        identity: A result of the function `identity`.
    """
    return identity.startswith(_ON_THE_HUB)


def is_here(
    model: str, environment: Mapping[str, str] = os.environ, revision: str | None = None
) -> bool:
    """Return whether a checkpoint is on this machine, so that an engine need not download it.

    Args:
        model: A folder, a file, or owner/name on the hub.
        environment: The environment variables, which name the hub's cache.
        revision: A branch, a tag or a commit on the hub; None: the branch ``main``.
    """
    return Path(model).exists() or model_folder.folder_of(model, environment, revision) is not None


def drafter_obstacle(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return why an engine cannot be started with its drafter; None if it can.

    Args:
        arguments: The arguments of the engine, which may name a drafter.
        environment: The environment variables, which name the hub's cache.
    """
    given = engine_arguments.parse_options(arguments)
    for name in _DRAFTERS:
        drafter = given.get(name)
        if not drafter or _MODEL in drafter:
            continue
        if is_here(drafter, environment):
            folder = model_folder.folder_of(drafter, environment)
            missing = _missing_files(folder) if folder is not None else ""
            if missing:
                return _incomplete(drafter, missing, folder)
            continue
        if drafter.startswith(("/", ".", "~")):
            return f"the drafter {drafter}: expected a folder with a checkpoint, got none"
        return (
            f"the drafter {drafter} is not in the hub's cache, and the time limit of a start "
            f"does not allow for a download: run `hf download {drafter}` first"
        )
    return None


def _incomplete(drafter: str, missing: str, folder: Path | None) -> str:
    """Return the obstacle of a drafter whose download or copy was interrupted."""
    expected = f"the drafter {drafter}: expected all files of its checkpoint, got no {missing}"
    if Path(drafter).is_dir():
        return (
            f"{expected}. Copy them to this folder, or continue its download: "
            f"hf download MODEL --local-dir {drafter}"
        )
    return (
        f"{expected} in {folder}. Run `hf download {drafter}`, which continues an interrupted "
        "download"
    )


def _missing_files(folder: Path) -> str:
    """Return the weight files that a folder lacks; empty if one format is complete.

    Blobs named ``*.incomplete`` prove nothing: an interrupted download of files that the engine
    does not load leaves them, too. If there are safetensors files, engines load no others.
    """
    has_safetensors = any(file.is_file() for file in folder.glob(f"*{_SAFETENSORS}"))
    for name in _WHOLE:
        if has_safetensors and not name.endswith(_SAFETENSORS):
            continue
        if (folder / name).is_file() and not (folder / f"{name}{_INDEX_SUFFIX}").exists():
            return ""
    missing: list[str] = []
    for index in sorted(folder.glob(f"*{_INDEX_SUFFIX}"), key=lambda path: path.name != INDEX):
        try:
            names = {*json.loads(index.read_text("utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return ""  # the engine reports it
        absent = sorted(name for name in names if not (folder / name).is_file())
        if not absent and (not has_safetensors or all(n.endswith(_SAFETENSORS) for n in names)):
            return ""
        missing = missing or absent
    if missing:
        return missing[0] if len(missing) == 1 else f"{missing[0]} and {len(missing) - 1} more"
    has_weights = any(file.suffix in _WEIGHTS and file.is_file() for file in folder.iterdir())
    return "" if has_weights else "weights"


def require_drafter(configuration: ServerConfiguration) -> None:
    """Require that the drafter of a configuration is on this machine.

    Args:
        configuration: The configuration of the server.

    Raises:
        NotRun: The drafter, or a part of it, would have to be downloaded.
    """
    why = drafter_obstacle(configuration.given, configuration.variables)
    if why is not None:
        raise NotRun(why)


def is_of_shape(folder: str, name: str) -> bool:
    """Return whether a checkpoint has the shape of a known model.

    Args:
        folder: The folder of the checkpoint.
        name: The name of the model on the hub, for example openai/gpt-oss-120b.
    """
    return _shape_differences(Path(folder), name) == []


def contradiction(
    name: str,
    expected: str | None,
    model: str,
    environment: Mapping[str, str] = os.environ,
    revision: str | None = None,
) -> str | None:
    """Compare a loaded model with the profile's, by its digest and shape.

    Args:
        name: The name of the profile's model on the hub.
        expected: The digest of the profile's model; None if any digest is accepted.
        model: The loaded model: a folder, a file, or owner/name on the hub.
        environment: The environment variables, which name the hub's cache.
        revision: A branch, a tag or a commit on the hub; None: the branch ``main``.

    Returns:
        A description of the difference; None if there is none, or if the model is not on this
        machine.

    Raises:
        OSError: A file cannot be read.
    """
    if not is_here(model, environment, revision):
        return None
    if expected is not None:
        observed = identity(model, environment, revision)
        if observed != expected:
            return f"model's digest: expected {expected}, got {observed} ({model})"
    folder = model_folder.folder_of(model, environment, revision)
    if folder is None:
        return None
    differences = _shape_differences(folder, name)
    if not differences:
        return None
    return f"model: expected the shape of {name}, got {', '.join(differences)} ({folder})"


def _shape_differences(folder: Path, name: str) -> list[str] | None:
    """Return the keys of config.json whose values differ from those of the named model.

    The result is None if the model is not in ``fixtures/models`` or the folder has no config.json.
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
