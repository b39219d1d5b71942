"""All options that the suite adds to pytest's, in the order of ``pytest --help``.

Each option is declared once, in the module ``options`` of its package (`sm121.core.options`). By
default, a new option belongs to the fingerprint of a run, and ``--certify`` refuses it. To change
this, add the option to ``fixtures/fingerprinted-options.toml`` and ``fixtures/certificate.toml``.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pytest_gpu_arch.options import add_options as add_architecture
from sm121.answers.options import AnswerOptions
from sm121.core import options
from sm121.core.command_parser import Parser
from sm121.core.options import AddOption, Declaration
from sm121.engines.options import AttachedOptions, GivenEngine, NodeOptions
from sm121.kernels.options import KernelOptions
from sm121.matrix.options import MatrixOptions
from sm121.performance.options import MeasuringOptions
from sm121.regression.options import ComparingOptions
from sm121.report.options import ReportOptions
from sm121.session.options import GivenTarget, PartOptions, PlanOptions
from sm121.stress.options import StressOptions

#: A dataclass that declares options, or a function that adds them.
AddOptions: TypeAlias = type | Callable[[AddOption], None]


class _AnyWords(int):
    """A number of command-line arguments, which may begin with a hyphen.

    argparse would take ``--enforce-eager`` after ``--ab ""`` for another option. It builds the
    pattern of an option's values by ``"A" * nargs``, where A is a value and O is an option.
    """

    def __rmul__(self, _word: object) -> list[str]:  # type: ignore[override]
        return ["[AO]"] * int(self)


@dataclass(frozen=True)
class OptionGroup:
    """A group of options in ``pytest --help``."""

    title: str
    add_options: tuple[AddOptions, ...]

    def add(self, add: AddOption) -> None:
        """Add the options of the group.

        Args:
            add: A function that adds an option.
        """

        def add_with_any_words(*names: str, **keywords: Any) -> None:
            if isinstance(keywords.get("nargs"), int):
                keywords["nargs"] = _AnyWords(keywords["nargs"])
            add(*names, **keywords)

        for add_options in self.add_options:
            if isinstance(add_options, type):
                options.add_options(add_options, add_with_any_words)
            else:
                add_options(add_with_any_words)


#: The group of the plugin `pytest_gpu_arch`, which adds it to ``pytest --help`` itself.
ARCHITECTURE = OptionGroup("architecture", (add_architecture,))
#: The groups that the suite adds.
GROUPS = (
    OptionGroup("target", (GivenTarget,)),
    OptionGroup("engine", (GivenEngine, AttachedOptions, NodeOptions)),
    OptionGroup(
        "checks",
        (PlanOptions, StressOptions, KernelOptions, AnswerOptions, MatrixOptions, PartOptions),
    ),
    OptionGroup("measuring", (MeasuringOptions,)),
    OptionGroup("comparing", (ComparingOptions,)),
    OptionGroup("report", (ReportOptions,)),
)
EVERY_GROUP = (ARCHITECTURE, *GROUPS)


def declarations() -> Iterator[Declaration]:
    """Yield the declaration of each option that is the field of a dataclass."""
    for group in GROUPS:
        for each in group.add_options:
            if isinstance(each, type):
                yield from options.declarations(each).values()


@functools.cache
def _parser() -> Parser:
    """Return a parser that knows only the suite's options."""
    parser = Parser(prog="sm121 run", add_help=False, allow_abbrev=False)
    for group in EVERY_GROUP:
        group.add(parser.add_argument)
    return parser


def every() -> Mapping[str, argparse.Action]:
    """Return the options by their names, ``--arch`` first."""
    return _parser()._option_string_actions


def reader(words: Sequence[str]) -> Callable[[str], Any]:
    """Read the suite's options from a command line, without pytest.

    Args:
        words: The arguments of the command line. Other options are skipped.

    Returns:
        A function that returns the value of an option, or its default, by the option's name.

    Raises:
        UsageError: An option has no value, or a wrong one.
    """
    values, _ = _parser().parse_known_args(list(words))
    return lambda name: getattr(values, every()[name].dest)
