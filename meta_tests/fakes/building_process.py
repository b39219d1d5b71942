"""Let FlashInfer build a module, and print its library.

    building_process.py FOLDER bf16|fp8 suite|flashinfer|xqa

The sink wrapper is built under the module name that FlashInfer used before 0.7.4. That older name
does not contain the dtype of the KV cache. ``suite`` builds the wrapper as the kernel level does,
``flashinfer`` as an engine does, and
``xqa`` builds XQA as the provider's call does. The library is not loaded. Several processes build
at the same time: each waits until the number of processes in the file FOLDER/expected is ready.
"""

import sys
import time
from pathlib import Path

import torch
import tvm_ffi
from flashinfer import BatchAttentionWithAttentionSinkWrapper as Sinks

from sm121.kernels import flashinfer_sinks

HEADS = flashinfer_sinks.LayerSizes(query_heads=64, kv_heads=8, head=64)


class Built(Exception):
    """Raised when FlashInfer has built a module and would load it next."""


def load_nothing(path, *_arguments, **_keywords):
    raise Built(path)


def old_name(jit_args_of):
    def named(*arguments, **keywords):
        backend, (_name, *jit_args), jit_keywords = jit_args_of(*arguments, **keywords)
        return backend, ["batch_prefill_attention_sink_bf16_swa_False_fa2", *jit_args], jit_keywords

    return staticmethod(named)


def build(cache: torch.dtype, how: str) -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    empty = torch.empty(0, dtype=torch.int32)
    if how == "xqa":
        from flashinfer.xqa import get_xqa_module

        get_xqa_module(torch.bfloat16, cache, 16, 64, 8, True, torch.bfloat16, 1)
    elif how == "suite":
        batch = flashinfer_sinks.Batch(empty, empty, empty, empty, 32)
        kernel = flashinfer_sinks.SinkKernel("NHD", torch.bfloat16, cache, None, HEADS)
        kernel.planned(Sinks, nothing, batch)
    else:
        kinds = {"q_data_type": torch.bfloat16, "kv_data_type": cache}
        Sinks(nothing, "NHD", backend="fa2", head_dim_qk=64, head_dim_vo=64, **kinds)


def main() -> None:
    folder = Path(sys.argv[1])
    kind = sys.argv[2]
    how = sys.argv[3]
    tvm_ffi.load_module = load_nothing
    Sinks._sink_jit_args = old_name(Sinks._sink_jit_args)
    (folder / f"ready-{kind}").touch()
    expected = int((folder / "expected").read_text())
    while len(list(folder.glob("ready-*"))) < expected:
        time.sleep(0.001)
    try:
        build(torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16, how)
    except Built as built:
        print(built)


main()
