"""Lines of the GB10 effort's own build (fixtures/builds.toml), and what each proves."""

from __future__ import annotations

FROM = "(EngineCore_DP0 pid=131) INFO 02-09 07:05:01 [mxfp4.py:311] [MXFP4] "
LORA = "(EngineCore_DP0 pid=131) INFO 02-09 07:05:01 [mxfp4.py:290] [MXFP4+LoRA] "
WARNS = "(EngineCore_DP0 pid=131) WARNING 02-09 07:05:01 [mxfp4.py:240] [MXFP4] "
FLASHINFER = "(EngineCore_DP0 pid=131) 2026-02-09 07:07:07,965 - INFO - core.py:1189 - "
JIT = FLASHINFER + "flashinfer.jit: JIT-compiling "
CUTLASS = "FLASHINFER_CUTLASS_MXFP4_MXFP8"
HEAD = "lm_head quantized: torch.Size([201088, 2880]) BF16 -> torch.Size([201088, 1440]) FP4 "

_BY_NAME = {
    "CUTLASS": CUTLASS,
    "cutlass": CUTLASS,
    "gemm": CUTLASS,
    "MARLIN": "MARLIN",
    "triton": "TRITON",
    "TRTLLM": "FLASHINFER_TRTLLM_MXFP4_BF16",
    "trtllm-mxfp8": "FLASHINFER_TRTLLM_MXFP4_MXFP8",
    "TRTLLM_MXFP8": "FLASHINFER_TRTLLM_MXFP4_MXFP8",
}
DEPRECATED = " is deprecated. Use VLLM_MXFP4_BACKEND={} instead."
_BY_VARIABLE = {
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": CUTLASS,
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "FLASHINFER_TRTLLM_MXFP4_MXFP8",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "FLASHINFER_TRTLLM_MXFP4_BF16",
    "VLLM_MXFP4_USE_MARLIN": "MARLIN",
}

PROVES: list[tuple[str, str, object]] = [
    *(
        (f"{FROM}Using backend: {name} (--mxfp4-backend)", "moe", moe)
        for name, moe in _BY_NAME.items()
    ),
    (FROM + "Using backend: CUTLASS (VLLM_MXFP4_BACKEND=cutlass)", "moe", CUTLASS),
    (FROM + "SM121 auto-selected: cutlass", "moe", CUTLASS),
    (FROM + "Auto-selected: Marlin (universal fallback)", "moe", "MARLIN"),
    (FROM + "SM100 auto-selected: trtllm", "moe", "FLASHINFER_TRTLLM_MXFP4_BF16"),
    (LORA + "Using explicit backend: triton", "moe", "TRITON"),
    (LORA + "Auto-selected: Marlin", "moe", "MARLIN"),
    (
        LORA + "VLLM_MXFP4_BACKEND=cutlass does not support LoRA. Falling back to Marlin.",
        "moe",
        "MARLIN",
    ),
    *((WARNS + name + DEPRECATED.format("x"), "moe", moe) for name, moe in _BY_VARIABLE.items()),
    (WARNS + "VLLM_MXFP4_USE_MARLIN" + DEPRECATED.replace("={}", ""), "moe", "MARLIN"),
    (WARNS + "VLLM_MXFP4_MOE_KERNEL" + DEPRECATED.format("gemm"), "moe", CUTLASS),
    (FROM + "Using backend: CUTLASS (--mxfp4-backend)", "native_fp4", True),
    (FROM + "SM121 auto-selected: cutlass", "native_fp4", True),
    (FROM + HEAD + "(4x smaller)", "requantised", ["lm_head"]),
    (FROM + HEAD + "(4x smaller)", "build", "mxfp4"),
    (
        "(APIServer pid=1) INFO 02-09 07:04:49 [utils.py:253] non-default args: "
        "{'mxfp4_layers': 'moe'}",
        "build",
        "mxfp4",
    ),
    (JIT + "1 fused MoE module(s) for SM121: [(64, 128)]", "moe_variant", "fused"),
    (
        JIT + "2 unfused MoE module(s) for SM121: [(64, 128), (32, 128)]",
        "moe_tiles",
        "(64, 128), (32, 128)",
    ),
    (
        "(EngineCore_DP0 pid=131) INFO 02-09 07:05:01 [utils.py:475] `_KV_CACHE_LAYOUT_OVERRIDE` "
        "variable detected. Setting KV cache layout to HND.",
        "kv_layout",
        "HND",
    ),
    (
        "(APIServer pid=1) INFO 02-09 07:04:54 [cache.py:205] Using fp8 data type to store kv "
        "cache. It reduces the GPU memory footprint and boosts the performance.",
        "kv_cache_dtype",
        "fp8",
    ),
    ("INFO 02-09 07:04:54 [model.py:1531] Using max model len 131072", "context", 131072),
    (
        "(EngineCore_DP0 pid=131) ERROR 02-24 19:04:56 [dump_input.py:72] Dumping input data for "
        "V1 LLM engine (v0.1.dev12770+g045293d82) with config: model='m', max_seq_len=4096, x=1",
        "context",
        4096,
    ),
    (
        "(EngineCore_DP0 pid=131) ERROR 02-24 19:04:56 [dump_input.py:72] Dumping input data for "
        "V1 LLM engine (v0.1.dev12770+g045293d82) with config: model='m', max_seq_len=4096, x=1",
        "version",
        "0.1.dev12770+g045293d82",
    ),
    (
        "(Worker_TP0 pid=57) INFO 06-21 07:20:07 [llm_base_proposer.py:1334] Detected MTP model. "
        "Sharing target model embedding weights with the draft model.",
        "speculative",
        "mtp",
    ),
    (
        "(EngineCore pid=7) INFO 10-05 02:13:33 [__init__.py:975] Using CutlassNvFp4LinearKernel "
        "for NVFP4 GEMM",
        "native_fp4",
        True,
    ),
]

FALLBACKS = {
    "mxfp4_unknown_backend": WARNS + "Unknown backend 'CUTLAS' from --mxfp4-backend. Valid "
    "options: cutlass, marlin, triton, trtllm. Using auto.",
    "mxfp4_universal": FROM + "Auto-selected: Marlin (universal fallback)",
    "mxfp4_lora": LORA + "VLLM_MXFP4_BACKEND=cutlass does not support LoRA. Falling back to "
    "Marlin.",
}

#: Words that are near to those and prove nothing.
SILENT = [
    FROM + "Using backend: gemv (--mxfp4-backend)",
    FROM + "Using backends: CUTLASS (--mxfp4-backend)",
    FROM + "Unknown backend 'CUTLASS' tried",
    "(EngineCore_DP0 pid=131) INFO [flashinfer.py:334] SM12x detected - using native FlashInfer "
    "CUTLASS attention instead of TRT-LLM attention (cubins not available for SM12x)",
    WARNS + "VLLM_MXFP4_MOE_KERNEL" + DEPRECATED.replace("={}", ""),
    WARNS + "VLLM_MXFP4_MOE_KERNEL" + DEPRECATED.format("gemv"),
    FROM + "lm_head quantized: torch.Size([201088, 2880]) BF16 -> torch.Size([512, 1440]) FP4",
    FROM + "lm_head kept in BF16",
    FLASHINFER + "flashinfer.jit: MoE prewarm complete",
    FLASHINFER + "flashinfer.jit: [Autotuner]: Autotuning process ends",
    FLASHINFER + "flashinfer.jit: JIT-compiling 1 other MoE module(s) for SM121: []",
    "(APIServer pid=1) INFO 02-09 07:04:54 [model.py:1531] Using max model length",
    "(EngineCore pid=7) INFO [__init__.py:975] Using MarlinNvFp4LinearKernel for NVFP4 GEMM",
    "(EngineCore pid=7) INFO [__init__.py:604] Selected CutlassFp8BlockScaledMMKernel for x",
    "(EngineCore pid=7) INFO [eagle.py:1] Detected EAGLE model without its own lm_head.",
    # harmless ones of the build
    "(APIServer pid=1) WARNING 02-09 07:04:54 [vllm.py:1439] Current vLLM config is not set.",
    "(EngineCore_DP0 pid=2255) WARNING 01-30 23:46:42 [decorators.py:424] Cannot load aot "
    "compilation from path /root/.cache/vllm/model, error: load_compiled_function() got an "
    "unexpected keyword argument 'f_globals'",
    "(APIServer pid=1) WARNING 02-09 07:08:30 [serving_responses.py:222] For gpt-oss, we ignore "
    "--enable-auto-tool-choice and always enable tool use.",
]
