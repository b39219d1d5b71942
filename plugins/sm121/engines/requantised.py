"""Which dense layers an engine quantises when it loads a checkpoint, and to which format: what its
path shows, else what it was asked for."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sm121.evidence.kernel_path import KernelPath

#: The dense layers that some engine quantises at load, with the name of one module of each.
DENSE = {
    "qkv": "model.layers.0.attn.qkv_proj",
    "o": "model.layers.0.attn.o_proj",
    "lm_head": "lm_head",
}
#: Keys of --quantization-config that are read, or that change nothing of the weights.
_UNDERSTOOD = re.compile(r"moe\.activation|linear(\.weight|\.activation)?|ignore|targets\..+")


def served_layers(
    config: Mapping[str, Any],
    options: Mapping[str, str],
    required: Sequence[str] | None,
    path: KernelPath,
) -> dict[str, str] | None:
    """The format of each dense layer that a server has quantised. None: of some layer nothing tells
    it, or what is asked for is not understood. `config`: of the model (config.json); `options`: of
    the server (`engine_arguments.read`); `required`: layers, where its path shows none."""
    layers = {} if path.requantised == [] else _asked(options, config)
    if layers is None:
        return None
    requantised: Sequence[str] | None = path.requantised
    if path.requantised_is_whole:
        layers = {name: method for name, method in layers.items() if name in (requantised or ())}
    if requantised is None and "mxfp4_layers" not in options:
        requantised = required
    return layers if {*(requantised or ())} <= {*layers} else None


def _asked(options: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str] | None:
    """The format of each dense layer that is to be quantised at load; None where what is asked for
    is not understood."""
    method = str((config.get("quantization_config") or {}).get("quant_method") or "")
    key, named = "quantization_config", options.get("mxfp4_layers", "moe")
    values = {n.removeprefix(f"{key}."): v for n, v in options.items() if n.startswith(f"{key}.")}
    listed = {*DENSE} if named == "all" else {*named.split(",")} - {"moe"}
    understood = listed <= {*DENSE} and all(map(_UNDERSTOOD.fullmatch, values))
    other = options.get("quantization", method).removeprefix("gpt_oss_") != method
    if other or not understood or not options.get(key, "{").startswith("{"):
        return None
    linear = values.get("linear", values.get("linear.weight"))
    rows = [(DENSE[name], "mxfp4") for name in listed]
    rows += [(DENSE[name], linear) for name in ("qkv", "o") if linear is not None]
    rows += [(n.removeprefix("targets."), v) for n, v in values.items() if n.startswith("targets.")]
    left_out = re.findall(r"'([^']*)'", values.get("ignore", ""))
    try:
        chosen = {name: kind for text, kind in rows for name in DENSE if _is_of(text, name)}
        return {n: v for n, v in chosen.items() if not any(_is_of(text, n) for text in left_out)}
    except re.error:  # the engine will refuse it
        return None


def _is_of(text: str, layer: str) -> bool:
    """Whether ``re:PATTERN``, or a part of a module's name, is of a layer."""
    pattern = text.removeprefix("re:") if text.startswith("re:") else f".*{re.escape(text)}"
    return re.match(pattern, DENSE[layer]) is not None
