"""The subcommands of ``sm121`` and their options, as argparse takes them.

A new option is one ``add_argument`` in the function of its command. ``sm121 reference`` writes the
page of commands from these parsers.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sm121.cli import look

#: The titles of ``sm121 --help``, in their order.
GROUPS = {
    "judge": "Judge a build",
    "look": "Look at what runs and what ran",
    "gate": "Gate merges",
    "more": "More",
    "authors": "For authors of the suite, from a checkout",
}
#: Commands that are not installed: ``tools.commands`` of a checkout has them.
OF_A_CHECKOUT = (
    "side-by-side",
    "synthetic",
    "canary-train",
    "ablation",
    "tolerances",
    "reference",
    "testlog",
)

#: The help of ``sm121 run --every``.
EVERY = (
    "check the server at --base-url every 10m, 1h, ...: smoke and correctness of plan quick, one "
    "line and one record a round, until a signal"
)


def _add_nothing(_parser: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class Subcommand:
    """The name and the arguments of a subcommand."""

    name: str
    #: A key of `GROUPS`.
    group: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = _add_nothing


def _run(parser: argparse.ArgumentParser) -> None:
    """Add the argument that is not pytest's, for the help; the command reads its own words."""
    parser.add_argument("--every", metavar="DURATION", help=EVERY)


def _canary(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        metavar="DIR",
        help=(
            "where it goes (default: where runs look for it, the variable SM121_CANARY or the"
            " user's cache)"
        ),
    )
    parser.add_argument(
        "--twin",
        choices=["bf16", "mxfp4", "both"],
        default="both",
        help="in which formats (default: both)",
    )


def _vocabulary(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="where o200k_base.tiktoken goes",
    )


def _golden(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a folder in the Hugging Face format",
    )
    parser.add_argument(
        "-o",
        type=Path,
        metavar="FILE",
        dest="output",
        required=True,
        help=(
            "where it goes; pytest takes it as --reference FILE. A computation that was "
            "stopped goes on in FILE.partial"
        ),
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="where it is computed: cpu, cuda, cuda:1, ... (default: cpu)",
    )
    parser.add_argument(
        "--rounding",
        metavar="LIST",
        default="checkpoint",
        help=(
            "what the server rounds beyond the checkpoint, as "
            "qkv=mxfp4-ceil,o=mxfp4-ceil,kv=fp8 (default: checkpoint, nothing)"
        ),
    )
    parser.add_argument(
        "--depth",
        action="append",
        metavar="TOKENS",
        choices=["8192", "32768"],
        default=[],
        help="the price of rounding is measured at this depth, too; repeatable",
    )


def _warm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        metavar="NAME|PATH",
        help="default: by architecture",
    )
    parser.add_argument(
        "--configuration",
        metavar="NAME",
        help="of the profile: what it and the baseline compile (default: the one under test)",
    )
    parser.add_argument(
        "--engine-python",
        metavar="PYTHON",
        default=sys.executable,
        help="the interpreter of the engine's environment (default: this one)",
    )
    parser.add_argument(
        "--engine-env",
        action="append",
        metavar="KEY=VALUE",
        default=[],
        help="a variable of its environment; repeatable",
    )
    parser.add_argument(
        "--module",
        action="append",
        metavar="NAME",
        default=[],
        help=(
            "this one alone (default: all that the configuration under test and the baseline "
            "need); repeatable"
        ),
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show what is missing, and compile nothing",
    )


def _matrix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        metavar="NAME|PATH",
        help="default: by architecture",
    )
    parser.add_argument(
        "--axes",
        metavar="NAME|PATH",
        help="default: the profile's",
    )
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="default: the profile's",
    )
    parser.add_argument(
        "--version",
        metavar="VERSION",
        dest="engine_version",
        help="of the engine; a build as in 0.14.0+mxfp4 (default: the settings of every release)",
    )
    parser.add_argument(
        "--strength",
        metavar="N|full",
        help="show the cells (default: the sizes)",
    )


def _trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories",
        type=Path,
        nargs="+",
        metavar="REPORT",
        help=(
            "its report directory; several runs of one build, oldest first: from three on, "
            "each metric is judged"
        ),
    )
    parser.add_argument(
        "--benchmark-storage",
        metavar="URI",
        default="file://./.benchmarks",
        help="pytest-benchmark's storage, which keeps it (default: file://./.benchmarks)",
    )
    parser.add_argument(
        "--anew",
        action="store_true",
        help="what was trusted before no longer counts: accept what is worse than it",
    )


def _merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="the report directories of all shards",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default="conformance-report-merged",
        help="default: conformance-report-merged",
    )


def _schema(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["verdict", "profile"],
        help="of which file",
    )


def _bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        type=Path,
        metavar="REPORT",
        help="its report directory",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: sm121-VERDICT-ARCH-STARTED.tar.gz",
    )


#: The subcommands in the order of the reference.
COMMANDS = (
    Subcommand(
        name="run",
        group="judge",
        help=(
            "run the suite: pytest, with the tests that belong to this package; all arguments but"
            " --every are pytest's"
        ),
        add_arguments=_run,
    ),
    Subcommand(
        name="certify",
        group="judge",
        help=(
            "run what a certificate needs, in a process that no plugin, pytest.ini or "
            "variable of yours reaches; all arguments are pytest's"
        ),
    ),
    Subcommand(
        name="canary",
        group="more",
        help="build the canary checkpoint, a tiny gpt-oss",
        add_arguments=_canary,
    ),
    Subcommand(
        name="vocabulary",
        group="more",
        help=(
            "write harmony's vocabulary for an engine without a network: start it with "
            "TIKTOKEN_ENCODINGS_BASE=DIR"
        ),
        add_arguments=_vocabulary,
    ),
    Subcommand(
        name="golden",
        group="more",
        help=(
            "compute what gpt-oss says of the fixed prompts, by the weights of a checkpoint "
            "of any size"
        ),
        add_arguments=_golden,
    ),
    Subcommand(
        name="health",
        group="look",
        help=(
            "whether a server generates one token in time: exit status 0 or 1; for systemd "
            "and docker's HEALTHCHECK"
        ),
        add_arguments=look.health,
    ),
    Subcommand(
        name="path",
        group="look",
        help="what a server runs, read from its log; or what its libraries can run",
        add_arguments=look.path,
    ),
    Subcommand(
        name="box",
        group="look",
        help="whether this machine is fit for measuring, now",
        add_arguments=look.box,
    ),
    Subcommand(
        name="warm",
        group="more",
        help="compile what an engine's first start would compile, without a server",
        add_arguments=_warm,
    ),
    Subcommand(
        name="compare",
        group="look",
        help="results of several runs side by side",
        add_arguments=look.compare,
    ),
    Subcommand(
        name="history",
        group="look",
        help=(
            "many runs over time: a row a run, where levels changed, what is red since when, "
            "flaky checks, machines that differ"
        ),
        add_arguments=look.history,
    ),
    Subcommand(
        name="matrix",
        group="judge",
        help="the cells of a profile's matrix and their coverage",
        add_arguments=_matrix,
    ),
    Subcommand(
        name="plan",
        group="judge",
        help=(
            "what `sm121 run` with the same arguments would ask here, how long it would take,"
            " and what cannot run; starts nothing"
        ),
    ),
    Subcommand(
        name="trust",
        group="gate",
        help="keep runs as those that --against trusted compares others with",
        add_arguments=_trust,
    ),
    Subcommand(
        name="merge",
        group="gate",
        help="one verdict of the shards of a run (--shard I/N)",
        add_arguments=_merge,
    ),
    Subcommand(
        name="schema",
        group="more",
        help="JSON Schema of verdict.json or of profiles",
        add_arguments=_schema,
    ),
    Subcommand(
        name="report",
        group="look",
        help="report.html and junit.xml of a stored run",
        add_arguments=look.report,
    ),
    Subcommand(
        name="bundle",
        group="gate",
        help=(
            "one archive of a run, to attach to an issue: verdict, report, logs, environment,"
            " without secrets, with checksums"
        ),
        add_arguments=_bundle,
    ),
)
