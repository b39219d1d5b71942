"""The object that a test gets from the fixture `llm_server_factory`."""

import contextlib
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from pytest_llm_server import ServerFailed, options
from pytest_llm_server.run import Run
from pytest_llm_server.server import LlmServer
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.core.errors import UsageError
from sm121.engines import protocol, registry

_NO_MODEL = (
    "expected a model: give --llm-model MODEL or llm_model in pytest.ini, or the address of a "
    "running server with --base-url URL"
)


class LlmServerFactory:
    """Starts servers, one per ``with`` block.

    Args:
        run: The pytest run.
        folder: The folder for logs and crash bundles.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self._folder = folder

    def __call__(
        self,
        model: str | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        engine: str | None = None,
        ready_within_s: float | None = None,
    ) -> AbstractContextManager[LlmServer]:
        """Start a server for a ``with`` block, and stop it at the end of the block.

        The server of the fixture `llm_server` is stopped first, unless the test uses that fixture,
        too. With ``--base-url``, the test is skipped instead.

        Args:
            model: The model: a folder or a Hugging Face name. If None, the model of the run is
                used, and the run's engine arguments are put before ``arguments``.
            arguments: Command-line arguments of the engine.
            environment: Environment variables of the engine, in addition to those of this process.
            engine: ``vllm``, ``sglang`` or ``llama-cpp``; None for the engine of the run.
            ready_within_s: The maximum duration of the start in seconds; None for the limit of the
                run.

        Raises:
            ServerFailed: The server did not start, died, or did not stop cleanly; or an argument is
                invalid.
        """
        __tracebackhide__ = True
        asked = self._run.servers().asked
        if asked.base_url is not None:
            pytest.skip(f"needs a server of its own; the run uses {asked.base_url}")
        arguments = _texts(arguments)
        environment = environment or {}
        _refuse_environment(environment)
        if ready_within_s is None:
            ready_within_s = asked.ready_within_s
        _refuse_seconds(ready_within_s)
        _refuse_nul("model", [] if model is None else [str(model)])
        _refuse_nul("arguments", arguments)
        self._run.make_room()
        if model is None:
            model = asked.model
            arguments = (*asked.arguments, *arguments)
        return self._started(
            model,
            arguments,
            environment,
            engine or asked.engine,
            ready_within_s,
        )

    def of_the_run(self) -> AbstractContextManager[LlmServer]:
        """Provide the server of the run for a ``with`` block.

        The plugin starts it or attaches to it.

        Raises:
            ServerFailed: The user named no model, no server answers at ``--base-url``, or an error
                of `__call__` occurred.
        """
        __tracebackhide__ = True
        asked = self._run.servers().asked
        if asked.base_url is not None:
            try:
                server = self._run.servers().attach(asked.base_url, self._run.option)
            except UsageError as error:  # happens in an xdist worker, which cannot abort the run
                raise ServerFailed(str(error)) from None
            return contextlib.nullcontext(server)
        return self._started(asked.model, asked.arguments, {}, asked.engine, asked.ready_within_s)

    def _started(
        self,
        model: str | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        engine: str,
        ready_within_s: float,
    ) -> AbstractContextManager[LlmServer]:
        __tracebackhide__ = True
        if model is None:
            raise ServerFailed(_NO_MODEL)
        wrong = options.wrong_start(engine, arguments, environment)
        if wrong is not None:
            raise ServerFailed(wrong)
        configuration = ServerConfiguration(
            name="llm",
            engine=engine,
            python=_python(engine),
            model=str(model),
            served_name=str(model),
            arguments=tuple(arguments),
            environment=environment_items(environment),
        )
        return self._run.servers().started(configuration, ready_within_s, self._folder)


def _texts(arguments: Iterable[object]) -> tuple[str, ...]:
    """Return the arguments of an engine. Raise ServerFailed if one is not a string."""
    __tracebackhide__ = True
    texts: list[str] = []
    if isinstance(arguments, Iterable) and not isinstance(arguments, str):
        for each in arguments:
            if not isinstance(each, str):
                raise ServerFailed(f"arguments: expected a list of texts, got {each!r} in it")
            texts.append(each)
        return tuple(texts)
    raise ServerFailed(f'arguments: expected a list such as ["--seed", "0"], got {arguments!r}')


def _refuse_nul(name: str, texts: Iterable[str]) -> None:
    """Reject texts with a NUL character, which a command line cannot contain."""
    __tracebackhide__ = True
    for text in texts:
        if "\0" in text:
            raise ServerFailed(f"{name}: expected no NUL character, got {text!r}")


def _refuse_environment(environment: object) -> None:
    """Reject anything except a mapping of strings.

    Values are not shown, because they may be secret.
    """
    __tracebackhide__ = True
    if not isinstance(environment, Mapping):
        kind = type(environment).__name__
        raise ServerFailed(f"environment: expected a mapping of texts, got a {kind}")
    for name, value in environment.items():
        if not isinstance(name, str) or not isinstance(value, str):
            kind = type(value).__name__
            raise ServerFailed(f"environment: expected texts, got a value of type {kind} of {name}")
        if "\0" in name or "=" in name or not name:
            raise ServerFailed(f"environment: expected a name of a variable, got {name!r}")
        if "\0" in value:
            raise ServerFailed(f"environment: expected no NUL character, got one in {name}")


def _refuse_seconds(seconds: object) -> None:
    __tracebackhide__ = True
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ServerFailed(f"ready_within_s: expected seconds above 0, got {seconds!r}")


def _python(engine: str) -> str:
    """Return the Python interpreter for an engine, or the path of an engine's executable."""
    described = registry.engine(engine)
    if not isinstance(described, protocol.Program):
        return sys.executable
    path = shutil.which(described.program)
    if path is None:
        raise ServerFailed(f"engine {engine}: expected {described.program} on the PATH")
    return path
