"""Finds which levels, tests and architectures the command line names, by paths, ``-k``, ``-m``."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from pytest_gpu_arch import status
from pytest_gpu_arch.expression import architectures_asked_for, asked_for, evaluate, words_of
from sm121.core import errors, own_tests
from sm121.core.architecture import CPU, NAMES
from sm121.core.profile_fields import LEVELS
from sm121.core.suggestion import did_you_mean
from sm121.plugin.stash import SETTINGS


def marker_expression(config: pytest.Config) -> str:
    """Return the expression of ``-m``; empty without one.

    Args:
        config: The configuration of pytest.
    """
    return config.getoption("markexpr", "") or ""


def refuse_wrong_expressions(config: pytest.Config) -> None:
    """Refuse an expression of ``-k`` or ``-m`` that pytest cannot parse.

    Args:
        config: The configuration of pytest.

    Raises:
        UsageError: The expression is wrong. The message contains the expression and the error.
    """
    for option, name in (("-k", "keyword"), ("-m", "markexpr")):
        expression = config.getoption(name, "") or ""
        try:
            Expression.compile(expression)
        except SyntaxError as error:
            what = f"at column {error.offset}: {error.msg}"
            raise errors.UsageError(f"{option} {expression!r}: {what}") from error
        except Exception as error:  # before pytest 9: another exception, "at column N: ..."
            raise errors.UsageError(f"{option} {expression!r}: {error}") from error


def refuse_misspelt_marker(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Refuse an unknown marker in ``-m`` whose name resembles a marker of the suite.

    Args:
        config: The configuration of pytest.
        items: The collected tests.

    Raises:
        UsageError: There is such a marker. The message suggests the suite's marker.
    """
    expression = marker_expression(config)
    registered = {re.split(r"[:(]", line)[0].strip() for line in config.getini("markers")}
    unknown = words_of(expression) - registered
    if not unknown:
        return
    for item in items:
        unknown.difference_update(marker.name for marker in item.iter_markers())
    for word in sorted(unknown):
        hint = did_you_mean(word, [*NAMES, "gpu", *LEVELS])
        if hint:
            raise errors.UsageError(
                f"-m {expression!r}: expected the name of a marker, got {word}{hint}"
            )


def names_tests(config: pytest.Config) -> bool:
    """Whether the command line selects levels or tests.

    It does so by a path, by ``-k``, or by ``-m`` with a marker other than an architecture.

    Args:
        config: The configuration of pytest.
    """
    if any("::" in str(path) for path in config.args):
        return True
    if not all(own_tests.has_every_level(path) for path in files(config)):
        return True
    if config.getoption("keyword", ""):
        return True
    expression = marker_expression(config)
    markers = words_of(expression) - {*NAMES, "gpu"}
    return bool(asked_for(expression, sorted(markers)))


def files(config: pytest.Config) -> list[Path]:
    """Return the files and folders of the command line, without names of tests.

    Args:
        config: The configuration of pytest.
    """
    return [config.invocation_params.dir / str(path).partition("::")[0] for path in config.args]


def asked_for_levels(config: pytest.Config) -> bool:
    """Whether the command line names a target: by ``--certify``, or by an architecture.

    Args:
        config: The configuration of pytest. In a worker, and if pytest only prints information, the
            result is False.
    """
    if hasattr(config, "workerinput"):
        return False
    if status.only_shows(config):
        return False
    settings = config.stash.get(SETTINGS, None)
    if settings is None:
        return False
    if settings.judging.certify or settings.target.arch:
        return True
    return bool(architectures_asked_for(marker_expression(config)))


def selects_any(expression: str, items: Sequence[pytest.Item], arch: str) -> bool:
    """Return whether ``-m`` would select a test if all tests applied to one architecture only.

    Args:
        expression: The expression of ``-m``; an empty one selects all.
        items: The tests.
        arch: The architecture.
    """
    if not expression:
        return True
    of_arch = markers_of(arch)
    for item in items:
        markers = {marker.name for marker in item.iter_markers()} - {*NAMES, "gpu"}
        if evaluate(expression, markers | of_arch):
            return True
    return False


def markers_of(arch: str) -> set[str]:
    """Return the markers of a test that applies to one architecture only.

    Args:
        arch: The architecture.
    """
    if arch == CPU:
        return {CPU}
    return {arch, "gpu"}
