"""Print the sources that FlashInfer would compile, or let FlashInfer compile a module.

The script runs in the engine's environment (``python FILE REQUEST``), where only the standard
library and FlashInfer are available. REQUEST is a JSON object. The last line of the output is the
answer, which is also a JSON object. A module is compiled into FlashInfer's own cache. The script
calls FlashInfer's generators as its wrappers do for gpt-oss: BF16 queries, a cache in BF16 or E4M3,
head_dim 64, 64 query and 8 KV heads. The arguments of the sink module are taken from the wrapper
itself, because the module's name depends on the release.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

#: The instantiation of one kernel in a generated unit.
INSTANTIATION = re.compile(r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\([^;]*\);")
#: The beginning of the arguments of kernels with MXFP8 activations and MXFP4 weights.
MXFP8_MXFP4 = re.compile(r"\(Sm120,\s*__nv_fp8_e4m3,\s*SafeFP4,\s*__nv_bfloat16,")
#: The arguments of the kernel that compiles fastest. It has the smallest tile and no fused
#: finalisation.
SMALLEST = re.compile(r"NONE,\s*128,\s*64,\s*128,")

#: The page size of the KV cache, in tokens.
page = 16
#: The number of queries per sequence in a decode step.
queries = 1


def _cache(fp8: bool) -> Any:
    import torch

    return torch.float8_e4m3fn if fp8 else torch.bfloat16


def _sink(window: bool, fp8: bool = False) -> Any:
    """Return the module that FlashInfer's wrapper for attention sinks compiles."""
    import torch
    from flashinfer import BatchAttentionWithAttentionSinkWrapper as Wrapper
    from flashinfer.jit import gen_customize_batch_prefill_module

    class Recorder(Wrapper.__mro__[1]):  # type: ignore[misc]
        def __init__(self, *_arguments: Any, **keywords: Any) -> None:
            self.recorded = keywords

    wrapper: Any = type("RecordedWrapper", (Wrapper, Recorder), {})
    recorder = wrapper(
        torch.empty(0, dtype=torch.uint8),
        backend="fa2",
        q_data_type=torch.bfloat16,
        kv_data_type=_cache(fp8),
        head_dim_qk=64,
        head_dim_vo=64,
        window_left=127 if window else -1,
    )
    jit_args = recorder.recorded["jit_args"]
    return gen_customize_batch_prefill_module("fa2", *jit_args, **recorder.recorded["jit_kwargs"])


def _xqa(window: bool, fp8: bool = False, tokens: int = 1) -> Any:
    import torch
    from flashinfer.jit.xqa import gen_xqa_module

    sizes = (page, 64, 8, window, torch.bfloat16, tokens)
    return gen_xqa_module(torch.bfloat16, _cache(fp8), *sizes)


def _generated(file: str, name: str) -> Any:
    """Call a generator that takes no arguments, and return its module."""
    functions: dict[str, Any] = vars(importlib.import_module(f"flashinfer.jit.{file}"))
    return functions[name]()


MODULES: dict[str, Any] = {
    "sampling": lambda: _generated("sampling", "gen_sampling_module"),
    "attention_sink_window": lambda: _sink(True),
    "attention_sink_window_fp8": lambda: _sink(True, fp8=True),
    "attention_sink_full": lambda: _sink(False),
    "attention_sink_full_fp8": lambda: _sink(False, fp8=True),
    "xqa_decode": lambda: _xqa(True),
    "xqa_decode_fp8": lambda: _xqa(True, fp8=True),
    "xqa_full": lambda: _xqa(False),
    "xqa_full_fp8": lambda: _xqa(False, fp8=True),
    "xqa_drafts": lambda: _xqa(True, tokens=queries),
    "xqa_drafts_fp8": lambda: _xqa(True, fp8=True, tokens=queries),
    "xqa_drafts_full": lambda: _xqa(False, tokens=queries),
    "xqa_drafts_full_fp8": lambda: _xqa(False, fp8=True, tokens=queries),
    "fp4_quantize": lambda: _generated("fp4_quantization", "gen_fp4_quantization_sm120f_module"),
    "mxfp8_quantize": lambda: _generated("fp8_quantization", "gen_mxfp8_quantization_sm100_module"),
    "experts": lambda: _generated("fused_moe", "gen_cutlass_fused_moe_sm120_module"),
    "moe_mxfp8_mxfp4_unit": lambda: _generated("fused_moe", "gen_cutlass_fused_moe_sm120_module"),
}


def _one_moe_unit(units: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the generated MXFP8 x MXFP4 unit, reduced to one kernel.

    Compiling a whole unit takes 8 GiB of memory and several minutes.
    """
    chosen: tuple[dict[str, Any], str, re.Match[str]] | None = None
    is_smallest = False
    for unit in units:
        text = Path(unit["source"]).read_text("utf-8")
        for match in INSTANTIATION.finditer(text):
            if is_smallest or not MXFP8_MXFP4.search(match[0]):
                continue
            is_smallest = SMALLEST.search(match[0]) is not None
            if chosen is None or is_smallest:
                chosen = (unit, text, match)
    if chosen is None:
        raise LookupError("no generated unit instantiates the MXFP8 x MXFP4 grouped GEMM")
    unit, text, kept = chosen

    def keep_one(match: re.Match[str]) -> str:
        return match[0] if match.span() == kept.span() else ""

    source = folder / "moe_mxfp8_mxfp4_unit.cu"
    source.write_text(INSTANTIATION.sub(keep_one, text), "utf-8")
    return [{"source": str(source), "arguments": unit["arguments"]}]


def _targets(values: list[str]) -> dict[str, Any]:
    """Return the architectures, or an error text, for each value of FLASHINFER_CUDA_ARCH_LIST."""
    from flashinfer.compilation_context import CompilationContext

    targets: dict[str, Any] = {}
    for value in values:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = value
        try:
            flags = CompilationContext().get_nvcc_flags_list()
        except (RuntimeError, ValueError) as error:
            targets[value] = f"{type(error).__name__}: {error}"
            continue
        targets[value] = []
        for flag in flags:
            match = re.search(r"code=sm_(\w+)", flag)
            if match is not None:
                targets[value].append(match[1])
    return targets


def _build(module: str) -> str:
    """Compile a module into FlashInfer's cache. Return the path of its library."""
    spec = MODULES[module]()
    # Before FlashInfer 0.7, `verbose` has no default. The lock is needed if several processes
    # compile at once.
    options = {"verbose": False, "need_lock": True}
    parameters = inspect.signature(spec.build).parameters
    spec.build(**{name: value for name, value in options.items() if name in parameters})
    return str(spec.jit_library_path)


def _units(module: str, folder: Path) -> list[dict[str, Any]]:
    """Return the CUDA sources of a module, with FlashInfer's arguments for nvcc."""
    units = []
    for entry in MODULES[module]().get_compile_commands():
        source = str(entry["file"])
        words = shlex.split(entry["command"])
        if source.endswith(".cu"):
            arguments = words[words.index(source) + 1 : words.index("-o")]
            units.append({"source": source, "arguments": arguments})
    if module == "moe_mxfp8_mxfp4_unit":
        return _one_moe_unit(units, folder)
    return units


def main() -> None:
    """Read the request, and print the answer."""
    global page, queries
    request = json.loads(sys.argv[1])
    page = request.get("page", page)
    queries = request.get("queries", queries)
    import flashinfer

    answer: dict[str, Any] = {"version": flashinfer.__version__}
    if request["ask"] == "targets":
        answer["targets"] = _targets(request["values"])
    elif request["ask"] == "build":
        answer["library"] = _build(request["module"])
    else:
        answer["units"] = _units(request["module"], Path(request.get("folder", "")))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


main()
