"""Runs inside vLLM's workers: logs which attention and experts each layer really resolved to. vLLM
on the CPU logs no line about its attention backend, and no version's log says how many layers have
sinks or a window. A profile that sets ``engine.speaking_worker`` starts vLLM with ``--worker-cls
sm121_probe.SpeakingWorker``: the platform's own worker, which adds one log line after the model is
loaded and changes nothing else. This folder is on the engine's PYTHONPATH, alone: this file may
import nothing of the suite."""

from collections import Counter
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

logger = init_logger("vllm.sm121_probe")


class SpeakingWorker(PlatformWorker):  # type: ignore[misc]
    """The platform's own worker, which says what its layers resolved to."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().load_model(*args, **kwargs)
        backends: Counter[str] = Counter()
        sinks = windows = 0
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            backend = getattr(layer, "attn_backend", None)
            if backend is None:
                continue
            backends[f"{backend.get_name()} ({type(layer.impl).__name__})"] += 1
            sinks += getattr(layer.impl, "sinks", None) is not None
            windows += bool(getattr(layer, "sliding_window", None))
        for name, layers in backends.items():
            logger.info(
                "Resolved attention backend: %s, %d layers; in all %d with sinks, %d with a window",
                name,
                layers,
                sinks,
                windows,
            )
        # Up to vLLM 0.26 no line says which experts a CPU runs; later ones have no such attribute.
        methods = (getattr(m, "quant_method", None) for m in self.model_runner.model.modules())
        kernels = (getattr(method, "cpu_fused_moe", None) for method in methods)
        experts = Counter(type(kernel).__name__ for kernel in kernels if kernel is not None)
        for name, layers in experts.items():
            logger.info("Resolved MoE backend: CPU (%s), %d layers", name, layers)
        return answer
