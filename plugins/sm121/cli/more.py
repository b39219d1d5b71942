"""The commands that prepare files for a run (canary, caches), and that print the schemas."""

import argparse
import json
import sys
import time
from pathlib import Path

from sm121.cli.command import Commands, command, progress
from sm121.core import described_schema, profile, templates
from sm121.core.errors import UsageError
from sm121.core.files import refuse_unwritable

#: The width of a progress bar in characters.
_BAR = 30


def add(commands: Commands) -> None:
    """Add the commands.

    Args:
        commands: The subcommands of the parser.
    """
    _add_canary(commands)
    _add_vocabulary(commands)
    _add_golden(commands)
    _add_warm(commands)
    _add_schema(commands)


def _add_canary(commands: Commands) -> None:
    parser = command(
        commands,
        "canary",
        _canary,
        "build the canary: a tiny gpt-oss checkpoint for tests",
    )
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        metavar="DIR",
        help=(
            "folder to write the checkpoint to (default: the folder that runs use: that of the "
            "variable SM121_CANARY, otherwise the user's cache)"
        ),
    )
    parser.add_argument(
        "--twin",
        choices=["bf16", "mxfp4", "both"],
        default="both",
        help="format of the weights (default: both)",
    )


def _canary(options: argparse.Namespace) -> None:
    from sm121.checkpoint import canary

    folder = options.directory or canary.folder()
    for twin in ("bf16", "mxfp4") if options.twin == "both" else (options.twin,):
        canary.build(folder / twin, twin, progress=progress)


def _add_vocabulary(commands: Commands) -> None:
    parser = command(
        commands,
        "vocabulary",
        _vocabulary,
        (
            "write the vocabulary of harmony, gpt-oss's chat format, into a folder, for an "
            "engine that cannot download it; then start the engine with "
            "TIKTOKEN_ENCODINGS_BASE=DIR"
        ),
    )
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="folder into which the file o200k_base.tiktoken is written",
    )


def _vocabulary(options: argparse.Namespace) -> None:
    from sm121.checkpoint import vocabulary

    print(vocabulary.write(options.directory))


def _add_golden(commands: Commands) -> None:
    parser = command(
        commands,
        "golden",
        _golden,
        (
            "compute the oracle's reference answers from a gpt-oss checkpoint of any size, for "
            "pytest --reference. The file is no golden file, which --record-golden writes"
        ),
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="folder of the checkpoint, in the Hugging Face format",
    )
    parser.add_argument(
        "-o",
        type=Path,
        metavar="FILE",
        dest="output",
        required=True,
        help=(
            "file to write, such as oracle.json. If the command is interrupted, the same command "
            "continues from FILE.partial"
        ),
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="device that computes: cpu, cuda, cuda:1, ... (default: cpu)",
    )
    parser.add_argument(
        "--rounding",
        metavar="LIST",
        default="checkpoint",
        help=(
            "formats to which the server rounds in addition to the checkpoint's own formats, such "
            "as qkv=mxfp4-ceil,o=mxfp4-ceil,kv=fp8 (default: the word checkpoint, which stands for "
            "none)"
        ),
    )
    parser.add_argument(
        "--depth",
        action="append",
        metavar="TOKENS",
        choices=["8192", "32768"],
        default=[],
        help="also measure the accuracy cost of rounding at this depth; repeatable",
    )


def _golden(options: argparse.Namespace) -> None:
    from sm121.answers import oracle_file, oracle_making
    from sm121.machine import this_machine
    from sm121.oracles.formats import Rounding

    rounding = Rounding.parse(options.rounding)
    if not (options.checkpoint / "config.json").is_file():
        raise UsageError(f"{options.checkpoint}: expected a checkpoint folder with config.json")
    if not options.output.absolute().parent.is_dir():
        raise UsageError(f"-o {options.output}: expected a file in an existing folder")
    refuse_unwritable("-o", options.output)
    begun = time.monotonic()
    peak = 0.0

    def show_progress(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, this_machine.own_memory_gib())
        filled = "#" * (_BAR * done // total)
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        minutes = (time.monotonic() - begun) / 60
        line = f"[{filled:{_BAR}}] {done} of {total} layers, {minutes:.1f} minutes"
        print(line, end=end, file=sys.stderr, flush=True)

    made = oracle_making.make(
        options.checkpoint,
        rounding,
        map(int, options.depth),
        options.device,
        kept=options.output.with_name(f"{options.output.name}.partial"),
        say=show_progress,
    )
    oracle_file.save(made, options.output)
    print(f"{options.output}: {made.seconds / 60:.1f} minutes, {peak:.1f} GiB of memory")


def _add_warm(commands: Commands) -> None:
    parser = command(
        commands,
        "warm",
        _warm,
        "compile FlashInfer's kernels that the first start of an engine would compile; starts no "
        "server",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME|PATH",
        help="name or path of the profile (default: by architecture)",
    )
    parser.add_argument(
        "--configuration",
        metavar="NAME",
        help=(
            "configuration of the profile; its kernels and those of the baseline are compiled "
            "(default: the one under test)"
        ),
    )
    parser.add_argument(
        "--engine-python",
        metavar="PYTHON",
        default=sys.executable,
        help=(
            "Python interpreter of the engine's environment (default: the one that runs the suite)"
        ),
    )
    parser.add_argument(
        "--engine-env",
        action="append",
        metavar="KEY=VALUE",
        default=[],
        help="environment variable for the engine; repeatable",
    )
    parser.add_argument(
        "--module",
        action="append",
        metavar="NAME",
        default=[],
        help=(
            "compile only this module; repeatable (default: all modules that the configuration "
            "under test and the baseline need)"
        ),
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the missing modules, and compile nothing",
    )


def _warm(options: argparse.Namespace) -> int:
    from sm121.core import architecture
    from sm121.engines.warm import RequiredModules

    name = options.profile or profile.for_architecture(architecture.detect().name or "unknown")
    variables = {}
    for assignment in options.engine_env:
        key, equals, value = assignment.partition("=")
        if not (key and equals):
            raise UsageError(f"--engine-env {assignment}: expected KEY=VALUE")
        variables[key] = value
    warmth = RequiredModules.of(
        profile.load(name), options.engine_python, variables, options.module, options.configuration
    )
    print(templates.rendered("warm.txt.j2", warmth=warmth), end="")
    if options.dry_run:
        return 0
    missing = list(warmth.missing)
    obstructed = [module for module in missing if warmth.obstacle(module) is not None]
    failed = list(obstructed)
    for module in missing:
        if module in obstructed:
            continue
        progress(f"{module.name}: compiling")
        fault = warmth.build(module, progress)
        progress(f"{module.name}: {fault or 'compiled'}")
        if fault is not None:
            failed.append(module)
    if failed:
        print(f"missing: {', '.join(module.name for module in failed)}")
    return 1 if failed else 0


def _add_schema(commands: Commands) -> None:
    parser = command(
        commands,
        "schema",
        _schema,
        "print the JSON Schema of verdict.json or of profiles",
    )
    parser.add_argument(
        "what",
        choices=["verdict", "profile"],
        help="the file that the schema describes",
    )


def _schema(options: argparse.Namespace) -> None:
    from sm121.run import verdict_file

    if options.what == "verdict":
        schema = verdict_file.json_schema()
    else:
        schema = described_schema.json_schema(profile.Profile, "validation")
    print(json.dumps(schema, indent=2, sort_keys=True))
