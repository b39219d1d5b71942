"""SGLang: command line, environment and version."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import UsageError
from sm121.engines import argument_probe

_IN_ENGINE = Path(__file__).parent / "in_engine"
_NONE = 3
# Without importing sglang, which takes seconds and wants a GPU.
_VERSION_PROBE = f"""
import importlib.metadata as m, importlib.util as u, sys
if u.find_spec("sglang") is None:
    sys.exit({_NONE})
try:
    print(m.version("sglang"))
except m.PackageNotFoundError:
    print("")
"""


class SGLang:
    """SGLang's OpenAI-compatible server (``sglang.launch_server``)."""

    name = "sglang"
    reserved_arguments: tuple[str, ...] = (
        "--host",
        "--port",
        "--api-key",
        "--model-path",
        "--model",
        "--served-model-name",
    )
    reserved_variables: tuple[str, ...] = ("SM121_API_KEY",)

    def check_interpreter(self, python: str, environment: Mapping[str, str]) -> str | None:
        """Version of the SGLang that ``python`` has, None if not known.

        Raises:
            UsageError: there is no such interpreter, or it has no SGLang.
        """
        try:
            probe = subprocess.run(
                [python, "-c", _VERSION_PROBE],
                capture_output=True,
                text=True,
                timeout=60,
                env=dict(environment),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(
                f"--engine-python {python}: expected a Python interpreter ({error})"
            ) from error
        if probe.returncode == _NONE:
            raise UsageError(
                f"--engine-python {python}: expected an environment with SGLang, found none "
                "(`pip install sglang` in one of its own; its containers have it)"
            )
        if probe.returncode != 0:
            last = probe.stderr.strip().splitlines()[-1:] or ["no message"]
            raise UsageError(f"--engine-python {python}: cannot look for SGLang: {last[0]}")
        return probe.stdout.strip() or None

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        """``sglang.launch_server`` with the suite's key, and the metrics that the suite reads."""
        return [
            configuration.python,
            str(_IN_ENGINE / "sm121_sglang_launch.py"),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--model-path",
            configuration.model,
            "--served-model-name",
            configuration.served_name,
            "--enable-metrics",
            *configuration.arguments,
        ]

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        """The suite's environment, the configuration's on top."""
        environment = dict(os.environ)
        environment.update(
            {
                "SM121_API_KEY": api_key,
                "PYTHONUNBUFFERED": "1",
                "NO_COLOR": "1",
                "DO_NOT_TRACK": "1",
            }
        )
        if Path(configuration.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        if configuration.debug:
            environment.update(
                {
                    "CUDA_LAUNCH_BLOCKING": "1",
                    "TORCH_SHOW_CPP_STACKTRACES": "1",
                    "NCCL_DEBUG": "INFO",
                    "FLASHINFER_LOGLEVEL": "3",
                }
            )
        environment.update(dict(configuration.environment))
        return environment

    def check_arguments(
        self, python: str, lists: Sequence[Sequence[str]], environment: Mapping[str, str]
    ) -> list[str | None]:
        """SGLang's own message where its parser refuses a list of arguments, else None."""
        whole = [["--model-path", "model", *arguments] for arguments in lists]
        return argument_probe.ask("sm121_sglang_arguments.py", python, whole, environment)
