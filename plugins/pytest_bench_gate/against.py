"""The option ``--against``: it names the stored run with which a run's gates are compared.

The option is like ``--benchmark-compare``, but it always names a run, and a run in which no metric
was compared does not pass. The suite has an option of this name for its own report directories.
This plugin therefore adds the option only if no other plugin or conftest.py has added it.
"""

import itertools
from collections.abc import Sequence

import pytest

from pytest_bench_gate.history import OPTION, OPTION_OF

NAME = "--against"
#: Whether the option is this plugin's.
_IS_OURS = pytest.StashKey[bool]()


def add(config: pytest.Config, parser: pytest.Parser, arguments: Sequence[str]) -> None:
    """Add the option, unless another plugin or a conftest.py has an option of that name.

    Args:
        config: The configuration of the run, to which all plugins have added their options.
        parser: The parser of pytest.
        arguments: The command line.

    Raises:
        pytest.UsageError: The value is a path after a space. pytest has taken it for a path of
            tests, because the option was unknown when pytest looked for pytest.ini.
    """
    _, unknown = parser.parse_known_and_unknown_args([f"{NAME}=0001"])
    config.stash[_IS_OURS] = bool(unknown)
    if not unknown:
        return
    parser.getgroup("bench_gate", "gates on benchmarks").addoption(
        NAME,
        metavar="RUN",
        help="compare the gates with this stored run: its number, or a file of --benchmark-json",
    )
    for name, value in itertools.pairwise(arguments):
        if name == NAME and (config.invocation_params.dir / value).exists():
            raise pytest.UsageError(
                f"{NAME} {value}: expected {NAME}={value}, got a space. pytest takes a path after "
                "a space as a path of tests. Write ="
            )


def apply(config: pytest.Config) -> None:
    """Compare with the run that the option names, by means of ``--benchmark-compare``.

    Args:
        config: The configuration of the run, before pytest-benchmark reads its options.

    Raises:
        pytest.UsageError: Both options are given.
    """
    named = config.getoption(NAME, None) if config.stash.get(_IS_OURS, False) else None
    if named is None:
        return
    # A worker of pytest-xdist gets the value that the first process has set here.
    if config.getoption("benchmark_compare", None) not in (None, [], named):
        raise pytest.UsageError(
            f"{NAME} with {OPTION}: expected one of them, got both. Leave out {OPTION}"
        )
    config.stash[OPTION_OF] = NAME
    config.option.benchmark_compare = named


def is_given(config: pytest.Config) -> bool:
    """Check whether the user gave this option, after `apply`.

    Args:
        config: The configuration of the run.
    """
    return config.stash.get(OPTION_OF, OPTION) == NAME
