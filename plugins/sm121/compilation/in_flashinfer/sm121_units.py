"""Asks FlashInfer what it would compile, or has it compile a module into its own cache. Runs in the
engine's environment (``python FILE REQUEST``): standard library and FlashInfer only. REQUEST and
the answer, the last line of the output, are JSON objects. Generators are called as FlashInfer's own
wrappers call them for gpt-oss: BF16, head_dim 64, 64 query and 8 KV heads."""

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

INSTANTIATION = re.compile(r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\([^;]*\);")
MXFP8_MXFP4 = re.compile(r"\(Sm120,\s*__nv_fp8_e4m3,\s*SafeFP4,\s*__nv_bfloat16,")
#: The smallest tile, without the fused finalisation: the cheapest to compile.
SMALLEST = re.compile(r"NONE,\s*128,\s*64,\s*128,")


def _sink(window: bool) -> Any:
    import torch
    from flashinfer.jit import gen_customize_batch_prefill_module
    from flashinfer.jit.attention.variants import attention_sink_decl

    # Newer releases tell two layouts apart, and the wrapper asks for these.
    options = {"paged_kv_stride_mode": "independent", "module_surface": "full"}
    parameters = inspect.signature(gen_customize_batch_prefill_module).parameters
    newer: dict[str, Any] = {name: value for name, value in options.items() if name in parameters}
    module = f"batch_prefill_attention_sink_bf16_swa_{window}_fa2"
    dtypes = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    extras = (["sink"], ["float"], ["sm_scale"], ["double"])
    variant = ("AttentionSink", attention_sink_decl["fa2"])
    newer |= {"pos_encoding_mode": 0, "use_sliding_window": window, "use_fp16_qk_reduction": False}
    make = gen_customize_batch_prefill_module
    return make("fa2", module, *dtypes, 64, 64, *extras, *variant, **newer)


def _xqa(window: bool) -> Any:
    import torch
    from flashinfer.jit.xqa import gen_xqa_module

    return gen_xqa_module(torch.bfloat16, torch.bfloat16, 16, 64, 8, window, torch.bfloat16)


def _generated(file: str, name: str) -> Any:
    functions: dict[str, Any] = vars(importlib.import_module(f"flashinfer.jit.{file}"))
    return functions[name]()


MODULES: dict[str, Any] = {
    "sampling": lambda: _generated("sampling", "gen_sampling_module"),
    "attention_sink_window": lambda: _sink(True),
    "attention_sink_full": lambda: _sink(False),
    "xqa_decode": lambda: _xqa(True),
    "xqa_full": lambda: _xqa(False),
    "fp4_quantize": lambda: _generated("fp4_quantization", "gen_fp4_quantization_sm120f_module"),
    "mxfp8_quantize": lambda: _generated("fp8_quantization", "gen_mxfp8_quantization_sm100_module"),
    "experts": lambda: _generated("fused_moe", "gen_cutlass_fused_moe_sm120_module"),
    "moe_mxfp8_mxfp4_unit": lambda: _generated("fused_moe", "gen_cutlass_fused_moe_sm120_module"),
}


def _one_moe_unit(units: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The generated MXFP8 x MXFP4 unit, cut to one kernel: whole ones need 8 GiB and minutes."""
    candidates = []
    for unit in units:
        text = Path(unit["source"]).read_text("utf-8")
        for match in INSTANTIATION.finditer(text):
            if MXFP8_MXFP4.search(match[0]):
                candidates.append((not SMALLEST.search(match[0]), unit, text, match.span()))
    if not candidates:
        raise LookupError("no generated unit instantiates the MXFP8 x MXFP4 grouped GEMM")
    _, unit, text, span = min(candidates, key=lambda item: item[0])

    def keep_one(match: re.Match[str]) -> str:
        return match[0] if match.span() == span else ""

    source = folder / "moe_mxfp8_mxfp4_unit.cu"
    source.write_text(INSTANTIATION.sub(keep_one, text), "utf-8")
    return [{"source": str(source), "arguments": unit["arguments"]}]


def main() -> None:
    """Answers one request."""
    request = json.loads(sys.argv[1])
    import flashinfer

    answer: dict[str, Any] = {"version": flashinfer.__version__}
    if request["ask"] == "targets":
        from flashinfer.compilation_context import CompilationContext

        answer["targets"] = {}
        for value in request["values"]:
            os.environ["FLASHINFER_CUDA_ARCH_LIST"] = value
            try:
                flags = CompilationContext().get_nvcc_flags_list()
                matches = [re.search(r"code=sm_(\w+)", flag) for flag in flags]
                answer["targets"][value] = [match[1] for match in matches if match]
            except (RuntimeError, ValueError) as error:
                answer["targets"][value] = f"{type(error).__name__}: {error}"
    elif request["ask"] == "build":
        spec = MODULES[request["module"]]()
        # `verbose` has no default before 0.7; several may ask at a time.
        options = {"verbose": False, "need_lock": True}
        parameters = inspect.signature(spec.build).parameters
        spec.build(**{name: value for name, value in options.items() if name in parameters})
        answer["library"] = str(spec.jit_library_path)
    else:
        units = []
        for entry in MODULES[request["module"]]().get_compile_commands():
            source, words = str(entry["file"]), shlex.split(entry["command"])
            if source.endswith(".cu"):
                arguments = words[words.index(source) + 1 : words.index("-o")]
                units.append({"source": source, "arguments": arguments})
        if request["module"] == "moe_mxfp8_mxfp4_unit":
            units = _one_moe_unit(units, Path(request["folder"]))
        answer["units"] = units
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


main()
