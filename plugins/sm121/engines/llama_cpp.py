"""llama.cpp: the command line, environment and version of llama-server."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import UsageError
from sm121.engines.python_engine import own_options

_WITHIN_S = 60.0


class LlamaCpp:
    """llama.cpp's ``llama-server``. It is a program: no interpreter, no packages."""

    name = "llama-cpp"
    program = "llama-server"
    reserved_arguments: tuple[str, ...] = (
        "--host", "--port", "--api-key", "--api-key-file", "-m", "--model", "-a", "--alias",
    )  # fmt: skip
    reserved_variables: tuple[str, ...] = ("LLAMA_API_KEY",)

    def check_interpreter(self, python: str, environment: Mapping[str, str]) -> str | None:
        """Version of the program, None: it does not say. Raises UsageError: there is none."""
        answer = _run([python, "--version"], environment, python)
        match = re.search(r"version: (\S+)", answer.stderr + answer.stdout)
        return match[1] if match else None

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        """With the metrics that the suite reads. The key comes by the environment."""
        return [
            configuration.python,
            *own_options(configuration, port, name="--alias"),
            "--metrics",
            *configuration.given,
        ]

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        """The suite's environment, the configuration's on top. Only from verbosity 4 on its log
        says which tensors, attention and caches it has."""
        return {
            **os.environ,
            "LLAMA_API_KEY": api_key,
            "LLAMA_ARG_LOG_COLORS": "off",
            "LLAMA_ARG_LOG_VERBOSITY": "4",
            **dict(configuration.environment),
        }

    def check_arguments(
        self, python: str, lists: Sequence[Sequence[str]], environment: Mapping[str, str]
    ) -> list[str | None]:
        """The program's own message where it refuses a list of arguments, else None: it reads them
        in their order, and ends at ``--version``."""
        answers: list[str | None] = []
        for arguments in lists:
            done = _run([python, *arguments, "--version"], environment, python)
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            wrong = next((line for line in lines if "error" in line.lower()), None)
            answers.append(
                wrong or (lines[-1] if lines else "refused") if done.returncode else None
            )
        return answers


def _run(
    command: list[str], environment: Mapping[str, str], program: str
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_WITHIN_S, env=dict(environment)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"--engine-binary {program}: expected llama-server ({error}); build it from "
            "llama.cpp (`cmake -B build && cmake --build build --target llama-server`)"
        ) from error
