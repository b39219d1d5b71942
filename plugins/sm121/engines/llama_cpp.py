"""llama.cpp: the command line, environment and version of llama-server."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import OptionError
from sm121.engines.python_engine import own_options

_WITHIN_S = 60.0


class LlamaCpp:
    """llama.cpp's ``llama-server``. It is an executable, without an interpreter and packages."""

    name = "llama-cpp"
    program = "llama-server"
    reserved_arguments: tuple[str, ...] = (
        "--host", "--port", "--api-key", "--api-key-file", "-m", "--model", "-hf", "--hf-repo",
        "-a", "--alias",
    )  # fmt: skip
    reserved_variables: tuple[str, ...] = ("LLAMA_API_KEY",)

    def check_interpreter(self, python: str, environment: Mapping[str, str]) -> str | None:
        """Return the version of the program, or None if the program does not print it.

        Args:
            python: The path of the program.
            environment: The whole environment in which it would run.

        Raises:
            UsageError: The program does not exist.
        """
        answer = _run([python, "--version"], environment, python)
        match = re.search(r"version: (\S+)", answer.stderr + answer.stdout)
        return match[1] if match else None

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        """Return the command line, see `protocol.Engine`.

        The command enables the metrics that the suite reads. The API key is passed in the
        environment. If the model is not a file, it is taken as a repository of the Hugging Face
        hub, which the server loads from its cache or downloads.

        Args:
            configuration: The configuration of the server.
            port: The port of 127.0.0.1 at which it must listen.
        """
        model = "--model" if Path(configuration.model).exists() else "--hf-repo"
        return [
            configuration.python,
            *own_options(configuration, port, model=model, name="--alias"),
            "--metrics",
            *configuration.given,
        ]

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        """Return the whole environment, see `protocol.Engine`.

        The environment sets verbosity 4, because the log describes the tensors, the attention and
        the caches only from this verbosity on.

        Args:
            configuration: The configuration of the server.
            api_key: The key that the server must require.
        """
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
        """Return the program's own message for each list of arguments; None if it accepts it.

        The program checks its arguments in their order, and exits at ``--version``, so this method
        appends ``--version`` to each list.

        Args:
            python: The path of the program.
            lists: The lists of arguments.
            environment: The whole environment in which it would run.

        Raises:
            UsageError: The program does not exist.
        """
        answers: list[str | None] = []
        for arguments in lists:
            done = _run([python, *arguments, "--version"], environment, python)
            if done.returncode == 0:
                answers.append(None)
            else:
                answers.append(_message_of(done.stderr))
        return answers


def _message_of(output: str) -> str:
    """Return the first line with an error, or else the last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    for line in lines:
        if "error" in line.lower():
            return line
    return lines[-1] if lines else "refused"


def _run(
    command: list[str], environment: Mapping[str, str], program: str
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_WITHIN_S, env=dict(environment)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OptionError(
            "--engine-binary",
            f"{program}: expected llama-server ({error}); build it from llama.cpp "
            "(`cmake -B build && cmake --build build --target llama-server`)",
        ) from error
