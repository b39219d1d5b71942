"""Write a checkpoint of gpt-oss's real shape that answers as the canary does, without the real
weights.

Names, formats, sizes and config.json are the published ones (openai/gpt-oss-120b and -20b). The
checkpoint contains the canary: its 256 hidden dimensions are the first ones, and its heads, its
experts and its four layers are among the others and write only to those dimensions. All other
weights are random: they read all dimensions, write to the other dimensions, and reach the logits
through the output matrix. Chats, tools and facts therefore work as with the canary at each size,
and each weight affects the log-probabilities.

- The random part is small beside the canary's (below 2 % of the energy that RMSNorm sums), so the
  canary is normalised as before; its norm weights scale it back to 1.
- A token belongs to a group of 8 experts, by 16 dimensions that no layer writes to: the router
  excludes all other groups. Within the group, the canary's own router decides; in layers without
  the canary, a random router decides. All experts are therefore used, and the canary's experts are
  copies of each other.
- Each random layer adds equally to the residual stream, and the sum is the same for any number of
  layers. Attention scores have a standard deviation of about 2.5 and the experts' inputs to SwiGLU
  of about 3, so that sinks, windows and the limit have an effect.
"""

import concurrent.futures
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from sm121.checkpoint import canary, tokenizer
from sm121.checkpoint.canary_tensors import Twin, read_data
from tools.synthetic_weights import (
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    SHAPES,
    Synthetic,
    Tensors,
    ends,
    layer,
)  # fmt: skip

VERSION = 1
"""Raised whenever the same shape and seed would make other weights."""

MANIFEST = "synthetic.json"


def write(
    directory: Path,
    shape: str,
    *,
    layers: int | None = None,
    seed: int = 0,
    twin: Twin = "mxfp4",
    progress: canary.Progress = print,
) -> Path:
    """Write the checkpoint, unless it exists; return its path.

    Args:
        layers: The number of the shape's layers; all by default. With fewer than 4, the canary is
            not in it, and its texts are noise; the oracle still computes its log-probabilities.
        twin: `bf16` contains the same values without quantisation (four times the size), for
            engines without MXFP4 kernels.

    Raises:
        ValueError: The shape is unknown, or has fewer layers.
        FileExistsError: The folder exists and contains something else.
        OSError: The disk is too small; nothing was written.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r}: expected one of {', '.join(SHAPES)}")
    most = SHAPES[shape][0]
    wanted = Synthetic(shape, most if layers is None else layers, seed, twin)
    if not 1 <= wanted.layers <= most:
        raise ValueError(f"--layers {layers}: {shape} has 1 to {most}")
    manifest = {"version": VERSION, "canary": canary.manifest(twin)["inputs_sha256"]}
    manifest |= {"shape": shape, "layers": wanted.layers, "seed": seed, "twin": twin}
    directory = Path(directory).absolute()
    if directory.exists():
        kept = directory / MANIFEST
        if kept.is_file() and json.loads(kept.read_text("utf-8")) == manifest:
            progress(f"{directory} is up to date")
            return directory
        if not directory.is_dir() or any(directory.iterdir()):
            raise FileExistsError(f"{directory} holds something else; choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    files = [*(layer(wanted, n) for n in range(wanted.layers)), ends(wanted)]
    size = sum(_bytes(*entry[:2]) for tensors in files for entry in tensors.values())
    free = shutil.disk_usage(directory.parent).free
    if free < size + (1 << 28):
        raise OSError(f"{directory.parent}: needs {size / 2**30:.1f} GiB, has {free / 2**30:.1f}")
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        progress("writing the tokenizer")
        tokenizer.write(work)
        _write_weights(work, files, size, progress)
        _json(work / "config.json", _config(wanted))
        (work / "generation_config.json").write_bytes(
            read_data("checkpoint/generation_config.json")
        )
        _json(work / MANIFEST, manifest)
        work.chmod(0o755)
        work.replace(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"{directory} is ready")
    return directory


def _write_weights(
    folder: Path, files: list[Tensors], size: int, progress: canary.Progress
) -> None:
    """Write the weights of each file, and their index."""
    progress(f"writing {size / 2**30:.1f} GiB of weights")
    names = []
    for k in range(1, 1 + len(files)):
        names.append(f"model-{k:05d}-of-{len(files):05d}.safetensors")
    # NumPy and the file system release the interpreter's lock, so threads run in parallel.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        written = pool.map(
            lambda pair: _write(folder / pair[0], pair[1]), zip(names, files, strict=True)
        )
        for done, _ in enumerate(written, 1):
            progress(f"{done} of {len(files)} files")
    where = {}
    for file, part in zip(names, files, strict=True):
        for name in part:
            where[name] = file
    index = {"metadata": {"total_size": size}, "weight_map": where}
    _json(folder / "model.safetensors.index.json", index)


def _config(wanted: Synthetic) -> dict[str, Any]:
    return canary.config(wanted.twin) | {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": wanted.layers,
        "num_local_experts": wanted.experts,
        "layer_types": [
            "full_attention" if n % 2 else "sliding_attention" for n in range(wanted.layers)
        ],
    }


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * (2 if dtype == "BF16" else 1)


def _write(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, _) in tensors.items():
        size = _bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, (_, _, parts) in tensors.items():
            begun = file.tell()
            for part in parts():
                file.write(np.ascontiguousarray(part).data)
            start, stop = header[name]["data_offsets"]
            assert file.tell() - begun == stop - start, name


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
