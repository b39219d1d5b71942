"""Arguments of a command line as data: what argparse, and pytest's parser, take of a row."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from sm121.core.data_file import DataTable

#: As vLLM, SGLang and llama.cpp call it; the last of two wins.
_AT_ONCE = re.compile(r"--(?:max-num-seqs|max-running-requests|parallel) (\d+)")
#: What an option does to what a run measures; fixtures/options.toml says what each one means.
Effect = Literal["harmless", "adds", "named", "told", "selects", "measures"]


class Argument(DataTable):
    """An argument. Without ``help`` it is not shown."""

    name: str
    help: str | None = None
    metavar: str | tuple[str, ...] | None = None
    nargs: int | str | None = None
    action: str | None = None
    choices: tuple[str, ...] | None = None
    default: str | int | list[str] | None = None
    dest: str | None = None
    required: bool | None = None
    #: Its values are paths.
    path: bool = False
    #: Its values are whole numbers.
    integer: bool = False
    #: What is not said is in doubt.
    effect: Effect = "measures"

    def given(self, **values: str) -> dict[str, Any]:
        """The keyword arguments of ``add_argument``. `values`: for ``{name}`` in help, default."""
        excluded = {"name", "path", "integer", "effect"}
        keywords = self.model_dump(exclude=excluded, exclude_none=True)
        for key in ("help", "default"):
            if isinstance(text := keywords.get(key), str):
                keywords[key] = text.format(**values)
        if self.path or self.integer:
            keywords["type"] = Path if self.path else int
        return keywords


def at_once(arguments: Sequence[str]) -> int | None:
    """Requests that an engine is asked to run at the same time; None where it chooses itself."""
    matches = _AT_ONCE.findall(one_line(arguments))
    return int(matches[-1]) if matches else None


def one_line(arguments: Sequence[str]) -> str:
    """Arguments with ``--name=value`` as ``--name value``, hyphens for underscores in names."""
    words: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            head, *rest = name.split(".")
            words.append(".".join([head.replace("_", "-"), *rest]))
            if equals:
                words.append(value)
        else:
            words.append(argument)
    return " ".join(words)
