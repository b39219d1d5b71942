"""Read the arguments of an engine's command line."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_OPTION = re.compile(r"--?[A-Za-z]")
#: As vLLM, SGLang and llama.cpp call it; the last of two wins.
_AT_ONCE = ("max_num_seqs", "max_running_requests", "parallel")


@dataclass(frozen=True)
class Option:
    """An option as it was given: its name with its dashes, and the words that are its values."""

    name: str
    values: tuple[str, ...]


def options(arguments: Sequence[str]) -> Iterator[Option]:
    """Yield the options of a command line in their order.

    Args:
        arguments: ``--a-b C``, ``--a_b=C``, ``--a.b C`` or ``-a C``. Underscores of a name become
            hyphens; keys behind a dot stay as they are.
    """
    name, values = "", list[str]()
    for word in arguments:
        if not _OPTION.match(word):
            values.append(word)
            continue
        if name:
            yield Option(name, tuple(values))
        written, equals, value = word.partition("=")
        head, *keys = written.split(".")
        name = ".".join([head.replace("_", "-"), *keys])
        values = [value] if equals else []
    if name:
        yield Option(name, tuple(values))


def read(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options by their normal names; the last of a name wins.

    ``--a '{"b": "C"}'`` is also read as ``a.b``, an option without a value is ``true``, and
    ``--no-x`` makes ``x`` false.
    """
    values: dict[str, str] = {}
    for option in options(arguments):
        key = normal_name(option.name)
        value = option.values[0] if option.values else "true"
        if key.startswith("no_") and not option.values:
            key, value = key.removeprefix("no_"), "false"
        values[key] = value
        if value.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):  # the engine will refuse it
                table = flat(json.loads(value))
                values.update({f"{key}.{inner}": text for inner, text in table.items()})
    return values


def one_line(arguments: Sequence[str]) -> str:
    """Return the options as one line of text, each as ``--name value``, for patterns."""
    return " ".join(word for each in options(arguments) for word in (each.name, *each.values))


def at_once(arguments: Sequence[str]) -> int | None:
    """Return how many requests an engine is told to run at the same time, or None."""
    found = [each for each in options(arguments) if normal_name(each.name) in _AT_ONCE]
    values = [each.values[0] for each in found if each.values and each.values[0].isdecimal()]
    return int(values[-1]) if values else None


def normal_name(name: str) -> str:
    """Return ``kv_cache_dtype`` for ``--kv-cache-dtype``."""
    return name.lstrip("-").replace("-", "_")


def flat(table: object) -> dict[str, str]:
    """Return the values of nested tables as texts, by their keys with dots between them."""
    texts: dict[str, str] = {}
    pending: list[tuple[str, object]] = [("", table)]
    while pending:
        prefix, item = pending.pop()
        if isinstance(item, dict):
            pending.extend((f"{prefix}.{normal_name(str(k))}", v) for k, v in item.items())
        elif item is not None:
            text = str(item).lower() if isinstance(item, bool) else str(item)
            texts[prefix.removeprefix(".")] = text
    return texts
