"""Log which attention and experts backend each layer uses. This code runs in vLLM's workers.

vLLM on the CPU logs no line about its attention backend, and no version logs how many layers have
sinks or a window. A profile that sets ``engine.speaking_worker`` starts vLLM with ``--worker-cls
sm121_probe.SpeakingWorker``: the platform's own worker, which adds these log lines after the model
is loaded and changes nothing else. The engine's PYTHONPATH contains only the folder of this file,
so this file cannot import the suite.
"""

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
    """The platform's own worker, which logs the backends of its layers."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model, and log the backends.

        Args:
            args: The arguments of the platform's worker.
            kwargs: The arguments of the platform's worker.

        Returns:
            The result of the platform's worker.
        """
        answer = super().load_model(*args, **kwargs)
        self._log_attention()
        self._log_experts()
        return answer

    def _log_attention(self) -> None:
        backends: Counter[str] = Counter()
        with_sinks = 0
        with_window = 0
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            backend = getattr(layer, "attn_backend", None)
            if backend is None:
                continue
            backends[f"{backend.get_name()} ({type(layer.impl).__name__})"] += 1
            if getattr(layer.impl, "sinks", None) is not None:
                with_sinks += 1
            if getattr(layer, "sliding_window", None):
                with_window += 1
        for name, layers in backends.items():
            logger.info(
                "Resolved attention backend: %s, %d layers; in all %d with sinks, %d with a window",
                name,
                layers,
                with_sinks,
                with_window,
            )

    def _log_experts(self) -> None:
        # vLLM up to 0.26 does not log which experts backend a CPU runs. Later versions do, and lack
        # this attribute.
        experts: Counter[str] = Counter()
        for module in self.model_runner.model.modules():
            method = getattr(module, "quant_method", None)
            kernel = getattr(method, "cpu_fused_moe", None)
            if kernel is not None:
                experts[type(kernel).__name__] += 1
        for name, layers in experts.items():
            logger.info("Resolved MoE backend: CPU (%s), %d layers", name, layers)
