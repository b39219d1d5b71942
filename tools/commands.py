"""The subcommands of ``sm121`` that need a checkout. Imports nothing heavy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm121.cli import positive, progress


def add(commands: Any) -> None:
    """Add them to argparse's subcommands."""
    train = _command(
        commands, "canary-train", _canary_train, "train the canary's weights anew (CPU, minutes)"
    )
    train.add_argument("file", type=Path, metavar="FILE", help="the weights, when done")
    train.add_argument("--steps", type=positive, metavar="N", help="default: the recipe's")
    train.add_argument("--seed", type=int, metavar="N", help="default: the recipe's")
    train.add_argument("--threads", type=int, default=1, metavar="N", help="default: 1")

    ablation = _command(
        commands,
        "ablation",
        _ablation,
        "how far each broken feature moves the canary's log-probabilities",
    )
    ablation.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="the canary's BF16 twin"
    )
    _output(ablation, "docs/ablation.md")

    tolerances = _command(
        commands,
        "tolerances",
        _tolerances,
        "the smallest defects that the numerics' tolerances detect",
    )
    _output(tolerances, "docs/tolerances.md")

    reference = _command(
        commands,
        "reference",
        _reference,
        "the generated pages of the documentation (in a checkout of the suite)",
    )
    reference.add_argument("directory", type=Path, metavar="DIR", help="docs of the checkout")


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary)
    parser.set_defaults(run=run)
    return parser


def _output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path(default), metavar="FILE", help=f"default: {default}"
    )


def _canary_train(options: argparse.Namespace) -> int:
    from tools import canary_recipe

    chosen = {"steps": options.steps, "seed": options.seed}
    given = {name: value for name, value in chosen.items() if value is not None}
    canary_recipe.train(options.file, threads=options.threads, progress=progress, **given)
    return 0


def _ablation(options: argparse.Namespace) -> int:
    from sm121.core import profile
    from tools import ablation

    own = profile.load("cpu-tiny-gpt-oss").correctness.log_probability_tolerance
    tolerances = {str(name): tolerance for name, tolerance in own.items()}
    rows, missed = ablation.write_report(options.checkpoint, options.output, tolerances)
    weakest = min(rows, key=lambda row: row.max)
    print(f"{options.output}: the hardest to see is {weakest.feature!r}: {weakest.max:.3g} nats")
    for name, features in missed.items():
        print(f"{name}: nothing catches: {', '.join(features) or 'none'}")
    return 1 if missed["float32"] else 0


def _tolerances(options: argparse.Namespace) -> int:
    from tools import tolerances

    broken = tolerances.write_report(options.output, progress=progress)
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken else 0


def _reference(options: argparse.Namespace) -> int:
    from tools.reference import pages

    for file in pages.write(options.directory):
        print(file)
    return 0
