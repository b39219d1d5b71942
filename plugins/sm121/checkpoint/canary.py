"""The canary: a checkpoint of a small, trained gpt-oss in the Hugging Face format.

The canary has two variants ("twins") with the same values: `mxfp4` is stored in gpt-oss's formats,
`bf16` in BF16. Both are expanded from ``fixtures/canary`` (`canary_tensors`), which contains the
embedding and output rows of the corpus's tokens. All other rows are a shared row plus noise. The
folder of each twin contains the Eagle3 drafter in the subfolder `eagle3`.
"""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sm121.checkpoint import tokenizer
from sm121.checkpoint.canary_tensors import (
    StoredTensor,
    Twin,
    drafter_tensors,
    read_data,
    tensors,
)
from sm121.core.lock_file import open_lock

#: Incremented when the built files change although the shipped weights are the same.
BUILDER_VERSION = 3
#: The name of the file that identifies a canary.
MANIFEST = "canary.json"
#: The name of the drafter's subfolder.
DRAFTER = "eagle3"
#: The prefix of a twin's name in profiles and in ``--model``.
_PREFIX = "canary:"
#: The length of the digest in a folder's name, in characters.
_DIGEST_LENGTH = 12

#: A function that is called with a progress line for each step.
Progress = Callable[[str], None]


def folder() -> Path:
    """Return the folder for the twins that a run serves, with a subfolder for each twin.

    The environment variable SM121_CANARY names the folder. By default, it is in the user's cache,
    and its name contains a digest of the canary's sources. Two releases of the suite on one machine
    therefore have different folders, and do not replace each other's checkpoints.
    """
    named = os.environ.get("SM121_CANARY")
    if named:
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"canary-{BUILDER_VERSION}-{_inputs_digest()[:_DIGEST_LENGTH]}"
    return Path(caches) / "sm121" / name


def twin_of(model: str) -> str | None:
    """Return the twin in a model's name, for example ``mxfp4`` for ``canary:mxfp4``, or None.

    Args:
        model: The model of a profile or of ``--model``.
    """
    if not model.startswith(_PREFIX):
        return None
    return model.removeprefix(_PREFIX)


def build(directory: Path, twin: Twin, progress: Progress = print) -> Path:
    """Build a twin's checkpoint, unless it exists and is up to date.

    The directory is created atomically, and always with the same bytes. A second process that
    builds the same twin waits for the first one. The tokenizer is copied from another twin's
    directory if possible.

    Args:
        directory: The folder of the checkpoint.
        twin: `mxfp4` or `bf16`.
        progress: Called with a progress line for each step.

    Returns:
        The absolute path of the directory.

    Raises:
        FileExistsError: The directory exists and is not a canary.
        ImportError: oss-harmony is not installed.
    """
    directory = Path(directory).absolute()
    expected = manifest(twin)
    if _is_current(directory, expected):
        progress(f"{directory} is up to date")
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(directory.parent / f".{directory.name}.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that builds {directory}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_current(directory, expected):
            progress(f"{directory} is up to date")
        else:
            _build(directory, twin, expected, progress)
    return directory


def _is_current(directory: Path, expected: dict[str, Any]) -> bool:
    """Return whether a directory is the expected canary.

    Raises FileExistsError if the directory does not contain a canary.
    """
    if not directory.exists():
        return False
    if _manifest_of(directory) == expected:
        return True
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if not is_empty and not (directory / MANIFEST).is_file():
        raise FileExistsError(
            f"{directory} exists and is not a canary checkpoint; choose another directory"
        )
    return False


def _build(directory: Path, twin: Twin, expected: dict[str, Any], progress: Progress) -> None:
    """Build the checkpoint in a draft directory, which then replaces the directory."""
    # The caller holds the lock, so existing drafts were left by processes that were killed.
    for left in directory.parent.glob(f".{directory.name}.draft.*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.draft.", dir=directory.parent))
    try:
        progress("writing the tokenizer")
        if not _reuse_tokenizer(directory, work, expected):
            tokenizer.write(work)
        progress(f"writing the {twin} weights")
        _write_weights(work / "model.safetensors", tensors(twin))
        (work / "config.json").write_text(json.dumps(config(twin), indent=2) + "\n", "utf-8")
        drafter = work / DRAFTER
        drafter.mkdir()
        _write_weights(drafter / "model.safetensors", drafter_tensors())
        (drafter / "config.json").write_bytes(read_data("checkpoint/eagle3.json"))
        # As in gpt-oss, these tokens end the generation: <|return|>, <|endoftext|> and <|call|>.
        (work / "generation_config.json").write_bytes(
            read_data("checkpoint/generation_config.json")
        )
        (work / MANIFEST).write_text(json.dumps(expected, indent=2) + "\n", "utf-8")
        work.chmod(0o755)
        _replace(work, directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"{directory} is ready")


def manifest(twin: Twin) -> dict[str, Any]:
    """Return the content of a twin's `MANIFEST`.

    Args:
        twin: The format of the twin's weights.
    """
    return {"canary": twin, "builder": BUILDER_VERSION, "inputs_sha256": _inputs_digest()}


@functools.cache
def _inputs_digest() -> str:
    digest = hashlib.sha256()
    for name in ("weights.safetensors", "weights.json", "drafter.safetensors"):
        digest.update(read_data(name))
    return digest.hexdigest()


def config(twin: Twin) -> dict[str, Any]:
    """Return a twin's config.json: that of gpt-oss with smaller sizes.

    Args:
        twin: The format of the twin's weights. That of ``bf16`` has no ``quantization_config``.
    """
    result: dict[str, Any] = json.loads(read_data("checkpoint/config.json"))
    if twin == "bf16":
        del result["quantization_config"]
    return result


def _write_weights(path: Path, entries: dict[str, StoredTensor]) -> None:
    """Write a safetensors file: a header and the bytes (huggingface/safetensors, "Format").

    The NumPy writer of safetensors does not support BF16.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, array) in entries.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, array in entries.values():
            file.write(np.ascontiguousarray(array).tobytes())


def _reuse_tokenizer(directory: Path, work: Path, wanted: dict[str, Any]) -> bool:
    """Copy the tokenizer of another twin, if there is one. Return whether it was copied."""
    for sibling in sorted(directory.parent.iterdir()):
        previous = _manifest_of(sibling)
        if previous is None or previous.get("builder") != wanted["builder"]:
            continue
        if all((sibling / name).is_file() for name in tokenizer.FILES):
            for name in tokenizer.FILES:
                shutil.copyfile(sibling / name, work / name)
            return True
    return False


def _replace(work: Path, directory: Path) -> None:
    """Replace the directory by a draft."""
    if not directory.exists():
        work.replace(directory)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.draft.old.", dir=directory.parent))
    directory.replace(old / "canary")
    work.replace(directory)
    shutil.rmtree(old)


def _manifest_of(directory: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((directory / MANIFEST).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return content if isinstance(content, dict) else None
