"""The arguments of a vLLM start that affect its memory."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sm121.checkpoint.inspection import Inspection
from sm121.core import engine_arguments
from sm121.core.errors import Sm121Error
from sm121.machine import roofline, start_data

#: The bits per value of the KV cache in a dtype that is not in formats.toml.
_KV_BITS = 16.0
#: A whole number as vLLM reads it: 32768, 32k, 32K or 25.6k. Only decimal units allow a fraction.
_WHOLE = re.compile(r"(\d{1,15}(?:\.\d{1,15}(?=[kmgt]))?)([kKmMgGtT]?)")
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
#: The values of ``--max-model-len`` for which vLLM takes the longest context that fits.
_FITTING = ("auto", "-1")
#: The options whose effect on the memory is unknown, with their values that have no effect.
_UNKNOWN_EFFECT: dict[str, tuple[str, ...]] = {
    "cpu_offload_gb": ("0", "0.0"),
    "data_parallel_size": ("1",),
    "decode_context_parallel_size": ("1",),
    "enable_lora": ("false",),
    "hf_overrides": (),
    "kv_cache_memory_bytes": (),
    "kv_offloading_size": (),
    "num_gpu_blocks_override": (),
    "pipeline_parallel_size": ("1",),
}
#: The options that quantise a checkpoint while it is loaded, unless it is quantised already.
_QUANTISING = ("quantization", "q", "quantization_config")


@dataclass(frozen=True)
class StartArguments:
    """The arguments of a vLLM start that affect its memory."""

    #: ``--gpu-memory-utilization``.
    utilisation: float
    #: ``--max-model-len``.
    length: int
    #: The bits per value of the KV cache.
    kv_bits: float
    #: ``--max-num-batched-tokens``.
    batched: int
    #: The block size of the KV cache, in tokens.
    block: int
    #: The number of machines or GPUs between which weights and KV cache are divided.
    parallel: int
    #: Whether the drafter in the checkpoint is loaded.
    drafts: bool

    @classmethod
    def of(cls, arguments: Sequence[str], inspection: Inspection) -> "StartArguments":
        """Read the arguments of vLLM.

        Args:
            arguments: The arguments of the server.
            inspection: The checkpoint.

        Returns:
            The start. Its length is 0 if vLLM takes the longest context that fits.

        Raises:
            Sm121Error: vLLM refuses a value, or the effect of an option on the memory is unknown.
        """
        options = engine_arguments.parse_options(arguments)
        _require_known(options, inspection)
        own = start_data.read().vllm
        text = {**inspection.config, **(inspection.config.get("text_config") or {})}
        length = int(text.get("max_position_embeddings") or 0)
        if options.get("max_model_len", "").lower() in _FITTING:
            length = 0
        else:
            length = _whole(options, "max_model_len", length)
        return cls(
            utilisation=_share(options, own.utilisation),
            length=length,
            kv_bits=_kv_bits(options, text),
            batched=_whole(options, "max_num_batched_tokens", own.batched_tokens),
            block=_whole(options, "block_size", own.block),
            parallel=_whole(options, "tensor_parallel_size", 1),
            drafts="mtp" in options.get("speculative_config.method", ""),
        )


def _require_known(options: Mapping[str, str], inspection: Inspection) -> None:
    """Require that the effect of each option on the memory is known."""
    without_effect = dict(_UNKNOWN_EFFECT)
    if not inspection.label.name:
        without_effect |= dict.fromkeys(_QUANTISING, ())
    for name, values in without_effect.items():
        given = options.get(name)
        if given is not None and given not in values:
            raise Sm121Error(f"the effect of {_option(name)} {given} on the memory is unknown")


def _option(name: str) -> str:
    dashes = "-" if len(name) == 1 else "--"
    return dashes + name.replace("_", "-")


def _whole(options: Mapping[str, str], name: str, default: int) -> int:
    """Return the value of an option that is a whole number above 0.

    Raises:
        Sm121Error: The value is something else.
    """
    if name not in options:
        return default
    given = options[name].strip()
    match = _WHOLE.fullmatch(given)
    value = 0
    if match is not None:
        number, unit = match.groups()
        value = int(float(number) * _UNITS[unit]) if "." in number else int(number) * _UNITS[unit]
    if value < 1:
        raise Sm121Error(f"{_option(name)}: expected a whole number above 0, got {given!r}")
    return value


def _share(options: Mapping[str, str], default: float) -> float:
    """Return the value of ``--gpu-memory-utilization``.

    Raises:
        Sm121Error: vLLM refuses the value.
    """
    given = options.get("gpu_memory_utilization", default)
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 1.0:
        raise Sm121Error(
            f"--gpu-memory-utilization: expected a number above 0 and at most 1, got {given!r}"
        )
    return value


def _kv_bits(options: Mapping[str, str], config: Mapping[str, object]) -> float:
    """Return the bits per value of the KV cache.

    Raises:
        Sm121Error: ``--kv-cache-dtype`` names a dtype that is not in formats.toml.
    """
    named = options.get("kv_cache_dtype", "auto")
    if named != "auto" and roofline.bits_of(named) is None:
        raise Sm121Error(f"the bits of a value with --kv-cache-dtype {named} are unknown")
    if named == "auto":
        named = options.get("dtype", "auto")
    if named == "auto":
        named = str(config.get("dtype") or config.get("torch_dtype"))
    return roofline.bits_of(named) or _KV_BITS
