"""The engines that the suite can start, by the name that ``--engine`` takes."""

from sm121.core.errors import UsageError
from sm121.engines import llama_cpp, protocol, sglang, vllm

_ENGINES: dict[str, protocol.Engine] = {
    engine.name: engine for engine in (vllm.Vllm(), sglang.SGLang(), llama_cpp.LlamaCpp())
}


def names() -> tuple[str, ...]:
    """The engines that can be started."""
    return tuple(_ENGINES)


def register(engine: protocol.Engine) -> None:
    """Add an engine, or replace the one of the same name. Call it from a conftest.py or from a
    plugin that is loaded with ``-p``: before the options are read."""
    _ENGINES[engine.name] = engine


def engine(name: str) -> protocol.Engine:
    """The engine of that name. Raises UsageError: the suite cannot start such an engine."""
    if name not in _ENGINES:
        raise UsageError(
            f"--engine {name}: expected one of {', '.join(names())}; "
            "any other OpenAI-compatible server can be attached with --base-url"
        )
    return _ENGINES[name]
