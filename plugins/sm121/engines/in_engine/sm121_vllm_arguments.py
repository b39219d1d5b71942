"""Asks vLLM's own parser what it takes. Runs in the engine's interpreter, without the suite.

Reads a JSON list of argument lists, writes a JSON list: the parser's message where it refuses one,
else null. Nothing is started.
"""

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


def main() -> None:
    """Answers the lists on standard input."""
    make = _first(
        [
            ("vllm.entrypoints.launchers.cli_args", "make_arg_parser"),  # 0.30 and later
            ("vllm.entrypoints.openai.cli_args", "make_arg_parser"),
        ]
    )
    kind = _first(
        [
            ("vllm.utils.argparse_utils", "FlexibleArgumentParser"),
            ("vllm.utils", "FlexibleArgumentParser"),
        ]
    )

    class Parser(kind):  # type: ignore[misc,valid-type]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

        def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
            raise ValueError(message or f"it ended with {status}")

    parser = make(Parser())
    answers: list[str | None] = []
    for arguments in json.load(sys.stdin):
        try:
            parser.parse_args(arguments)
        except (ValueError, TypeError) as error:
            lines = str(error).strip().splitlines()
            answers.append(lines[0] if lines else type(error).__name__)
        else:
            answers.append(None)
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


main()
