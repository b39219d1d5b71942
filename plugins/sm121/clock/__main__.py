"""``python -m sm121.clock URL``: print the rates and times of a running server."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sm121 import clock
from sm121.core.command_parser import Parser
from sm121.core.errors import Sm121Error
from sm121.core.printable import printable
from sm121.core.verdict import NotRun, Verdict

#: The exit status for invalid arguments, the same as pytest's.
_USAGE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a server and print its numbers.

    Args:
        arguments: The command-line arguments; None for those of this process.

    Returns:
        The exit status: 0; 1 if a number is INVALID; 4 if the arguments are invalid; 5 if the
        server cannot be measured with these arguments. For 4 and 5, one line is printed to standard
        error.
    """
    try:
        options = _parser().parse_args(arguments)
        result = clock.measure(
            options.url,
            model=options.model,
            api_key=options.api_key or os.environ.get("OPENAI_API_KEY"),
            prompt_tokens=options.pp,
            tokens=options.tg,
            depths=options.depth,
            rounds=options.rounds,
            records=options.records,
            show=_show,
        )
    except NotRun as error:
        print(printable(f"sm121.clock: NOT_RUN: {error}"), file=sys.stderr)
        return Verdict.NOT_RUN.exit_status
    except (clock.PackageMissing, Sm121Error, OSError, ValueError) as error:
        print(printable(f"sm121.clock: {error}"), file=sys.stderr)
        return _USAGE
    print(result, end="")
    verdict = Verdict.PASS if result.valid else Verdict.INVALID
    return verdict.exit_status


def _show(line: str) -> None:
    print(printable(line), file=sys.stderr)


def _parser() -> Parser:
    parser = Parser(prog="python -m sm121.clock", description=__doc__)
    parser.add_argument("url", metavar="URL", help="the address of the server")
    parser.add_argument("--model", help="default: the only one that the server serves")
    parser.add_argument("--api-key", metavar="KEY", help="default: the variable OPENAI_API_KEY")
    parser.add_argument("--pp", type=int, default=2048, help="tokens of the prompt (default: 2048)")
    parser.add_argument(
        "--tg",
        type=int,
        nargs="+",
        default=[32, 128],
        help="lengths of the answers, in tokens (default: 32 and 128)",
    )
    parser.add_argument(
        "--depth", type=int, nargs="+", default=[0], help="tokens before the prompt (default: 0)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds at each depth (default: 5)")
    parser.add_argument(
        "--records", type=Path, metavar="FOLDER", help="keep the raw answers in this folder"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
