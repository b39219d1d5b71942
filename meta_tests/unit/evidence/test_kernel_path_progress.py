"""The progress of a start is read from the lines of its log."""

import pytest

from meta_tests.folders import DATA
from sm121.evidence.signatures import startup_progress


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        pytest.param(
            (
                "Loading safetensors checkpoint shards:  33% Completed | 1/3 [00:00<00:00, "
                " 2.81it/s]"
            ),
            "loading weights (33 %)",
            id="Loading safetensors checkpoint shards: 33% Completed |",
        ),
        pytest.param(
            "Capturing CUDA graphs (decode, FULL):  60%|██████    | 3/5",
            "capturing CUDA graphs (60 %)",
            id="Capturing CUDA graphs (decode, FULL): 60%| | 3/5",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [gpu_model_runner.py:4481] "
                "Starting to load model m..."
            ),
            "loading weights",
            id="(EngineCore pid=7) INFO 10-05 02:13:33",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [default_loader.py:384] Loading "
                "weights took 5.15 seconds"
            ),
            "weights loaded",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (2)",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [cpu_model_runner.py:87] Warming "
                "up model for the compilation..."
            ),
            "compiling",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (3)",
        ),
        pytest.param(
            ("(EngineCore pid=7) INFO 10-05 02:13:33 [cpu_model_runner.py:91] Warming up done."),
            "warming up",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (4)",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [gpu_worker.py:760] Available KV "
                "cache memory: 35.64 GiB"
            ),
            "profiling memory",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (5)",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [kv_cache_utils.py:2328] CPU KV "
                "cache size: 87,296 tokens, Maximum"
            ),
            "allocating the KV cache",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (6)",
        ),
        pytest.param(
            "[3/10] /usr/local/cuda/bin/nvcc -c x.cu -o x.cuda.o",
            "building kernels (JIT) (3 of 10)",
            id="(3/10) /usr/local/cuda/bin/nvcc -c x.cu -o x.cuda.o",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [entry.py:139] Starting vLLM "
                "server on http://0.0.0.0:8000"
            ),
            "opening the port",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (entry.py:139)",
        ),
        pytest.param(
            "(APIServer pid=1) INFO:     Application startup complete.",
            "ready",
            id="(APIServer pid=1) INFO: Application startup complete.",
        ),
        pytest.param(
            'INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK',
            None,
            id='INFO: 127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK',
        ),
        pytest.param(
            ("(EngineCore pid=7) WARNING 10-05 02:13:33 [base.py:380] Chat template warmup failed"),
            None,
            id="(EngineCore pid=7) WARNING 10-05 02:13:33 (base.py:380)",
        ),
    ],
)
def test_startup_progress(line, phase):
    assert startup_progress(line) == phase


def test_startup_progress_of_a_real_start():
    lines = (DATA / "vllm-0.32-cpu-stopped.log").read_text("utf-8").splitlines()
    phases = [phase for phase in map(startup_progress, lines) if phase]
    assert (phases[0], phases[-1]) == ("starting the API server", "ready")
    assert len(set(phases)) >= 7
