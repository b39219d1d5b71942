"""Read the arguments of an engine's command line."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_OPTION = re.compile(r"--?[A-Za-z]")
#: vLLM's short options, without those that mean something else to another engine.
_SHORT = {
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-pp": "--pipeline-parallel-size",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
#: The names of the option that limits concurrent requests, in vLLM, SGLang and llama.cpp.
_AT_ONCE = ("max_num_seqs", "max_running_requests", "parallel")


@dataclass(frozen=True)
class Option:
    """An option of a command line."""

    #: The name, with its dashes.
    name: str
    #: The words that follow the name, or the value after the name's equals sign.
    values: tuple[str, ...]

    @property
    def base(self) -> str:
        """The name without keys after a dot: ``--a`` for ``--a.b``."""
        return self.name.partition(".")[0]


def options(arguments: Sequence[str]) -> Iterator[Option]:
    """Yield the options of a command line in their order.

    Args:
        arguments: The command line, with options such as ``--a-b C``, ``--a_b=C``, ``--a.b C`` or
            ``-a C``.

    Yields:
        Each option, with hyphens in place of underscores in its name, but not in keys after a dot.
        A short name of vLLM is replaced by the long one. Words before the first option are dropped.
    """
    name = ""
    values: list[str] = []
    for word in arguments:
        if not _OPTION.match(word):
            values.append(word)
            continue
        if name:
            yield Option(name, tuple(values))
        written, equals, value = word.partition("=")
        head, *keys = written.split(".")
        head = head.replace("_", "-")
        name = ".".join([_SHORT.get(head, head), *keys])
        values = [value] if equals else []
    if name:
        yield Option(name, tuple(values))


def parse_options(arguments: Sequence[str]) -> dict[str, str]:
    """Read the options of a command line.

    Args:
        arguments: The words of the command line.

    Returns:
        The value of each option; the keys are results of `normal_name`. If an option is repeated,
        its last value counts. An option without a value is ``true``, ``--no-x`` makes ``x`` false,
        and ``--a '{"b": "C"}'`` also sets ``a.b``.
    """
    values: dict[str, str] = {}
    for option in options(arguments):
        key = normal_name(option.name)
        value = option.values[0] if option.values else "true"
        if key.startswith("no_") and not option.values:
            key = key.removeprefix("no_")
            value = "false"
        values[key] = value
        for inner, text in _table(option).items():
            values[f"{key}.{inner}"] = text
    return values


def one_line(arguments: Sequence[str]) -> str:
    """Return the options as one line for matching with patterns.

    Each option is in it as ``--name value``. The last value of a repeated option counts. If a value
    is a JSON table, its entries follow as ``--name.key value``, which is another form of the same
    option.

    Args:
        arguments: The engine's command line, as in `options`.
    """
    words: list[str] = []
    last = {option.name: option for option in options(arguments)}
    for option in last.values():
        words += [option.name, *option.values]
        for key, text in _table(option).items():
            words += [f"{option.name}.{key}", text]
    return " ".join(words)


def _table(option: Option) -> dict[str, str]:
    """Return the entries of a JSON table, flattened; none if the option's value is no table."""
    value = option.values[0] if option.values else ""
    if value.startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):  # the engine will refuse the argument
            return flat(json.loads(value))
    return {}


def at_once(arguments: Sequence[str]) -> int | None:
    """Return the limit of concurrent requests that the arguments set.

    Args:
        arguments: The engine's command line. If the option is repeated, its last value counts.

    Returns:
        The number of requests; None if the arguments set none.
    """
    limit = None
    for option in options(arguments):
        is_limit = normal_name(option.name) in _AT_ONCE
        if is_limit and option.values and option.values[0].isdecimal():
            limit = int(option.values[0])
    return limit


def normal_name(name: str) -> str:
    """Return an option's name without dashes, for example ``kv_cache_dtype``.

    Args:
        name: The name as in `Option`, for example ``--kv-cache-dtype``.
    """
    return name.lstrip("-").replace("-", "_")


def flat(table: object) -> dict[str, str]:
    """Flatten nested tables.

    Args:
        table: Plain data, as a JSON parser returns it.

    Returns:
        The values as text. Keys of nested tables are joined by dots, for example ``outer.inner``.
        Nulls are left out.
    """
    texts: dict[str, str] = {}
    pending: list[tuple[str, object]] = [("", table)]
    while pending:
        prefix, item = pending.pop()
        if isinstance(item, dict):
            for key, value in item.items():
                pending.append((f"{prefix}.{normal_name(str(key))}", value))
        elif item is not None:
            text = str(item).lower() if isinstance(item, bool) else str(item)
            texts[prefix.removeprefix(".")] = text
    return texts
