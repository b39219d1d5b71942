"""Asks SGLang's own parser what it takes. Runs in the engine's interpreter, without the suite.

Reads a JSON list of argument lists, writes a JSON list: the parser's message where it refuses one,
else null. Nothing is started, and nothing is resolved: that needs the model and the GPU.
"""

import argparse
import json
import sys
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main() -> None:
    """Answers the lists on standard input."""
    from sglang.srt.server_args import ServerArgs

    parser = _Parser()
    ServerArgs.add_cli_args(parser)
    answers: list[str | None] = []
    for arguments in json.load(sys.stdin):
        try:
            parser.parse_args(arguments)
        except (ValueError, TypeError) as error:
            answers.append(str(error).strip().splitlines()[0] if str(error) else repr(error))
        else:
            answers.append(None)
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


main()
