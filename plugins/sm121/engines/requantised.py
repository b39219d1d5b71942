"""Find the dense layers that an engine quantises when it loads a checkpoint, and their format.

The evidence is the kernel path. If the path shows nothing, the server's options are used.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sm121.evidence.kernel_path import KernelPath

#: The dense layers that any engine quantises when it loads a model, with one module name of each.
DENSE = {
    "qkv": "model.layers.0.attn.qkv_proj",
    "o": "model.layers.0.attn.o_proj",
    "lm_head": "lm_head",
}
_OPTION = "quantization_config"
#: Keys of --quantization-config that are read, or that do not affect the weights.
_UNDERSTOOD = re.compile(r"moe\.activation|linear(\.weight|\.activation)?|ignore|targets\..+")


def served_layers(
    config: Mapping[str, Any],
    options: Mapping[str, str],
    required: Sequence[str] | None,
    path: KernelPath,
) -> dict[str, str] | None:
    """Return the dense layers that a server has quantised, with their formats.

    Args:
        config: The configuration of the model (config.json).
        options: The options of the server (`engine_arguments.parse_options`).
        required: The layers that the server must quantise. They are used if the path shows none.
        path: The kernel path of the server.

    Returns:
        None if the format of some layer is unknown, or an option is not understood.
    """
    layers = {} if path.requantised == [] else _requested_layers(options, config)
    if layers is None:
        return None
    requantised: Sequence[str] | None = path.requantised
    if path.requantised_is_whole:
        layers = {name: method for name, method in layers.items() if name in (requantised or ())}
    if requantised is None and "mxfp4_layers" not in options:
        requantised = required
    return layers if {*(requantised or ())} <= {*layers} else None


def _requested_layers(
    options: Mapping[str, str], config: Mapping[str, Any]
) -> dict[str, str] | None:
    """Return the dense layers that the options request to be quantised, with their formats.

    Return None if an option is not understood.
    """
    method = str((config.get("quantization_config") or {}).get("quant_method") or "")
    named = options.get("mxfp4_layers", "moe")
    listed = {*DENSE} if named == "all" else {*named.split(",")} - {"moe"}
    values = {}
    for name, value in options.items():
        if name.startswith(f"{_OPTION}."):
            values[name.removeprefix(f"{_OPTION}.")] = value
    if options.get("quantization", method).removeprefix("gpt_oss_") != method:
        return None
    if not listed <= {*DENSE} or not all(map(_UNDERSTOOD.fullmatch, values)):
        return None
    if not options.get(_OPTION, "{").startswith("{"):
        return None
    # Module names or patterns with their formats; a later entry replaces an earlier one.
    formats = [(DENSE[name], "mxfp4") for name in listed]
    linear = values.get("linear", values.get("linear.weight"))
    if linear is not None:
        formats += [(DENSE["qkv"], linear), (DENSE["o"], linear)]
    for name, value in values.items():
        if name.startswith("targets."):
            formats.append((name.removeprefix("targets."), value))
    left_out = re.findall(r"'([^']*)'", values.get("ignore", ""))
    try:
        return _choose_formats(formats, left_out)
    except re.error:  # the engine will refuse this pattern
        return None


def _choose_formats(formats: Sequence[tuple[str, str]], left_out: Sequence[str]) -> dict[str, str]:
    chosen = {}
    for text, kind in formats:
        for name in DENSE:
            if _is_of(text, name):
                chosen[name] = kind
    for name in list(chosen):
        if any(_is_of(text, name) for text in left_out):
            del chosen[name]
    return chosen


def _is_of(text: str, layer: str) -> bool:
    """Return whether a text, ``re:PATTERN`` or part of a module's name, matches a layer."""
    pattern = text.removeprefix("re:") if text.startswith("re:") else f".*{re.escape(text)}"
    return re.match(pattern, DENSE[layer]) is not None
