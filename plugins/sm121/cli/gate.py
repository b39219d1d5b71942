"""The commands that gate merges: ``trust``, ``merge`` and ``bundle``."""

import argparse
from pathlib import Path

from sm121.cli.command import Commands, command
from sm121.core import templates


def add(commands: Commands) -> None:
    """Add the commands.

    Args:
        commands: The subcommands of the parser.
    """
    _add_trust(commands)
    _add_merge(commands)
    _add_bundle(commands)


def _add_trust(commands: Commands) -> None:
    parser = command(
        commands,
        "trust",
        _trust,
        "store runs as trusted, so that --against trusted compares with them",
    )
    parser.add_argument(
        "directories",
        type=Path,
        nargs="+",
        metavar="REPORT",
        help=(
            "report directory of a run; several runs of one build are possible, oldest first. "
            "With three or more trusted runs, every metric of a later run can be judged"
        ),
    )
    parser.add_argument(
        "--benchmark-storage",
        metavar="URI",
        default="file://./.benchmarks",
        help=(
            "storage of pytest-benchmark to which the command adds the runs (default: "
            "file://./.benchmarks)"
        ),
    )
    parser.add_argument(
        "--anew",
        action="store_true",
        help=(
            "accept a run that is worse than the trusted one; earlier trusted runs no longer count"
        ),
    )


def _trust(options: argparse.Namespace) -> None:
    from sm121.regression import trend
    from sm121.run import stored_benchmarks
    from sm121.session import trusted_runs

    storage = stored_benchmarks.storage_folder(options.benchmark_storage, Path.cwd())
    for number, report in enumerate(options.directories):
        anew = options.anew and number == 0
        stored_at, run, narrower = trusted_runs.trust(report, storage, anew=anew)
        text = templates.rendered(
            "trusted.txt.j2", templates.one_line, folder=stored_at, run=run, narrower=narrower
        )
        print(text, end="")
    metrics, more = trend.not_judged(trusted_runs.load(trusted_runs.TRUSTED, storage).runs)
    if metrics:
        runs = "run" if more == 1 else "runs"
        print(
            f"  metrics that are not judged until {more} more {runs} of this build are trusted, "
            f"unless they are twice as bad:\n    {', '.join(metrics)}"
        )


def _add_merge(commands: Commands) -> None:
    parser = command(
        commands,
        "merge",
        _merge,
        "merge the reports of a run's shards (--shard I/N) into one verdict",
    )
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


def _merge(options: argparse.Namespace) -> int:
    from sm121.report import merging

    merged = merging.write(merging.read_shards(options.directories), options.output)
    print(f"{merged.verdict}: {merged.reason}")
    print(options.output / "verdict.json")
    return merged.exit_status


def _add_bundle(commands: Commands) -> None:
    parser = command(
        commands,
        "bundle",
        _bundle,
        (
            "pack a run into an archive that you can attach to an issue: verdict, report, logs "
            "and environment, with checksums and without secrets"
        ),
    )
    parser.add_argument(
        "directory",
        type=Path,
        metavar="REPORT",
        help="report directory of the run",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: sm121-VERDICT-ARCH-STARTED.tar.gz",
    )


def _bundle(options: argparse.Namespace) -> None:
    from sm121.report import archive

    chosen = archive.choose(options.directory)
    if not chosen.is_newest:
        text = templates.rendered(
            "bundle.txt.j2", templates.one_line, folder=options.directory, chosen=chosen
        )
        print(text, end="")
    written, omitted = archive.write(chosen.directory, options.output)
    print(f"{written}: {written.stat().st_size / (1 << 20):.1f} MiB")
    for name in omitted:
        print(f"  left out: {name}")
