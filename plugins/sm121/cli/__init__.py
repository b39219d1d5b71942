"""The command ``sm121``: everything that works without pytest, and ``run``, which starts pytest."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from sm121 import __version__
from sm121.cli import gate, judge, look, more
from sm121.cli.command import EXIT_USAGE, Commands, drop_output
from sm121.core.command_parser import CommandParser, InvalidArgumentsError
from sm121.core.errors import Sm121Error
from sm121.core.files import cause_of
from sm121.core.verdict import INTERRUPTED

#: For each title in ``sm121 --help``, the function that adds the commands below it.
GROUPS: dict[str, Callable[[Commands], None]] = {
    "Judge a build": judge.add,
    "Look at what runs and what ran": look.add,
    "Gate merges": gate.add,
    "More": more.add,
}
#: The title of the commands that exist only in a checkout.
_OF_A_CHECKOUT = "For authors of the suite, from a checkout"
#: The commands that exist only in a checkout; ``tools.commands`` defines them.
OF_A_CHECKOUT = (
    "synthetic",
    "canary-train",
    "ablation",
    "tolerances",
    "reference",
)
#: The status if the reader of the output has ended, as in ``sm121 testlog RUN | head``. It is not
#: 0, because the result may be negative.
_UNREAD = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: The arguments after ``sm121``. None: the arguments of this process.

    Returns:
        The exit status: 0, or 1 for a negative result, or 5 for a result that could not be judged,
        or 2 after Ctrl-C, or 4 for a usage error. For 2 and 4, one line on standard error states
        the reason. ``merge`` returns the status of the merged run.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] == ["profile", "init"]:
        words[:2] = ["init-profile"]
    if words and words[0] in OF_A_CHECKOUT and _tools_of_the_checkout() is None:
        print(f"sm121 {words[0]}: needs a checkout of the suite, see tools/ there", file=sys.stderr)
        return EXIT_USAGE
    try:
        # The arguments after `run`, `plan` and `certify` are arguments of pytest.
        passed_on = words[:1] in (["run"], ["plan"], ["certify"])
        own = words[:1] if passed_on else words
        if words in (["plan", "-h"], ["plan", "--help"]):
            own = words
        elif words[:1] == ["certify"] and not {"-h", "--help"}.isdisjoint(words):
            own = ["certify", "--help"]
        options = parser().parse_args(own)
        options.words = words[1:]
    except InvalidArgumentsError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    try:
        status: int = options.run(options) or 0
        if sys.stdout is not None:  # Python sets None if the caller closed it
            sys.stdout.flush()
    except InvalidArgumentsError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except (Sm121Error, ValueError) as error:
        print(f"sm121 {options.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        drop_output()
        return _UNREAD
    except OSError as error:
        print(f"sm121 {options.command}: {_unusable(error)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"sm121 {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        print(
            f"sm121 {options.command}: needs {error.name}: pip install 'sm121-conformance[cpu]'",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return status


def _unusable(error: OSError) -> str:
    """Describe a file that cannot be read or written, in one line."""
    if error.strerror is None:
        return str(error)
    expected = "expected files that can be read and written"
    if error.filename is not None:
        expected = f"{error.filename}: expected a path that can be read or written"
    return f"{expected}, got: {cause_of(error)}. Check the path and its permissions."


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; in a checkout, with the commands for a checkout."""
    parser = CommandParser(prog="sm121", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sm121-conformance {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = dict(GROUPS)
    tools = _tools_of_the_checkout()
    if tools is not None:
        groups[_OF_A_CHECKOUT] = tools.add
    parser.commands = commands.choices
    for title, add in groups.items():
        earlier = {*commands.choices}
        add(commands)
        parser.groups[title] = {
            name: made.description or ""
            for name, made in commands.choices.items()
            if name not in earlier
        }
    return parser


def _tools_of_the_checkout() -> ModuleType | None:
    """Return the module ``tools.commands``; None if this is not a checkout."""
    checkout = Path(__file__).parents[3]
    if not (checkout / "tools" / "commands.py").is_file():
        return None
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module("tools.commands")
