"""The command line: its options, the markers, and the settings that they make."""

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
from sm121.matrix import covering
from sm121.plugin import certificate, comparing_tests, expressions, shards, workers
from sm121.plugin.given import fingerprinted, given
from sm121.session import own_options, settings
from sm121.session.plan_choice import PlanChoice, Reason

#: Options whose empty value says the same as none.
_MAY_BE_EMPTY = ("--api-key",)
#: The markers beside those of levels: set by the plugin, or by a test.
_MARKERS = (
    "applies_to(*names): the architectures that a test is for; 'gpu' means each of them. Every "
    "test of a level has it, on itself or its module",
    "slow(why): takes minutes; left out unless --slow is given",
    "asked_for(option): runs only when that option is given; else it is no test",
    "ability(name): needs a model that can do this; a profile says in [correctness.cannot] what "
    "its model cannot",
    "severity(name): what its failure is: contract or courtesy; without the marker, or in a crash, "
    "it is a blocker",
    "never_waived(what): no waiver tolerates its failure, since it is about that",
    "api_cases: run with each case of fixtures/api/cases.toml as `case`",
    "kernel_cases(group): run with each case of that group of sm121.kernels.cases as `case`",
    "kernel_benchmarks: run with each case of sm121.kernels.cases as `case`",
    "ab_run: is there only with --ab A B",
)


def add(parser: pytest.Parser) -> None:
    """Add every option of the suite.

    Args:
        parser: pytest's parser.
    """
    for own in own_options.GROUPS:
        group = parser.getgroup(f"sm121 {own.title}", f"SM121: {own.title}")
        own.add(functools.partial(_add, group))
    _refuse_values_in_one_line(parser)


def _add(group: "pytest.OptionGroup", *names: str, **keywords: Any) -> None:
    """Add an option. A value that is none of its choices is refused in one line."""
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
    """Refuse an option without its value in one line: pytest writes its usage, too.

    Before pytest 8.4 there is no parser yet, and it does.
    """
    arguments = getattr(parser, "optparser", None)
    if arguments is None:
        return
    refuse = arguments.error

    def refuse_in_one_line(message: str) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, argparse.ArgumentError) and error.argument_name is not None:
            name = error.argument_name.partition("/")[0]
            if name in (*own_options.every(), "-n") or name.startswith("--benchmark"):
                action = arguments._option_string_actions[name]
                why = error.message.rstrip(".")
                raise pytest.UsageError(f"{name}: {why}. {_described(name, action)}")
        refuse(message)

    arguments.error = refuse_in_one_line


def _described(name: str, action: argparse.Action) -> str:
    """An option with its values and its help, in one line."""
    values = action.metavar or action.dest.upper()
    if isinstance(values, tuple):
        values = " ".join(values)
    what = " ".join((action.help or "").split()).replace("%%", "%")
    return f"{name} {values}: {what}"


def is_own_run(config: pytest.Config) -> bool:
    """Whether ``sm121 run`` started pytest.

    Args:
        config: pytest's.
    """
    return config.inipath == own_tests.settings()


def name_own_tests(config: pytest.Config, arguments: list[str]) -> None:
    """Name the suite's tests for ``sm121 run``: all without a path, else those that are named.

    Args:
        config: pytest's. Its list of paths is changed in place.
        arguments: The words of the command line, which are changed in place: pytest reads both.
    """
    if not is_own_run(config):
        return
    paths: list[str] = config.known_args_namespace.file_or_dir
    for path in paths:
        arguments[arguments.index(path)] = own_tests.located(path)
    paths[:] = [own_tests.located(path) for path in paths]
    if not paths:
        paths.append(str(own_tests.folder() / "tests"))
        # First: behind an option with an optional value, as --benchmark-compare, it is that value.
        arguments.insert(0, paths[0])


def keep_standard_input(arguments: list[str]) -> None:
    """Keep standard input for ``--server-log -``, before pytest puts /dev/null in its place.

    Args:
        arguments: The words of the command line.
    """
    pairs = itertools.pairwise(arguments)
    if "--server-log=-" in arguments or ("--server-log", "-") in pairs:
        followed_log.keep_standard_input()


def refuse_misspelt(parser: pytest.Parser, arguments: list[str]) -> None:
    """Refuse an option that is near to one of the suite's, or needs a package that is not there.

    Args:
        parser: pytest's parser.
        arguments: The words of the command line.

    Raises:
        pytest.UsageError: It names the suite's option, or the package.
    """
    _, unknown = parser.parse_known_and_unknown_args(arguments)
    workers.refuse_without_xdist(unknown)
    for word in unknown:
        name = word.partition("=")[0]
        if not name.startswith("--"):
            continue
        hint = did_you_mean(name, own_options.every())
        if hint:
            raise pytest.UsageError(f"unrecognized argument {name}{hint}")


def refuse_unknown(config: pytest.Config, parser: pytest.Parser, arguments: list[str]) -> None:
    """Refuse an unknown option in one line: pytest writes its usage, too.

    So does ``sm121 run``, and pytest in the suite's clone. Other projects have pytest's own text.

    Args:
        config: pytest's.
        parser: pytest's parser.
        arguments: The words of the command line.

    Raises:
        pytest.UsageError: It names the unknown words.
    """
    _, unknown = parser.parse_known_and_unknown_args(arguments)
    is_of_the_suite = is_own_run(config) or config.rootpath == own_tests.folder()
    if is_of_the_suite and any(word.startswith("-") for word in unknown):
        raise pytest.UsageError(
            f"unrecognized arguments: {' '.join(unknown)}. List the options with --help"
        )


def refuse_numbers(config: pytest.Config) -> None:
    """Refuse a number behind an option that takes one word: a list with commas was meant.

    Args:
        config: pytest's.

    Raises:
        UsageError: It shows that list.
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
                f"{name} {given}: expected one list with commas, as in {option} {listed}"
            )


def refuse_empty_values(config: pytest.Config) -> None:
    """Refuse an empty value: the variable that it comes from is not set.

    Without its ``--base-url`` a run would judge another server, which it starts itself.

    Args:
        config: pytest's.

    Raises:
        UsageError: It names the option.
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
    """Return the markers of the suite, as pytest shows them: for levels, and the others."""
    levels = [f"{name}: tests of the {name} level" for name in profile_fields.LEVELS]
    return [*levels, *_MARKERS]


def read(config: pytest.Config) -> settings.Settings:
    """Read and validate the settings of a run from the command line.

    Args:
        config: pytest's.

    Raises:
        UsageError: An option is wrong.
    """
    if not __debug__:
        raise errors.UsageError(
            "python -O (PYTHONOPTIMIZE) drops assertions, and with them what the suite requires: "
            "expected a run without it"
        )
    given_to_worker = getattr(config, "workerinput", None)
    worker = workers.worker_of(config)
    strength = config.getoption("--matrix")
    if strength is not None:
        covering.parse_strength(strength)
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
    read = settings.read(
        config.getoption,
        config.invocation_params.dir,
        names_tests=expressions.names_tests(config),
        marked=architectures_asked_for(expressions.marker_expression(config)),
    )
    refuse_empty_values(config)
    if given_to_worker is not None and worker is not None:  # the first process has chosen
        name, reason = given_to_worker["sm121_plan"]
        planned = PlanChoice(name, Reason(reason))
        read = replace(read, measuring=replace(read.measuring, planned=planned))
    root = config.invocation_params.dir if is_own_run(config) else config.rootpath
    return replace(read, root=root, worker=worker, options=fingerprinted(options))


def _refuse_log_on_stdin(config: pytest.Config) -> None:
    """Raise UsageError if the run starts processes, which have no standard input."""
    if workers.is_parallel(config) or workers.worker_of(config) is not None:
        starting = "-n"
    elif config.getoption("--certify"):
        starting = "--certify"
    else:
        return
    raise errors.UsageError(
        f"--server-log - with {starting}: expected a file or --container NAME: the processes that "
        "such a run starts have no standard input"
    )
