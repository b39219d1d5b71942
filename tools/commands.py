"""Add the subcommands of ``sm121`` that need a checkout.

This module imports only modules that load quickly.
"""

import argparse
import functools
import sys
import time
from pathlib import Path

from sm121.cli.command import Command, Commands, command, progress
from sm121.core.errors import UsageError
from sm121.core.files import refuse_unwritable


def add(commands: Commands) -> None:
    """Add the subcommands to argparse's, and the options of a checkout to `sm121 canary`.

    Args:
        commands: The subcommands of ``sm121``, which include ``canary``.
    """
    canary: argparse.ArgumentParser = commands.choices["canary"]
    canary.add_argument(
        "--gguf",
        type=Path,
        metavar="LLAMA_CPP",
        help="folder of a checkout of llama.cpp, whose converter also writes DIR/canary.gguf",
    )
    canary.set_defaults(run=functools.partial(_canary, canary.get_default("run")))

    _add_synthetic(commands)
    train = command(
        commands, "canary-train", _canary_train, "train the canary's weights anew (CPU, minutes)"
    )
    train.add_argument(
        "file", type=Path, metavar="FILE", help=("file into which the trained weights are written")
    )
    train.add_argument(
        "--steps", type=_positive, metavar="N", help="training steps (default: the recipe's)"
    )
    train.add_argument("--seed", type=int, metavar="N", help="random seed (default: the recipe's)")
    train.add_argument(
        "--threads", type=int, default=1, metavar="N", help="threads of torch (default: 1)"
    )

    ablation = command(
        commands,
        "ablation",
        _ablation,
        "compute how much the canary's log-probabilities change if one feature of the model is "
        "broken",
    )
    ablation.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="folder of the canary in BF16"
    )
    _output(ablation, "docs/tables/ablation.md")

    tolerances = command(
        commands,
        "tolerances",
        _tolerances,
        "compute the smallest defect that each tolerance of the kernel tests detects",
    )
    _output(tolerances, "docs/tables/tolerances.md")

    reference = command(
        commands,
        "reference",
        _reference,
        "write the generated pages of the documentation (in a checkout of the suite)",
    )
    reference.add_argument(
        "directory", type=Path, metavar="DIR", help=("folder docs of the checkout")
    )


def _add_synthetic(commands: Commands) -> None:
    made = command(
        commands,
        "synthetic",
        _synthetic,
        "write a checkpoint with the shape of gpt-oss that answers like the canary; needs no "
        "download of the real weights",
    )
    made.add_argument(
        "directory", type=Path, metavar="DIR", help="folder to write the checkpoint to"
    )
    made.add_argument(
        "--shape",
        choices=["gpt-oss-120b", "gpt-oss-20b"],
        required=True,
        help=(
            "gpt-oss-120b: 36 layers of 128 experts (61 GiB); gpt-oss-20b: 24 layers of 32 "
            "experts (13 GiB)"
        ),
    )
    made.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="number of layers; with fewer than 4, the checkpoint does not contain the canary, and "
        "its texts are noise (default: all)",
    )
    made.add_argument(
        "--seed", type=int, metavar="S", default=0, help="seed of the random weights (default: 0)"
    )
    made.add_argument(
        "--twin",
        choices=["mxfp4", "bf16"],
        default="mxfp4",
        help="format of the experts; bf16: the same values as mxfp4 in four times the size, for "
        "engines without MXFP4 (default: mxfp4)",
    )


def _output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path(default), metavar="FILE", help=f"default: {default}"
    )


def _positive(text: str) -> int:
    """Parse an option's value: an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def _canary(build: Command, options: argparse.Namespace) -> None:
    """Build the BF16 and the MXFP4 canary, and then the GGUF file if it was requested."""
    from sm121.checkpoint import canary
    from tools import gguf

    build(options)
    if options.gguf is not None:
        if options.twin == "mxfp4":
            raise UsageError("--gguf with --twin mxfp4: it is made of the BF16 twin")
        folder = options.directory or canary.folder()
        gguf.convert(folder / "bf16", options.gguf, folder / gguf.NAME, progress)


def _synthetic(options: argparse.Namespace) -> int:
    from tools import synthetic

    begun = time.monotonic()
    synthetic.write(
        options.directory,
        options.shape,
        layers=options.layers,
        seed=options.seed,
        twin=options.twin,
        progress=progress,
    )
    progress(f"{time.monotonic() - begun:.0f} s")
    return 0


def _canary_train(options: argparse.Namespace) -> int:
    from tools.canary import recipe

    refuse_unwritable("FILE", options.file)
    chosen = {"steps": options.steps, "seed": options.seed}
    given = {}
    for name, value in chosen.items():
        if value is not None:
            given[name] = value
    recipe.train(options.file, threads=options.threads, progress=progress, **given)
    return 0


def _ablation(options: argparse.Namespace) -> int:
    from sm121.core import profile
    from tools import ablation

    refuse_unwritable("--output", options.output)
    own = profile.load("cpu-tiny-gpt-oss").correctness.log_probability_tolerance["float32"]
    rows, missed = ablation.write_report(options.checkpoint, options.output, own)
    weakest = min(rows, key=lambda row: row.max)
    print(f"{options.output}: the hardest to see is {weakest.feature!r}: {weakest.max:.3g} nats")
    for name, features in missed.items():
        print(f"{name}: nothing catches: {', '.join(features) or 'none'}")
    if missed["float32"]:
        return 1
    return 0


def _tolerances(options: argparse.Namespace) -> int:
    from tools import tolerances_page

    refuse_unwritable("--output", options.output)
    broken = tolerances_page.write(options.output, progress=progress)
    for line in broken:
        print(line, file=sys.stderr)
    if broken:
        return 1
    return 0


def _reference(options: argparse.Namespace) -> int:
    from tools.reference import pages

    for file in pages.write(options.directory):
        print(file)
    return 0
