"""The engines that the suite can start, by the name that ``--engine`` takes."""

from __future__ import annotations

from sm121.engines.protocol import Engine
from sm121.engines.vllm import Vllm
from sm121.errors import UsageError

_ENGINES: dict[str, Engine] = {"vllm": Vllm()}

NAMES: tuple[str, ...] = tuple(_ENGINES)


def engine(name: str) -> Engine:
    """The engine of that name.

    Raises:
        UsageError: the suite cannot start such an engine.
    """
    if name not in _ENGINES:
        raise UsageError(
            f"--engine {name}: expected one of {', '.join(NAMES)}; "
            "any other OpenAI-compatible server can be attached with --base-url"
        )
    return _ENGINES[name]
