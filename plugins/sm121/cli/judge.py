"""The commands that judge builds: ``run``, ``certify``, ``matrix``, ``plan``, ``side-by-side``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sm121.cli.command import EXIT_USAGE, Commands, command, progress
from sm121.core import own_tests, profile
from sm121.core.command_parser import CommandParser, Parser
from sm121.core.errors import OptionError, UsageError
from sm121.core.files import refuse_unwritable
from sm121.core.profile_fields import LEVELS

#: The help of ``sm121 run --every``.
_EVERY = (
    "check the server at --base-url repeatedly, for example every 10m or 1h, until a signal ends "
    "the command. Each round runs the smoke and correctness checks of the plan quick, prints one "
    "line, and appends it to rounds.jsonl"
)


def add(commands: Commands) -> None:
    """Add the commands.

    Args:
        commands: The subcommands of the parser.
    """
    _add_run(commands)
    _add_certify(commands)
    _add_matrix(commands)
    _add_plan(commands)
    _add_side_by_side(commands)


def _add_run(commands: Commands) -> None:
    parser = command(
        commands,
        "run",
        _run,
        (
            "run the suite: starts pytest with the tests of this package; all arguments except "
            "--every are passed to pytest"
        ),
    )
    # This option is only for the help, because `_run` parses the words itself.
    parser.add_argument("--every", metavar="DURATION", help=_EVERY)


def _run(options: argparse.Namespace) -> int:
    own = CommandParser(prog="sm121 run", add_help=False, allow_abbrev=False)
    own.add_argument("--every")
    found, of_pytest = own.parse_known_args(options.words)
    if found.every is not None:
        from sm121.session import repeated

        return repeated.run(found.every, of_pytest, progress)
    _become_pytest(options.words)
    return 0


def _become_pytest(given: Sequence[str]) -> None:
    """Replace this process with pytest, or print the help of the suite's options."""
    if {"-h", "--help"} & {*given}:
        print(f"{_help_of_options()}\npytest's options: pytest --help")
        sys.exit()
    words = own_tests.command(given, Path.cwd())
    os.execv(words[0], words)  # noqa: S606 - pytest takes this process, and its signals


def _help_of_options() -> str:
    """Return the help of the options that the suite adds to pytest's."""
    from sm121.session import own_options

    usage = "sm121 run [OPTIONS] [TESTS]"
    run = Parser(prog="sm121 run", usage=usage, add_help=False, allow_abbrev=False)
    for own in own_options.EVERY_GROUP:
        own.add(run.add_argument_group(f"SM121: {own.title}").add_argument)
    again = run.add_argument_group("Repeated rounds")
    again.add_argument("--every", metavar="DURATION", help=_EVERY)
    return run.format_help()


def _add_certify(commands: Commands) -> None:
    command(
        commands,
        "certify",
        _certify,
        (
            "run all tests that a certificate needs, isolated from your plugins, pytest.ini and "
            "environment variables; all arguments are passed to pytest"
        ),
    )


def _certify(options: argparse.Namespace) -> NoReturn:
    from sm121.session import certified_run

    certified_run.start(options.words)


def _add_matrix(commands: Commands) -> None:
    parser = command(
        commands,
        "matrix",
        _matrix,
        "show the sizes of a profile's matrix; with --strength, list its cells",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME|PATH",
        help="name or path of the profile (default: by architecture)",
    )
    parser.add_argument(
        "--axes",
        metavar="NAME|PATH",
        help="axes of the matrix (default: those of the profile)",
    )
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="engine (default: that of the profile)",
    )
    parser.add_argument(
        "--version",
        metavar="VERSION",
        dest="engine_version",
        help=(
            "version of the engine, for example 0.32.0 for a release, or 0.14.0+mxfp4 for a build "
            "with changes (default: show the settings of all versions)"
        ),
    )
    parser.add_argument(
        "--strength",
        metavar="N|full",
        help="list the cells (default: show only the sizes)",
    )


def _matrix(options: argparse.Namespace) -> None:
    from sm121.core import architecture
    from sm121.matrix import plan, size

    name = options.profile or profile.for_architecture(architecture.detect().name or "unknown")
    try:
        chosen = profile.load(name)
        space = plan.space_of(chosen, options.axes, options.engine, options.engine_version)
        if options.strength is None:
            print(size.sizes(space), end="")
        else:
            print(size.cells(plan.make_plan(chosen, space, strength=options.strength)), end="")
    except OptionError as error:  # the message names --strength; pytest's option is --matrix
        raise OptionError("--strength", error.fault) from error


def _add_plan(commands: Commands) -> None:
    command(
        commands,
        "plan",
        _plan,
        (
            "show which checks `sm121 run` with the same arguments would run, how long they "
            "would take, and which cannot run here; starts no server"
        ),
    )


def _plan(options: argparse.Namespace) -> int:
    """Print the checks that pytest would run, without running them."""
    from sm121.report import run_plan
    from sm121.session import own_options, plan_command

    own_options.reader(options.words)  # print a wrong value as one line, without pytest's usage
    try:
        plan = plan_command.plan_of(options.words)
    except plan_command.NoPlan as error:
        print(error.output, end="", file=sys.stderr)
        return EXIT_USAGE
    print(run_plan.text(plan), end="")
    return 0


def _add_side_by_side(commands: Commands) -> None:
    side = command(
        commands,
        "side-by-side",
        _side_by_side,
        "run the same levels on several engines, and show the results side by side",
    )
    side.add_argument(
        "engines",
        metavar="ENGINE[=PATH]",
        nargs="+",
        help=(
            "vllm, sglang or llama-cpp. PATH is the Python interpreter of the engine's "
            "environment, or the engine's executable"
        ),
    )
    side.add_argument("--arch", metavar="NAME", help="architecture (default: that of this machine)")
    side.add_argument(
        "--level",
        dest="levels",
        metavar="NAME",
        action="append",
        choices=LEVELS,
        help="a level to run; repeatable (default: performance)",
    )
    side.add_argument(
        "--report-dir",
        type=Path,
        metavar="DIR",
        default=Path("side-by-side-report"),
        help="default: side-by-side-report",
    )
    side.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    side.add_argument(
        "--pytest-arg",
        metavar="ARG",
        action="append",
        default=[],
        help="argument for pytest in each run; repeatable; write --pytest-arg=--rounds=5",
    )


def _side_by_side(options: argparse.Namespace) -> int:
    from sm121.core import architecture
    from sm121.report import comparison
    from sm121.session import side_by_side

    arch = options.arch or architecture.detect().name
    if arch is None:
        raise UsageError("the suite has no name for this GPU's architecture; give --arch")
    if options.output is not None:
        refuse_unwritable("--output", options.output)
    sources, status = side_by_side.run(
        [side_by_side.parse(text) for text in options.engines],
        arch=arch,
        directory=options.report_dir,
        extra=options.pytest_arg,
        levels=options.levels or ["performance"],
        progress=lambda line: progress(line, sys.stderr),
    )
    table = comparison.markdown(sources)
    if options.output is None:
        print(table, end="")
    else:
        options.output.write_text(table, "utf-8")
    return status
