"""Check arguments with an engine's own parser.

This script runs in the engine's interpreter, without the suite. Its standard input is a JSON object
with the name of the ``engine`` and the ``lists`` of arguments. Its output is a JSON object with two
fields. ``refused`` has one entry for each list: the parser's error message, or null if the parser
accepts the list. ``options`` has the names of the parser's options. The script starts no server,
and does not resolve defaults, because that may need the model and the GPU.
"""

import argparse
import importlib
import json
import sys
from typing import Any, NoReturn


def _first(places: list[tuple[str, str]]) -> Any:
    for module, name in places:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    sys.exit(f"this vLLM has none of {places}")


def _raising(kind: Any) -> Any:
    """Return a parser of the given class that raises ValueError instead of ending the process."""

    class Parser(kind):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

        def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
            raise ValueError(message or f"the parser ended with {status}")

    return Parser()


def _sglang() -> Any:
    parser = _raising(argparse.ArgumentParser)
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


def _vllm() -> Any:
    make = _first(
        [
            ("vllm.entrypoints.common.cli_args", "make_arg_parser"),  # in vLLM 0.33 and later
            ("vllm.entrypoints.launchers.cli_args", "make_arg_parser"),  # in vLLM 0.29 to 0.32
            ("vllm.entrypoints.openai.cli_args", "make_arg_parser"),
        ]
    )
    kind = _first(
        [
            ("vllm.utils.argparse_utils", "FlexibleArgumentParser"),
            ("vllm.utils", "FlexibleArgumentParser"),
        ]
    )
    return make(_raising(kind))


def main() -> None:
    """Read the request from standard input, and write the answer to standard output."""
    question = json.load(sys.stdin)
    parsers = {"vllm": _vllm, "sglang": _sglang}
    parser = parsers[question["engine"]]()
    answers: list[str | None] = []
    for arguments in question["lists"]:
        try:
            parser.parse_args(arguments)
        except (ValueError, TypeError) as error:
            lines = str(error).strip().splitlines()
            answers.append(lines[0] if lines else type(error).__name__)
        else:
            answers.append(None)
    options: set[str] = set()
    for action in parser._actions:
        options.update(action.option_strings)
    sys.stdout.write("\n" + json.dumps({"refused": answers, "options": sorted(options)}) + "\n")


main()
