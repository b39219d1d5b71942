"""Engines that are Python packages in their own environment: vLLM and SGLang."""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from sm121.core import interpreter
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import OptionError, UsageError
from sm121.engines.ports import LOOPBACK

#: Scripts that run in the engine's interpreter, without the suite.
IN_ENGINE = Path(__file__).parent / "in_engine"
_ARGUMENTS_WITHIN_S = 180.0
#: Environment variables that every engine gets.
_VARIABLES = {"DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
#: Environment variables that every engine gets with ``--engine-debug``.
_DEBUG_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "NCCL_DEBUG": "INFO",
    "FLASHINFER_LOGLEVEL": "3",
}


def own_options(
    configuration: ServerConfiguration,
    port: int,
    *,
    model: str = "--model",
    name: str = "--served-model-name",
) -> list[str]:
    """Return the options that every server gets.

    Args:
        configuration: The configuration of the server.
        port: The port of 127.0.0.1 at which the server must listen.
        model: The engine's option for the model.
        name: The engine's option for the served name.
    """
    address = ["--host", LOOPBACK, "--port", str(port)]
    return [*address, model, configuration.model, name, configuration.served_name]


class PythonEngine:
    """The common part of engines that are Python packages."""

    name: str

    #: The engine's name in messages.
    title: ClassVar[str]
    #: How to install the engine, for messages.
    remedy: ClassVar[str]

    def check_interpreter(self, python: str, environment: Mapping[str, str]) -> str | None:
        """Return the version of the engine that an interpreter imports, or None if it is unknown.

        Args:
            python: The interpreter.
            environment: The whole environment of the engine.

        Raises:
            OptionError: The interpreter does not exist, or the engine is not installed in it.
        """
        try:
            release = _version_once(python, self.name, frozenset(environment.items()))
        except interpreter.NoAnswer as error:
            raise OptionError(
                "--engine-python",
                f"{python}: expected a Python interpreter that reports its version of "
                f"{self.title} ({error})",
            ) from error
        if release is None:
            raise OptionError(
                "--engine-python",
                f"{python}: expected an environment with {self.title}, got none ({self.remedy})",
            )
        return release["version"] or None

    def check_arguments(
        self, python: str, lists: Sequence[Sequence[str]], environment: Mapping[str, str]
    ) -> list[str | None]:
        """Return the engine's own message for each list of arguments; None if it accepts it.

        Args:
            python: The interpreter.
            lists: The lists of arguments.
            environment: The whole environment of the engine.

        Raises:
            UsageError: The engine is not installed in the interpreter, or its parser cannot be run.
        """
        return list(self._parser(python, lists, environment)["refused"])

    def options(self, python: str, environment: Mapping[str, str]) -> frozenset[str]:
        """Return the options of the engine's own parser, for example ``--moe-backend``.

        Args:
            python: The interpreter.
            environment: The whole environment of the engine.

        Raises:
            UsageError: The engine is not installed in the interpreter, or its parser cannot be run.
        """
        return _options_once(self, python, frozenset(environment.items()))

    def _parser(
        self, python: str, lists: Sequence[Sequence[str]], environment: Mapping[str, str]
    ) -> dict[str, Any]:
        question = {"engine": self.name, "lists": [list(arguments) for arguments in lists]}
        try:
            answer = interpreter.ask(
                python,
                IN_ENGINE / "sm121_arguments.py",
                environment,
                question,
                within_s=_ARGUMENTS_WITHIN_S,
            )
            return dict(answer)
        except interpreter.NoAnswer as error:
            raise UsageError(
                f"--engine-python {python}: its engine's own parser cannot be run: {error}"
            ) from error

    def _environment(
        self,
        configuration: ServerConfiguration,
        own: Mapping[str, str],
        debug: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Return the suite's environment with the variables of the engine and the configuration.

        Args:
            configuration: The configuration of the server.
            own: The engine's own variables.
            debug: The engine's variables for ``--engine-debug``.
        """
        environment = {**os.environ, **_VARIABLES, **own}
        if Path(configuration.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        if configuration.debug:
            environment.update(_DEBUG_VARIABLES)
            environment.update(debug or {})
        return {**environment, **dict(configuration.environment)}


@functools.cache
def _options_once(
    engine: PythonEngine, python: str, environment: frozenset[tuple[str, str]]
) -> frozenset[str]:
    return frozenset(engine._parser(python, (), dict(environment))["options"])


@functools.cache
def _version_once(python: str, package: str, environment: frozenset[tuple[str, str]]) -> Any:
    return interpreter.package(python, package, dict(environment))
