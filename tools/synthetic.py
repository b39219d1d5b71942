"""A checkpoint of gpt-oss's real shape that answers as the canary does, without the real weights.

Names, formats, sizes and config.json are the published ones (openai/gpt-oss-120b and -20b). The
canary's mathematics is a part of it: its 256 hidden dimensions are the first ones, its heads, its
experts and its four layers lie among the others and write to those dimensions alone. All else is
random: it reads everything, writes to the other dimensions, and reaches the logits through the
output matrix. So chats, tools and facts work as with the canary at every size, and each weight has
a part in the log-probabilities.

- The rest is small beside the canary (below 2 % of the energy that RMSNorm sees), so that the
  canary is normalised as it was; its norm weights bring it back to 1.
- A token belongs to a group of 8 experts, by 16 dimensions that nothing writes to: the router puts
  all other groups out of reach. Within the group the canary's own router decides, in layers without
  it a random one. So all experts are used, and the canary's are copies of each other.
- A random layer adds as much to the residual stream as any other; the whole is the same for any
  number of layers. Scores of attention have a standard deviation of about 2.5, experts' inputs to
  SwiGLU of about 3, so that sinks, windows and the limit matter.
"""

import concurrent.futures
import functools
import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sm121.checkpoint import canary, tokenizer
from sm121.checkpoint.canary import Array, Twin, from_bf16, to_bf16
from sm121.oracles import mxfp4

VERSION = 1
"""Raised whenever the same shape and seed would make other weights."""

MANIFEST = "synthetic.json"

#: Of each shape: layers and experts. All else is the same for both (config.json of either).
SHAPES = {"gpt-oss-120b": (36, 128), "gpt-oss-20b": (24, 32)}
_HIDDEN = _INTERMEDIATE = 2880
_HEADS, _KV_HEADS, _HEAD_DIM = 64, 8, 64

# The canary's part.
_C_HIDDEN, _C_EXPERTS, _C_PAIRS = 256, 8, 128
_C_HEADS, _C_KV_HEADS = 8, 2
#: The median RMS of the canary's hidden state before each of its norms: that of attention and of
#: the experts of each layer, and the last (measured on the fixed prompts).
_CANARY_RMS = ((0.47, 1.3), (2.4, 3.0), (5.5, 5.6), (6.2, 6.6), (9.0,))

# The dimensions behind it.
_GROUPS = 16
_REST = _C_HIDDEN + _GROUPS
_IN_GROUP = 0.1
_OUT_OF_REACH = -2500.0
_RMS_OF_CODES = math.sqrt(sum(value**2 for value in mxfp4.E2M1_VALUES) / 8)
_EMBEDDED = 0.02
"""RMS of the rest in the embedding."""
_GROWTH = 1.5
"""What all layers together add to it, in units of its square."""
_LOGIT = 0.08
"""Standard deviation that the rest gives to the logits of a token of median size."""


@dataclass(frozen=True)
class Synthetic:
    """What is written: a shape, as many of its layers as are wanted, and the seed."""

    shape: str
    layers: int
    seed: int
    twin: Twin

    @property
    def experts(self) -> int:
        """Experts a layer."""
        return SHAPES[self.shape][1]

    @property
    def own_layers(self) -> dict[int, int]:
        """Which layers hold the canary's: the last ones, from an even one on, since those slide."""
        if self.layers < canary.LAYERS:
            return {}
        first = (self.layers - canary.LAYERS) // 2 * 2
        return {first + n: n for n in range(canary.LAYERS)}

    @property
    def step(self) -> float:
        """RMS of what attention, and the experts, of one layer add to the rest."""
        return _EMBEDDED * math.sqrt(_GROWTH / (2 * self.layers))


#: A tensor: its safetensors dtype, its shape, and what makes it part by part.
Tensors = dict[str, tuple[str, tuple[int, ...], Callable[[], Iterator[Array]]]]


def write(
    directory: Path,
    shape: str,
    *,
    layers: int | None = None,
    seed: int = 0,
    twin: Twin = "mxfp4",
    progress: canary.Progress = print,
) -> Path:
    """Write the checkpoint, unless it is there; returns its path.

    Args:
        layers: how many of the shape's layers; all by default. Below 4 the canary is not in it, and
            its texts are noise; its log-probabilities are the oracle's all the same.
        twin: `bf16` holds the same values without quantisation (four times the size), for engines
            that have no MXFP4 kernel.

    Raises:
        ValueError: an unknown shape, or more layers than it has.
        FileExistsError: the directory is there and holds something else.
        OSError: the disk is too small, before anything is written.
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
    files = [*(_layer(wanted, n) for n in range(wanted.layers)), _ends(wanted)]
    size = sum(_bytes(*entry[:2]) for tensors in files for entry in tensors.values())
    free = shutil.disk_usage(directory.parent).free
    if free < size + (1 << 28):
        raise OSError(f"{directory.parent}: needs {size / 2**30:.1f} GiB, has {free / 2**30:.1f}")
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        progress("writing the tokenizer")
        tokenizer.write(work)
        progress(f"writing {size / 2**30:.1f} GiB of weights")
        names = [f"model-{k:05d}-of-{len(files):05d}.safetensors" for k in range(1, 1 + len(files))]
        # NumPy and the file system let other threads run.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            written = pool.map(
                lambda pair: _write(work / pair[0], pair[1]), zip(names, files, strict=True)
            )
            for done, _ in enumerate(written, 1):
                progress(f"{done} of {len(files)} files")
        where = {name: file for file, part in zip(names, files, strict=True) for name in part}
        _json(
            work / "model.safetensors.index.json",
            {"metadata": {"total_size": size}} | {"weight_map": where},
        )
        _json(work / "config.json", _config(wanted))
        (work / "generation_config.json").write_bytes(
            canary._data("checkpoint/generation_config.json")
        )
        _json(work / MANIFEST, manifest)
        work.chmod(0o755)
        work.replace(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"{directory} is ready")
    return directory


def _config(wanted: Synthetic) -> dict[str, Any]:
    return canary.config(wanted.twin) | {
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "num_hidden_layers": wanted.layers,
        "num_local_experts": wanted.experts,
        "layer_types": [
            "full_attention" if n % 2 else "sliding_attention" for n in range(wanted.layers)
        ],
    }


# ---------------------------------------------------------------------------------- The tensors


@functools.cache
def _canary() -> dict[str, Array]:
    return {name: array for name, (_, array) in canary.tensors("mxfp4").items()}


def _ends(wanted: Synthetic) -> Tensors:
    """Embedding, last norm and output matrix."""
    vocabulary = tokenizer.VOCABULARY
    own = bool(wanted.own_layers)

    def rows(name: str, part: int, std: float) -> Iterator[Array]:
        stream = np.random.PCG64([wanted.seed, 0, part])
        for start in range(0, vocabulary, 8192):
            ids = np.arange(start, min(start + 8192, vocabulary))
            block = np.zeros((len(ids), _HIDDEN), np.uint16)
            if own:
                block[:, :_C_HIDDEN] = _canary()[name][start : start + len(ids)]
            if part == 0:  # one dimension says which group a token belongs to
                group = (ids * 2_654_435_761 >> 16) % (wanted.experts // _C_EXPERTS)
                block[np.arange(len(ids)), _C_HIDDEN + group] = to_bf16(
                    np.array([_IN_GROUP], np.float32)
                )
            block[:, _REST:] = _normal(stream, (len(ids), _HIDDEN - _REST), std)
            yield block

    head = _LOGIT / math.sqrt(_HIDDEN - _REST)
    return {
        "model.embed_tokens.weight": (
            "BF16",
            (vocabulary, _HIDDEN),
            lambda: rows("model.embed_tokens.weight", 0, _EMBEDDED),
        ),
        "lm_head.weight": (
            "BF16",
            (vocabulary, _HIDDEN),
            lambda: rows("lm_head.weight", 1, head if own else 6 * head),
        ),
        "model.norm.weight": _norm(wanted, wanted.layers, 0, "model.norm.weight", 2),
    }


def _norm(
    wanted: Synthetic, n: int, half: int, own: str, part: int
) -> tuple[str, tuple[int, ...], Callable[[], Iterator[Array]]]:
    """Brings the canary back to its own RMS, and the rest to 1 where the canary's is the median."""
    places = sorted(wanted.own_layers)
    before = sum(place < n for place in places)
    layer = min(before, canary.LAYERS) if places else 0
    # Between two of the canary's layers its state is the one before the next of them.
    size = _CANARY_RMS[layer][half if n in places else 0]
    added = 2 * n + half
    rest = math.sqrt(_EMBEDDED**2 + added * wanted.step**2)
    whole = math.sqrt((size**2 * _C_HIDDEN * bool(places) + rest**2 * (_HIDDEN - _REST)) / _HIDDEN)
    energy = 1 + rest**2 * (_HIDDEN - _REST) / (size**2 * _C_HIDDEN)

    def make() -> Iterator[Array]:
        weight = from_bf16(
            _normal(np.random.PCG64([wanted.seed, n + 1, part]), (_HIDDEN,), 0.1, mean=1.0)
        )
        weight[_REST:] *= whole / rest
        weight[:_REST] = 1.0
        if places and (n in places or n == wanted.layers):
            back = math.sqrt(_C_HIDDEN / _HIDDEN * energy)
            weight[:_C_HIDDEN] = from_bf16(_canary()[own]) * back
        yield to_bf16(weight)

    return "BF16", (_HIDDEN,), make


def _layer(wanted: Synthetic, n: int) -> Tensors:
    prefix = f"model.layers.{n}"
    own = wanted.own_layers.get(n)
    parts: Tensors = {}

    def of_canary(name: str) -> Array:
        return _canary()[f"model.layers.{own}.{name}"]

    def stream(part: int) -> Any:
        return np.random.PCG64([wanted.seed, n + 1, part])

    def add(name: str, shape: tuple[int, ...], make: Callable[[], Array]) -> None:
        parts[f"{prefix}.{name}"] = ("BF16", shape, lambda: iter((make(),)))

    # A head's [rows, columns] of the canary, and where its heads are among the real ones.
    def heads(side: str) -> dict[int, int]:
        if own is None:
            return {}
        if side != "q":
            return {h: h for h in range(_C_KV_HEADS)}
        a, b = _C_HEADS // _C_KV_HEADS, _HEADS // _KV_HEADS
        return {h // a * b + h % a: h for h in range(_C_HEADS)}

    def projection(side: str, part: int, std: float) -> None:
        count = _HEADS if side == "q" else _KV_HEADS
        places = heads(side)
        name = f"self_attn.{side}_proj"

        def weight() -> Array:
            made = _normal(stream(part), (count, _HEAD_DIM, _HIDDEN), std)
            for real, its in places.items():
                made[real] = 0
                made[real, :, :_C_HIDDEN] = of_canary(f"{name}.weight").reshape(
                    -1, _HEAD_DIM, _C_HIDDEN
                )[its]
            return made

        def bias() -> Array:
            made = _normal(stream(part + 1), (count, _HEAD_DIM), 0.2)
            for real, its in places.items():
                made[real] = of_canary(f"{name}.bias").reshape(-1, _HEAD_DIM)[its]
            return made

        add(f"{name}.weight", (count * _HEAD_DIM, _HIDDEN), weight)
        add(f"{name}.bias", (count * _HEAD_DIM,), bias)

    def out() -> Array:
        std = wanted.step / (0.6 * math.sqrt(_HEADS * _HEAD_DIM))
        made = _normal(stream(7), (_HIDDEN, _HEADS, _HEAD_DIM), std)
        made[:_REST] = 0
        for real, its in heads("q").items():
            made[:_C_HIDDEN, real] = of_canary("self_attn.o_proj.weight").reshape(
                _C_HIDDEN, -1, _HEAD_DIM
            )[:, its]
        return made

    def written(own_name: str, part: int) -> Array:
        """A bias [H] of the residual stream."""
        made = _normal(stream(part), (_HIDDEN,), wanted.step / 2)
        made[:_REST] = 0
        if own is not None:
            made[:_C_HIDDEN] = of_canary(own_name)
        return made

    def sinks() -> Array:
        made = _normal(stream(9), (_HEADS,), 1.0, mean=5.0)
        for real, its in heads("q").items():
            made[real] = of_canary("self_attn.sinks")[its]
        return made

    groups = wanted.experts // _C_EXPERTS

    def router() -> Array:
        made = np.zeros((wanted.experts, _HIDDEN), np.uint16)
        expert = np.arange(wanted.experts)
        if own is None:
            made[:, _REST:] = _normal(
                stream(10),
                (wanted.experts, _HIDDEN - _REST),
                1.3 / math.sqrt(_HIDDEN - _REST),
            )
        else:
            made[:, :_C_HIDDEN] = of_canary("mlp.router.weight")[expert % _C_EXPERTS]
        home = (expert // _C_EXPERTS + 5 * n) % groups
        away = np.arange(groups)[None] != home[:, None]
        made[:, _C_HIDDEN : _C_HIDDEN + groups] = away * to_bf16(
            np.array([_OUT_OF_REACH], np.float32)
        )
        return made

    def router_bias() -> Array:
        if own is None:
            return _normal(stream(11), (wanted.experts,), 0.3)
        made: Array = of_canary("mlp.router.bias")[np.arange(wanted.experts) % _C_EXPERTS]
        return made

    own_name = f"model.layers.{own}"
    parts[f"{prefix}.input_layernorm.weight"] = _norm(
        wanted, n, 0, f"{own_name}.input_layernorm.weight", 12
    )
    parts[f"{prefix}.post_attention_layernorm.weight"] = _norm(
        wanted, n, 1, f"{own_name}.post_attention_layernorm.weight", 13
    )
    projection("q", 1, 0.023)
    projection("k", 3, 0.023)
    projection("v", 5, 0.02)
    add("self_attn.o_proj.weight", (_HIDDEN, _HEADS * _HEAD_DIM), out)
    add("self_attn.o_proj.bias", (_HIDDEN,), lambda: written("self_attn.o_proj.bias", 8))
    add("self_attn.sinks", (_HEADS,), sinks)
    add("mlp.router.weight", (wanted.experts, _HIDDEN), router)
    add("mlp.router.bias", (wanted.experts,), router_bias)
    return parts | _experts(wanted, n)


@dataclass(frozen=True)
class _Matrices:
    """One of the two matrices of a layer's experts."""

    wanted: Synthetic
    layer: int
    side: str
    part: int
    rows: int
    columns: int
    #: RMS of its values.
    rms: float
    #: What the canary's part of it is: so many rows and columns, the first ones.
    own_rows: int
    own_columns: int
    #: Rows that are empty beside it.
    empty: int

    @property
    def _own(self) -> str | None:
        own = self.wanted.own_layers.get(self.layer)
        return None if own is None else f"model.layers.{own}.mlp.experts.{self.side}_proj"

    def packed(self, expert: int) -> tuple[Array, Array]:
        """blocks [rows, columns / 32, 16] and scales [rows, columns / 32] of an expert."""
        shape = (self.rows, self.columns // mxfp4.BLOCK, 16)
        stream = np.random.PCG64([self.wanted.seed, self.layer + 1, self.part, expert])
        blocks, scales = _bytes_of(stream, shape), _scales(stream, shape[:2], self.rms)
        blocks[: self.empty] = 0
        if self._own is not None:
            here = slice(0, self.own_rows), slice(0, self.own_columns // mxfp4.BLOCK)
            blocks[here] = _canary()[f"{self._own}_blocks"][expert % _C_EXPERTS]
            scales[here] = _canary()[f"{self._own}_scales"][expert % _C_EXPERTS]
        return blocks, scales

    def values(self, expert: int) -> Array:
        """The same in BF16, [columns, rows], as transformers' GptOssExperts has it."""
        blocks, scales = self.packed(expert)
        sizes = np.ldexp(np.float32(1), scales.astype(np.int32) - mxfp4.E8M0_BIAS)
        pairs = _pairs()[blocks].reshape(*scales.shape, mxfp4.BLOCK) * sizes[..., None]
        # Exact: an element has two significant bits.
        bits: Array = (pairs.view(np.uint32) >> 16).astype(np.uint16)
        return bits.reshape(self.rows, self.columns).T

    def bias(self, std: float) -> Array:
        """[experts, rows]"""
        shape = (self.wanted.experts, self.rows)
        stream = np.random.PCG64([self.wanted.seed, self.layer + 1, self.part + 1])
        made = _normal(stream, shape, std)
        made[:, : self.empty] = 0
        if self._own is not None:
            its = _canary()[f"{self._own}_bias"]
            made[:, : self.own_rows] = its[np.arange(self.wanted.experts) % _C_EXPERTS]
        return made

    def tensors(self, bias_std: float) -> Tensors:
        name = f"model.layers.{self.layer}.mlp.experts.{self.side}_proj"
        count, blocks = self.wanted.experts, self.columns // mxfp4.BLOCK

        def each(of: Callable[[int], Array]) -> Callable[[], Iterator[Array]]:
            return lambda: map(of, range(count))

        parts: Tensors = {
            f"{name}_bias": ("BF16", (count, self.rows), lambda: iter((self.bias(bias_std),)))
        }
        if self.wanted.twin == "bf16":
            parts[name] = ("BF16", (count, self.columns, self.rows), each(self.values))
            return parts
        of_blocks, of_scales = (count, self.rows, blocks, 16), (count, self.rows, blocks)
        parts[f"{name}_blocks"] = ("U8", of_blocks, each(lambda e: self.packed(e)[0]))
        parts[f"{name}_scales"] = ("U8", of_scales, each(lambda e: self.packed(e)[1]))
        return parts


def _experts(wanted: Synthetic, n: int) -> Tensors:
    own = n in wanted.own_layers
    up = _Matrices(
        wanted,
        n,
        "gate_up",
        20,
        2 * _INTERMEDIATE,
        _HIDDEN,
        3 / math.sqrt(_HIDDEN),
        2 * _C_PAIRS,
        _C_HIDDEN,
        2 * _C_PAIRS if own else 0,
    )
    # What SwiGLU makes of inputs of 3, times four shares, has an RMS of about 5 (measured).
    down = _Matrices(
        wanted,
        n,
        "down",
        22,
        _HIDDEN,
        _INTERMEDIATE,
        wanted.step / (5 * math.sqrt(_INTERMEDIATE)),
        _C_HIDDEN,
        _C_PAIRS,
        _REST,
    )
    return up.tensors(0.3) | down.tensors(wanted.step / 2)


@functools.cache
def _pairs() -> Array:
    """[256, 2] float32: the two elements in each byte."""
    values = np.array([*mxfp4.E2M1_VALUES, *(-v for v in mxfp4.E2M1_VALUES)], np.float32)
    code = np.arange(256)
    return np.stack([values[code & 15], values[code >> 4]], 1)


def _scales(stream: Any, shape: tuple[int, ...], rms: float) -> Array:
    """E8M0 scales of two sizes, four apart, that give random codes this RMS."""
    energy = (rms / _RMS_OF_CODES) ** 2
    exponent = math.floor(math.log2(energy / 2) / 2)  # so that 2 <= energy / 4^exponent < 8
    share = (energy / 4**exponent - 1) / 15
    large = _bytes_of(stream, shape) < 256 * share
    scales: Array = (mxfp4.E8M0_BIAS + exponent + 2 * large).astype(np.uint8)
    return scales


# ------------------------------------------------------------------------------------- The numbers


def _bytes_of(stream: Any, shape: tuple[int, ...]) -> Array:
    # Raw words of PCG64 are the same in every version of NumPy; its distributions need not be.
    count = math.prod(shape)
    words: Array = stream.random_raw(-(-count // 8)).astype("<u8", copy=False)
    return words.view(np.uint8)[:count].reshape(shape)


@functools.cache
def _quantiles() -> Array:
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 65_536) for i in range(65_536)], np.float32)


def _normal(stream: Any, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Array:
    """BF16 bits of normally distributed values."""
    table = to_bf16(_quantiles() * np.float32(std) + np.float32(mean))
    codes = _bytes_of(stream, (2 * math.prod(shape),)).view("<u2")
    made: Array = table[codes].reshape(shape)
    return made


# --------------------------------------------------------------------------------------- The files


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
