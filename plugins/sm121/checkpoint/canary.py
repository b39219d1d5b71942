"""The canary checkpoint: a small gpt-oss that answers, in the Hugging Face format. Its twin `mxfp4`
is stored like gpt-oss; `bf16` holds the same values. Both are expanded from fixtures/canary, which
knows the tokens of its corpus: other rows of embedding and output are one shared row plus a noise
of their own. Its Eagle3 drafter lies in each twin's folder, as `eagle3`."""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sm121.checkpoint import tokenizer
from sm121.core.lock_file import open_lock
from sm121.oracles import mxfp4

Twin = Literal["mxfp4", "bf16"]

BUILDER_VERSION = 3
"""Raised whenever the same shipped weights would make other files."""

MANIFEST = "canary.json"
DRAFTER = "eagle3"
LAYERS = 4
_NOISE_SEED = 121
_NOISE_ROWS = 8192

Array = NDArray[Any]
Progress = Callable[[str], None]


def folder() -> Path:
    """Return the folder of the twins that a run serves, with a subfolder for each twin.

    The variable SM121_CANARY names it; without it, it is in the user's cache. The name there has a
    digest of what the canary is made from: two releases of the suite on one machine each have their
    own, and neither replaces a checkpoint that the other serves.
    """
    if named := os.environ.get("SM121_CANARY"):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "sm121" / f"canary-{BUILDER_VERSION}-{_inputs_digest()[:12]}"


def build(directory: Path, twin: Twin, progress: Progress = print) -> Path:
    """Make a twin's checkpoint, unless it is there and up to date.

    The directory appears whole or not at all, with the same bytes every time. A second process that
    builds the same twin waits for the first. The tokenizer is copied from a sibling that has it.

    Args:
        directory: Where the checkpoint will be.
        twin: `mxfp4` or `bf16`.
        progress: Called with one line a step.

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
    """Raises FileExistsError: the directory is something else than a canary."""
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
    """The caller holds the lock, so drafts of this directory were left by killed processes."""
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
        (drafter / "config.json").write_bytes(_data("checkpoint/eagle3.json"))
        # As gpt-oss has it: generation ends with <|return|>, <|endoftext|> or <|call|>.
        (work / "generation_config.json").write_bytes(_data("checkpoint/generation_config.json"))
        (work / MANIFEST).write_text(json.dumps(expected, indent=2) + "\n", "utf-8")
        work.chmod(0o755)
        _replace(work, directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"{directory} is ready")


def manifest(twin: Twin) -> dict[str, Any]:
    """What identifies a checkpoint: the twin, the builder's version, the hash of its sources."""
    return {"canary": twin, "builder": BUILDER_VERSION, "inputs_sha256": _inputs_digest()}


@functools.cache
def _inputs_digest() -> str:
    digest = hashlib.sha256()
    for name in ("weights.safetensors", "weights.json", "drafter.safetensors"):
        digest.update(_data(name))
    return digest.hexdigest()


def config(twin: Twin) -> dict[str, Any]:
    """config.json of a twin: the keys and values of gpt-oss, with smaller sizes."""
    result: dict[str, Any] = json.loads(_data("checkpoint/config.json"))
    if twin == "bf16":
        del result["quantization_config"]
    return result


def tensors(twin: Twin) -> dict[str, tuple[str, Array]]:
    """Every tensor of a twin: name -> (safetensors dtype, array); BF16 as its u16 bits."""
    import safetensors.numpy

    shipped: dict[str, Array] = safetensors.numpy.load(_data("weights.safetensors"))
    recipe = json.loads(_data("weights.json"))
    tokens = shipped["tokens"].astype(np.int64)
    result: dict[str, tuple[str, Array]] = {
        "model.embed_tokens.weight": (
            "BF16",
            _expand(shipped["embed_tokens"], tokens, recipe["embedding_noise"], 0),
        ),
        "lm_head.weight": ("BF16", _expand(shipped["lm_head"], tokens, recipe["head_noise"], 1)),
        "model.norm.weight": ("BF16", shipped["norm"]),
    }
    for n in range(LAYERS):
        layer = {
            name.split(".", 1)[1]: array
            for name, array in shipped.items()
            if name.startswith(f"{n}.")
        }
        prefix = f"model.layers.{n}"
        names = {
            "input_layernorm": "input_layernorm.weight",
            "post_attention_layernorm": "post_attention_layernorm.weight",
            "sinks": "self_attn.sinks",
            "router": "mlp.router.weight",
            "router_bias": "mlp.router.bias",
            "gate_up_bias": "mlp.experts.gate_up_proj_bias",
            "down_bias": "mlp.experts.down_proj_bias",
        }
        for side in "qkvo":
            names[f"{side}_proj"] = f"self_attn.{side}_proj.weight"
            names[f"{side}_bias"] = f"self_attn.{side}_proj.bias"
        for short, name in names.items():
            result[f"{prefix}.{name}"] = ("BF16", layer[short])
        for side in ("gate_up", "down"):
            blocks, scales = layer[f"{side}_blocks"], layer[f"{side}_scales"]
            name = f"{prefix}.mlp.experts.{side}_proj"
            if twin == "mxfp4":
                result[f"{name}_blocks"] = ("U8", blocks)
                result[f"{name}_scales"] = ("U8", scales)
            else:
                values = mxfp4.dequantise(blocks.reshape(*blocks.shape[:-2], -1), scales)
                # Stored as transformers' GptOssExperts has it: [E, in, out].
                result[name] = ("BF16", _exact_bf16(values.swapaxes(1, 2), name))
    return dict(sorted(result.items()))


def drafter_tensors() -> dict[str, tuple[str, Array]]:
    """Every tensor of the Eagle3 drafter (`LlamaForCausalLMEagle3`), as `tensors` gives them. It
    knows the tokens of the corpus alone: ``d2t`` [draft vocabulary] i64 is what to add to its ids
    for the canary's, ``t2d`` [vocabulary] which tokens it knows. It uses the canary's embedding."""
    import safetensors.numpy

    shipped: dict[str, Array] = safetensors.numpy.load(_data("drafter.safetensors"))
    tokens = shipped.pop("tokens").astype(np.int64)
    where = {
        **dict.fromkeys(("fc", "norm", "lm_head"), ""),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "midlayer.self_attn."),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "midlayer.mlp."),
    }
    result: dict[str, tuple[str, Array]] = {
        f"{where.get(name, 'midlayer.')}{name}.weight": ("BF16", array)
        for name, array in shipped.items()
    }
    result["d2t"] = ("I64", tokens - np.arange(len(tokens)))
    knows = np.zeros(tokenizer.VOCABULARY, dtype=np.uint8)
    knows[tokens] = 1
    result["t2d"] = ("BOOL", knows)
    return dict(sorted(result.items()))


def _expand(compact: Array, known: Array, noise: float, stream: int) -> Array:
    """[known + 1, H] u16 BF16 bits -> [vocabulary, H]: known rows, else the shared row +- noise."""
    rows = np.empty((tokenizer.VOCABULARY, compact.shape[1]), dtype=np.uint16)
    shared = from_bf16(compact[-1])
    choices = np.stack([to_bf16(shared - noise), to_bf16(shared + noise)])
    # Raw words of PCG64 are the same in every version of NumPy; its distributions need not be.
    words = np.random.PCG64([_NOISE_SEED, stream])
    for start in range(0, len(rows), _NOISE_ROWS):
        block = rows[start : start + _NOISE_ROWS]
        signs = np.unpackbits(
            words.random_raw(block.size // 64).astype("<u8").view(np.uint8)
        ).reshape(block.shape)
        block[...] = np.where(signs == 1, choices[1], choices[0])
    rows[known] = compact[:-1]
    return rows


def from_bf16(bits: Array) -> NDArray[np.float32]:
    """BF16 bits as u16 to their values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: NDArray[np.float32]) -> Array:
    """Round float32 to the nearest BF16, ties to even; the bits as u16."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _exact_bf16(values: NDArray[np.float64], name: str) -> Array:
    bits = to_bf16(np.ascontiguousarray(values, dtype=np.float32))
    if not np.array_equal(from_bf16(bits).astype(np.float64), values):
        raise ValueError(f"{name} holds a value that BF16 cannot represent")
    return bits


def _write_weights(path: Path, entries: dict[str, tuple[str, Array]]) -> None:
    # Written by hand: safetensors' NumPy writer knows no BF16, and the format is a header and the
    # bytes (huggingface/safetensors, README "Format").
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
    if directory.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.draft.old.", dir=directory.parent))
        directory.replace(old / "canary")
        work.replace(directory)
        shutil.rmtree(old)
    else:
        work.replace(directory)


def _manifest_of(directory: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((directory / MANIFEST).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return content if isinstance(content, dict) else None


def _data(name: str) -> bytes:
    return (resources.files("sm121.fixtures") / "canary" / name).read_bytes()
