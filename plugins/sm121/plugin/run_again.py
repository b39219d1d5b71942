"""Makes the commands that run tests again in the same way as a failed run."""

import os
import shlex
from collections.abc import Sequence

import pytest

from sm121.core import own_tests
from sm121.core.printable import printable
from sm121.core.profile_fields import FULL
from sm121.core.verdict import Verdict
from sm121.plugin.own_run import is_own_run
from sm121.report import findings, metric_verdicts
from sm121.run.verdict_file import TestReport, VerdictFile
from sm121.session import own_options
from sm121.session.session import Session

#: Options that a command to run tests again leaves out, with the number of their values. They only
#: set where output goes, or select other tests. ``-m`` is kept, because it may name the
#: architecture.
_NOT_REPEATED = {
    "--report-dir": 1,
    "--junitxml": 1,
    "--junit-xml": 1,
    "--benchmark-save": 1,
    "--dist": 1,
    "--numprocesses": 1,
    "-n": 1,
    "--benchmark-autosave": 0,
    "--certify": 0,
    "--last-failed": 0,
    "--lf": 0,
    "--stepwise": 0,
    "--sw": 0,
    "-q": 0,
    "-v": 0,
    "--resume": 0,
    "--shard": 1,  # with fewer tests, a shard would contain other ones
}
#: The option that selects tests by name. A command that names its tests does not need it.
_BY_NAME = "-k"
#: The option that selects tests by marker. If it occurs twice, pytest uses the last one.
_BY_MARKER = "-m"
_PLAN = "--plan"
#: The maximum number of tests that a command names. For more tests it names their files.
_MOST_TESTS = 5


def whole(config: pytest.Config, session: Session, *more: str) -> str:
    """Return the command that runs everything again.

    Args:
        config: The configuration of pytest.
        session: The run.
        more: Options to add at the end.
    """
    return line(session, config, [*_arguments(config), *more])


def of_test(config: pytest.Config, session: Session, test: str, *more: str) -> str:
    """Return the command that runs one test again.

    Args:
        config: The configuration of pytest.
        session: The run.
        test: The id of the test.
        more: Options to add at the end.
    """
    return _of_paths(config, session, [_from_here(config, test)], *more)


def of_files_whole(config: pytest.Config, session: Session, files: Sequence[str]) -> str:
    """Return the command that runs files of tests with the plan `FULL`.

    Args:
        config: The configuration of pytest.
        session: The run.
        files: The files, relative to pytest's root.
    """
    words = []
    is_value = False
    for word in repeated(config):
        if not is_value and word.partition("=")[0] != _PLAN:
            words.append(word)
        is_value = word == _PLAN
    paths = [_from_here(config, file) for file in files]
    return line(session, config, [*paths, *words, _PLAN, FULL])


def of_failed(config: pytest.Config, session: Session) -> str | None:
    """Return the command that runs the failed tests of a closed run again; None if none failed.

    The command names at most five tests. If more tests failed, it names their files, with the plan,
    ``-m`` and ``-k`` of the run. If a failed check is not a test, or compares the measurements of
    other tests, it is the command of the whole run.

    Args:
        config: The configuration of pytest.
        session: The run.
    """
    run = session.run
    counted = (run.record.file.verdict, Verdict.FAIL, Verdict.INVALID)
    failed = [test for test in findings.failures(run.record.file) if test.verdict in counted]
    if not failed:
        return None
    are_tests = all(_runs_alone(run.record.file, test) for test in failed)
    are_many = len(failed) > _MOST_TESTS
    named_tests = any("::" in path for path in config.option.file_or_dir or ())
    if not are_tests or (are_many and named_tests):
        return whole(config, session)
    paths = [_from_here(config, test.id) for test in failed]
    if are_many:
        paths = [path.partition("::")[0] for path in paths]
    return _of_paths(config, session, list(dict.fromkeys(paths)))


def line(session: Session, config: pytest.Config, arguments: Sequence[str]) -> str:
    """Return a command line for a shell, without secrets.

    Args:
        session: The run. It knows the secrets.
        config: The configuration of pytest.
        arguments: The arguments after the name of the program.
    """
    command = ["sm121", "run"] if is_own_run(config) else ["python", "-m", "pytest"]
    # Remove secrets before quoting, because quoting changes a secret that contains a quote.
    command += [session.run.record.redact(argument) for argument in arguments]
    return printable(session.run.record.redact(shlex.join(command)))


def _runs_alone(run: VerdictFile, test: TestReport) -> bool:
    """Whether a failed check is a test that does not use measurements of other tests."""
    if test.has_no_test or test.is_of_option:
        return False
    measures_itself = any(change.beside == metric_verdicts.OF_AB for change in run.changes)
    return test.level != "regression" or measures_itself


def _of_paths(config: pytest.Config, session: Session, paths: Sequence[str], *more: str) -> str:
    """Return the command that runs some paths, with the plan (named tests default to full)."""
    names_tests = any("::" in path for path in paths)
    words = repeated(config, by_name=not names_tests)
    plan = session.settings.plan
    is_named = any(word.partition("=")[0] == _PLAN for word in words)
    if plan != FULL and not is_named:
        words += [_PLAN, plan]
    return line(session, config, [*paths, *words, *more])


def _from_here(config: pytest.Config, test: str) -> str:
    """Return a test's path from the current folder; a test's id is relative to pytest's root."""
    if is_own_run(config):
        return test
    file, separator, name = test.partition("::")
    here = os.path.relpath(config.rootpath / file, config.invocation_params.dir)
    return f"{here}{separator}{name}"


def _arguments(config: pytest.Config) -> list[str]:
    arguments = [str(argument) for argument in config.invocation_params.args]
    if is_own_run(config):
        return own_tests.given(arguments)
    return arguments


def repeated(config: pytest.Config, *, by_name: bool = False) -> list[str]:
    """Return those arguments of the command line that still apply if tests are named.

    Args:
        config: The configuration of pytest.
        by_name: Whether to keep ``-k``.
    """
    positional = set(config.option.file_or_dir or ())
    left_out = dict(_NOT_REPEATED)
    if not by_name:
        left_out[_BY_NAME] = 1
    words: list[str] = []
    skip = 0
    values = 0
    for argument in _arguments(config):
        name, separator, _ = argument.partition("=")
        if values:  # a value of --ab may begin with a hyphen
            values -= 1
            words.append(argument)
        elif skip:
            skip -= 1
        elif name in left_out:
            skip = 0 if separator else left_out[name]
        elif argument[:2] in left_out:
            continue  # for example -n2 or -vv
        elif own_tests.located(argument) not in positional:
            words.append(argument)
            option = own_options.every().get(argument)
            if option is not None and isinstance(option.nargs, int):
                values = option.nargs
    return _with_one_marker(words)


def _with_one_marker(words: list[str]) -> list[str]:
    """Remove all ``-m`` options but the last one, which is the one that pytest uses."""
    places = [at for at, word in enumerate(words) if word == _BY_MARKER]
    overruled = set()
    for at in places[:-1]:
        overruled |= {at, at + 1}
    return [word for at, word in enumerate(words) if at not in overruled]
