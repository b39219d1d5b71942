"""Stands for an engine whose start fails as vLLM's does when the GPU has too little memory: its
core says why, and is then killed by the engine itself. A tool for the meta tests."""

import sys

CORE = "(EngineCore pid=7) ERROR 11-20 10:00:01 [core.py:1510] "
for line in (
    "INFO 11-20 10:00:00 [api_utils.py:347] version 0.32.0",
    "INFO 11-20 10:00:00 [core.py:133] Initializing a V1 LLM engine (v0.32.0)",
    f"{CORE}EngineCore failed to start.",
    f"{CORE}Traceback (most recent call last):",
    f'{CORE}  File "/venv/vllm/v1/worker/gpu_model_runner.py", line 4310, in load_model',
    f"{CORE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 61.86 GiB. GPU 0 has a "
    "total capacity of 119.64 GiB of which 41.07 GiB is free.",
    "RuntimeError: Engine core initialization failed. See root cause above.",
):
    print(line, flush=True)
sys.exit(1)
