"""The suite's command-line options and markers, and the settings that follow from them."""

import argparse
import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpu_arch.expression import architectures_asked_for
from sm121.core import errors, own_tests, profile_fields
from sm121.core.suggestion import did_you_mean
from sm121.engines import followed_log
from sm121.plugin import certificate, comparing_tests, expressions, shards, workers
from sm121.plugin.given import fingerprinted, given
from sm121.plugin.own_run import is_own_run
from sm121.session import own_options, settings
from sm121.session.plan_choice import PlanChoice, Reason

#: Options whose empty value means the same as no option.
_MAY_BE_EMPTY = ("--api-key",)
#: The beginning of pytest's refusal of a node id. The second line of the refusal lists the
#: collectors.
_NO_SUCH_TEST = "not found: "
#: The markers that are not levels. The plugin or a test sets them.
_MARKERS = (
    "applies_to(*names): architectures that the test is for; 'gpu' means all GPUs. Each test of a "
    "level has this marker, or its module has it",
    "slow(why): takes minutes; runs only with --slow",
    "asked_for(option): the test is collected only if this option is given",
    "ability(name): needs a model with this ability; [correctness.cannot] of a profile lists the "
    "abilities that its model lacks",
    "severity(name): severity of a failure of the test: contract or courtesy. Without the "
    "marker, and for a crash, it is blocker",
    "never_waived(what): a waiver cannot excuse a failure; the argument is the subject of the "
    "test, such as the kernel path",
    "api_cases: runs once for each case of fixtures/api/cases.toml, as `case`",
    "kernel_cases(group): runs once for each case of this group of sm121.kernels.cases, as `case`",
    "kernel_benchmarks: runs once for each case of sm121.kernels.cases, as `case`",
    "ab_run: the test is collected only with --ab A B",
)


def add(parser: pytest.Parser) -> None:
    """Add every option of the suite.

    Args:
        parser: The parser of pytest.
    """
    for own in own_options.GROUPS:
        group = parser.getgroup(f"sm121 {own.title}", f"SM121: {own.title}")
        own.add(functools.partial(_add, group))
    _refuse_values_in_one_line(parser)


def _add(group: "pytest.OptionGroup", *names: str, **keywords: Any) -> None:
    """Add an option. A value that is not one of its choices is refused with one line."""
    choices = keywords.pop("choices", None)
    if choices is not None:
        keywords["type"] = functools.partial(_chosen, names[0], choices)
        keywords["metavar"] = "|".join(choices)
    group.addoption(*names, **keywords)


def _chosen(option: str, choices: Sequence[str], value: str) -> str:
    if value not in choices:
        expected = ", ".join(choices)
        raise pytest.UsageError(
            f"{option} {value}: expected one of {expected}{did_you_mean(value, choices)}"
        )
    return value


def _refuse_values_in_one_line(parser: pytest.Parser) -> None:
    """Refuse an option without its value with one line, without pytest's usage text.

    Before pytest 8.4, the parser does not exist yet when options are added, and pytest prints its
    usage text.
    """
    arguments = getattr(parser, "optparser", None)
    if arguments is None:
        return
    refuse = arguments.error

    def refuse_in_one_line(message: str) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, argparse.ArgumentError) and error.argument_name is not None:
            action = _option_of(arguments, error.argument_name)
            name = action.option_strings[0] if action is not None else ""
            is_refused = name in (*own_options.every(), "-n") or name.startswith("--benchmark")
            if action is not None and is_refused:
                why = error.message.rstrip(".")
                raise pytest.UsageError(f"{name}: {why}. {_described(name, action)}")
        refuse(message)

    arguments.error = refuse_in_one_line


def _option_of(parser: argparse.ArgumentParser, names: str) -> argparse.Action | None:
    """Return the option that an error of argparse is about; None if it is about no option.

    ``names`` are the names of the option in the error, for example ``-k/--keyword``.
    """
    for action in parser._actions:
        if action.option_strings and "/".join(action.option_strings) == names:
            return action
    return None


def _described(name: str, action: argparse.Action) -> str:
    """Return an option with its values and its help as one line."""
    values = action.metavar or action.dest.upper()
    if isinstance(values, tuple):
        values = " ".join(values)
    what = " ".join((action.help or "").split()).replace("%%", "%")
    return f"{name} {values}: {what}"


def name_own_tests(config: pytest.Config, arguments: list[str]) -> None:
    """Add the paths of the suite's tests for ``sm121 run``: the named tests, or else all tests.

    Args:
        config: The configuration of pytest. Its list of paths is changed in place.
        arguments: The arguments of the command line. They are changed in place, too, because pytest
            reads both.
    """
    if not is_own_run(config):
        return
    paths: list[str] = config.known_args_namespace.file_or_dir
    for path in paths:
        arguments[arguments.index(path)] = own_tests.located(path)
    paths[:] = [own_tests.located(path) for path in paths]
    if not paths:
        paths.append(str(own_tests.folder() / "tests"))
        # The path comes first. Behind an option with an optional value, such as
        # --benchmark-compare, pytest would take the path as that value.
        arguments.insert(0, paths[0])


def keep_standard_input(arguments: list[str]) -> None:
    """Keep standard input for ``--server-log -``, before pytest puts /dev/null in its place.

    Args:
        arguments: The arguments of the command line.
    """
    pairs = itertools.pairwise(arguments)
    if "--server-log=-" in arguments or ("--server-log", "-") in pairs:
        followed_log.keep_standard_input()


def refuse_misspelt(parser: pytest.Parser, arguments: list[str]) -> None:
    """Refuse a misspelt option of the suite, and an option of a package that is not installed.

    Args:
        parser: The parser of pytest.
        arguments: The arguments of the command line.

    Raises:
        pytest.UsageError: There is such an option. The message names the correct option, or the
            package to install.
    """
    _, unknown = parser.parse_known_and_unknown_args(arguments)
    workers.refuse_without_xdist(unknown, certify="--certify" in arguments)
    for word in unknown:
        name = word.partition("=")[0]
        if not name.startswith("--"):
            continue
        hint = did_you_mean(name, own_options.every())
        if hint:
            raise pytest.UsageError(f"unrecognized argument {name}{hint}")


def refuse_unknown(config: pytest.Config, parser: pytest.Parser, arguments: list[str]) -> None:
    """Refuse an unknown option with one line, without pytest's usage text.

    This applies to ``sm121 run`` and to pytest in the suite's repository. In other projects pytest
    prints its own text.

    Args:
        config: The configuration of pytest.
        parser: The parser of pytest.
        arguments: The arguments of the command line.

    Raises:
        pytest.UsageError: There is such an option. The message names the unknown arguments.
    """
    _, unknown = parser.parse_known_and_unknown_args(arguments)
    if _is_of_the_suite(config) and any(word.startswith("-") for word in unknown):
        raise pytest.UsageError(
            f"unrecognized arguments: {' '.join(unknown)}. List the options with --help"
        )


def _is_of_the_suite(config: pytest.Config) -> bool:
    """Whether this is ``sm121 run``, or pytest in the suite's clone."""
    return is_own_run(config) or config.rootpath == own_tests.folder()


def in_one_line(config: pytest.Config, refusal: pytest.UsageError) -> pytest.UsageError:
    """Return pytest's refusal of wrong node ids as one line, without the list of collectors.

    In other projects than the suite, the refusal remains pytest's own text.

    Args:
        config: The configuration of pytest.
        refusal: The refusal of a collection.

    Returns:
        The refusal with the ids and the next step; another refusal unchanged.
    """
    lines = [str(line) for line in refusal.args]
    are_ids = bool(lines) and all(line.startswith(_NO_SUCH_TEST) for line in lines)
    if not (are_ids and _is_of_the_suite(config)):
        return refusal
    ids = [line.removeprefix(_NO_SUCH_TEST).splitlines()[0] for line in lines]
    names = ", ".join(ids)
    return pytest.UsageError(
        f"{names}: expected the name of a test in its file. List the names with --collect-only -q"
    )


def refuse_numbers(config: pytest.Config) -> None:
    """Refuse numbers that are separated by spaces, if the option needs a list with commas.

    Args:
        config: The configuration of pytest.

    Raises:
        UsageError: There are such numbers. The message shows the list with commas.
    """
    words = [str(word) for word in config.invocation_params.args]
    folder = config.invocation_params.dir
    for at, word in enumerate(words):
        if not word.isdecimal() or word not in config.args or (folder / word).exists():
            continue
        numbers = [*itertools.takewhile(str.isdecimal, words[at:])]
        before = [*itertools.takewhile(str.isdecimal, reversed(words[:at]))]
        name = words[at - len(before) - 1]
        values = [*reversed(before), *numbers]
        option, _, value = name.partition("=")
        if option in own_options.every():
            given = " ".join(values)
            listed = ",".join([value, *values] if value else values)
            raise errors.UsageError(
                f"{name} {given}: expected a list with commas instead of spaces, such as "
                f"{option} {listed}"
            )


def refuse_empty_values(config: pytest.Config) -> None:
    """Refuse an empty option value, which usually comes from an unset shell variable.

    If an empty ``--base-url`` were ignored, the run would start and judge another server.

    Args:
        config: The configuration of pytest.

    Raises:
        UsageError: A value is empty. The message names the option.
    """
    for name, action in own_options.every().items():
        if name in _MAY_BE_EMPTY or action.nargs is not None:
            continue
        value = config.getoption(name)
        if value == "" or (isinstance(value, list) and "" in value):
            raise errors.UsageError(
                f"{name} '': expected a value, got an empty one. Leave the option out, or set the "
                "variable that its value comes from"
            )


def markers() -> list[str]:
    """Return the markers of the suite with their descriptions, in the form that pytest expects."""
    levels = [f"{name}: tests of the {name} level" for name in profile_fields.LEVELS]
    return [*levels, *_MARKERS]


def read_settings(config: pytest.Config) -> settings.Settings:
    """Read and validate the settings of a run from the command line.

    Args:
        config: The configuration of pytest.

    Raises:
        UsageError: An option is wrong.
    """
    if not __debug__:
        raise errors.UsageError(
            "python -O (PYTHONOPTIMIZE) removes assertions, so the suite would check nothing: "
            "expected a run without -O"
        )
    refuse_empty_values(config)
    given_to_worker = getattr(config, "workerinput", None)
    worker = workers.worker_of(config)
    shards.parse(config.getoption("--shard"))
    if config.getoption("--resume") and workers.is_parallel(config):
        raise errors.UsageError("--resume with -n: expected one of them. Leave out -n.")
    refuse_numbers(config)
    options = given(config)
    if config.getoption("--certify"):
        certificate.refuse_options(options)
    if "-" in config.getoption("--server-log"):
        _refuse_log_on_stdin(config)
    expressions.refuse_wrong_expressions(config)
    comparing_tests.name_comparison(config)
    read = settings.read_settings(
        config.getoption,
        config.invocation_params.dir,
        names_tests=expressions.names_tests(config),
        marked=architectures_asked_for(expressions.marker_expression(config)),
    )
    if given_to_worker is not None and worker is not None:  # the first process has chosen it
        name, reason = given_to_worker["sm121_plan"]
        planned = PlanChoice(name, Reason(reason))
        read = replace(read, planned=planned)
    root = config.invocation_params.dir if is_own_run(config) else config.rootpath
    return replace(read, root=root, worker=worker, options=fingerprinted(options))


def _refuse_log_on_stdin(config: pytest.Config) -> None:
    """Raise UsageError for ``--server-log -`` if the run has worker processes without stdin."""
    if workers.is_parallel(config) or workers.worker_of(config) is not None:
        starting = "-n"
    elif config.getoption("--certify"):
        starting = "--certify"
    else:
        return
    raise errors.UsageError(
        f"--server-log - with {starting}: expected a file or --container NAME: the processes of "
        "such a run have no standard input"
    )
