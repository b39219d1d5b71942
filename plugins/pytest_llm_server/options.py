"""The command-line options, and the settings in pytest.ini."""

import math
import os
import re
import shlex
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_BASE_URL = "--base-url"
_ENGINE = "vllm"
_READY_WITHIN_S = "300"
#: The longest time limit of a start, in seconds.
_MOST_S = 86400.0
#: The suite's plugin, which has its own option ``--base-url`` for an attached server.
_SUITE = "sm121.plugin"
#: Whether ``--base-url`` is the address of an LLM server. Another plugin may have an option of that
#: name for a web site.
_MEANS_A_SERVER = pytest.StashKey[bool]()


@dataclass(frozen=True)
class Asked:
    """The server that the user requested.

    Attributes:
        base_url: The address of a running server; None if the plugin starts a server.
        engine: The name of the engine to start.
        model: The model to start, or the served model of a running server; None if the user named
            none.
        arguments: Command-line arguments of the engine.
        ready_within_s: The maximum duration of a start in seconds.
    """

    base_url: str | None
    engine: str
    model: str | None
    arguments: tuple[str, ...]
    ready_within_s: float


def add(parser: pytest.Parser) -> None:
    """Add the ``--llm-...`` options and the settings.

    Args:
        parser: The parser of pytest.
    """
    group = parser.getgroup("llm_server", "server of a language model")
    group.addoption(
        "--llm-model",
        metavar="MODEL",
        help=("model to serve: a folder or a name on the Hugging Face hub"),
    )
    group.addoption(
        "--llm-args",
        metavar="TEXT",
        help="arguments of the engine in one string; split as by a shell, but not run by one",
    )
    group.addoption("--llm-engine", metavar="NAME", help="vllm (default), sglang or llama-cpp")
    group.addoption(
        "--llm-ready-within",
        metavar="SECONDS",
        help=(
            f"maximum duration of a start in seconds (default: {_READY_WITHIN_S}); it does not "
            "count for a test's timeout"
        ),
    )
    parser.addini("llm_model", "as --llm-model")
    parser.addini("llm_args", "as --llm-args", type="args")
    parser.addini("llm_engine", "as --llm-engine", default=_ENGINE)
    parser.addini("llm_ready_within", "as --llm-ready-within", default=_READY_WITHIN_S)
    parser.addini("llm_base_url", "as --base-url")


def add_base_url(config: pytest.Config, parser: pytest.Parser) -> None:
    """Add ``--base-url``, unless another plugin or a conftest.py has an option of that name.

    Args:
        config: The configuration of the run, to which all plugins have added their options.
        parser: The parser of pytest.
    """
    _, unknown = parser.parse_known_and_unknown_args([f"{_BASE_URL}=http://localhost"])
    is_free = bool(unknown)
    if is_free:
        parser.getgroup("llm_server").addoption(
            _BASE_URL, metavar="URL", help="use a running server; the plugin never stops it"
        )
    config.stash[_MEANS_A_SERVER] = is_free or config.pluginmanager.hasplugin(_SUITE)


def conflict(error: ValueError) -> str | None:
    """Return an error message if a conftest.py or another plugin has an option of the same name.

    Args:
        error: The error that ended the import of a conftest.py, or `add`.

    Returns:
        The message, with the file of a conftest.py; None if the error has another cause.
    """
    name = re.search(r"'(--llm-[a-z-]+)'", str(error))
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    if name is None or "already" not in str(error):  # pytest's message contains this word
        return None
    others = [os.path.relpath(file) for file in files if file.name == "conftest.py"]
    other = others[-1] if others else "another plugin"
    return (
        f"{other}: expected an option of another name than {name[1]}, which the plugin "
        "pytest_llm_server has. Rename it, or leave out the plugin: -p no:pytest_llm_server"
    )


def read_options(config: pytest.Config) -> Asked:
    """Read the user's options from the command line, or else from pytest.ini.

    Args:
        config: The configuration of the run.

    Raises:
        pytest.UsageError: A value is invalid.
    """
    _refuse_empty_values(config)
    base_url = None
    if config.stash.get(_MEANS_A_SERVER, False):
        base_url = config.getoption(_BASE_URL)
    base_url = base_url or config.getini("llm_base_url") or None
    if base_url is not None:
        _refuse_options_of_a_start(config)
    engine = config.getoption("--llm-engine") or config.getini("llm_engine")
    arguments = _arguments(config)
    wrong = wrong_start(engine, arguments)
    if wrong is not None:
        raise pytest.UsageError(wrong)
    return Asked(
        base_url=base_url,
        engine=engine,
        model=config.getoption("--llm-model") or config.getini("llm_model") or None,
        arguments=arguments,
        ready_within_s=_seconds(config),
    )


def wrong_start(engine: str, arguments: Sequence[str], variables: Iterable[str] = ()) -> str | None:
    """Return why an engine cannot be started with some arguments; None if no reason is known.

    Args:
        engine: The name of the engine.
        arguments: The command-line arguments of the engine.
        variables: The names of environment variables to add to those of this process.
    """
    from sm121.engines import registry  # imports the suite, needed only here

    if engine not in registry.names():
        return (
            f"engine {engine}: expected one of {', '.join(registry.names())}. Use any other "
            f"OpenAI-compatible server with {_BASE_URL}"
        )
    argument = registry.reserved(engine, arguments)
    if argument is not None:
        return (
            f"argument {argument.written} of {engine}: the plugin sets {argument.name} itself. "
            "Leave it out"
        )
    variable = registry.reserved(engine, (), variables)
    if variable is not None:
        return f"variable {variable.name} of {engine}: the plugin sets it itself. Leave it out"
    return None


def _refuse_empty_values(config: pytest.Config) -> None:
    """Refuse an empty value, with which another server than the expected one would be tested."""
    names = ["--llm-model", "--llm-engine", "--llm-ready-within"]
    if config.stash.get(_MEANS_A_SERVER, False):
        names.append(_BASE_URL)
    for name in names:
        if config.getoption(name) == "":
            raise pytest.UsageError(
                f"{name} '': expected a value, got an empty one. Leave the option out, or set the "
                "variable that its value comes from"
            )


def _refuse_options_of_a_start(config: pytest.Config) -> None:
    for name in ("--llm-args", "--llm-engine"):
        if config.getoption(name):
            raise pytest.UsageError(
                f"{name} with {_BASE_URL}: {name} only applies to a server that the plugin starts. "
                "Leave out one of them"
            )


def _arguments(config: pytest.Config) -> tuple[str, ...]:
    text = config.getoption("--llm-args")
    if text is None:
        try:
            return tuple(config.getini("llm_args"))
        # The exception depends on pytest's version.
        except (ValueError, pytest.UsageError) as error:
            raise pytest.UsageError(f"llm_args in pytest.ini: {error}") from error
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise pytest.UsageError(f"--llm-args {text}: {error}") from error


def _seconds(config: pytest.Config) -> float:
    text = config.getoption("--llm-ready-within") or config.getini("llm_ready_within")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MOST_S:
        raise pytest.UsageError(
            f"--llm-ready-within {text}: expected seconds above 0 and at most {_MOST_S:g}, a day"
        )
    return seconds
