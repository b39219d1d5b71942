"""Adapt the remedies for failures to other engines than vLLM.

The remedies in ``fixtures/signatures/failures.toml`` name options of vLLM. `for_engine` replaces
them by the options of another engine, or by neutral words (``fixtures/other-engines.toml``).
"""

from pathlib import Path

from pydantic import Field

from sm121.core import data_file
from sm121.core.data_file import DataTable
from sm121.evidence.failure import Cause

#: The number of bytes at the beginning of a log that are searched for words of an engine.
_SEARCHED = 4 << 20


class _Engine(DataTable):
    """An engine for which the suite does not read a kernel path from the log."""

    name: str
    detect: tuple[str, ...] = Field(min_length=1)
    """Texts that only this engine's log contains."""


class _Phrase(DataTable):
    """A part of a remedy that is about vLLM."""

    vllm: str = Field(min_length=3)
    neutral: str
    own: dict[str, str] = Field(default_factory=dict)
    """The text that replaces this part for an engine; the keys are the engines' names."""


class _OtherEngines(DataTable):
    """The content of ``fixtures/other-engines.toml``."""

    engine: tuple[_Engine, ...]
    phrase: tuple[_Phrase, ...]


def writer(log: Path, engine: str | None) -> str | None:
    """Return the name of the engine that wrote a log, for `for_engine`.

    Args:
        log: The log.
        engine: The engine that `kernel_path.detect_engine` found, or that the user named.

    Returns:
        The engine, which can also be ``tensorrt-llm`` or ``ollama``; None if it is unknown.

    Raises:
        OSError: The log cannot be read.
    """
    if engine not in (None, "llama-cpp"):
        return engine  # a log that looks like llama.cpp's may be Ollama's
    with log.open("rb") as file:
        head = file.read(_SEARCHED).decode("utf-8", errors="replace")
    for other in _load().engine:
        if any(word in head for word in other.detect):
            return other.name
    return engine


def for_engine(cause: Cause, engine: str | None) -> Cause:
    """Return the cause with a remedy that contains options of the engine, or no options.

    Args:
        cause: The cause of the server's death.
        engine: The result of `writer`.
    """
    if engine == "vllm" or cause.remedy is None:
        return cause
    remedy = cause.remedy
    # Replace longer phrases first, because they may contain shorter ones.
    for phrase in sorted(_load().phrase, key=lambda each: len(each.vllm), reverse=True):
        own = phrase.own.get(engine or "", phrase.neutral)
        remedy = remedy.replace(phrase.vllm, own)
    return cause.model_copy(update={"remedy": remedy})


def _load() -> _OtherEngines:
    return data_file.load("other-engines.toml", _OtherEngines)
