"""Subcommands of ``sm121`` that write something from a stored run, or from the code itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add them to argparse's subcommands."""
    report = commands.add_parser("report", help="report.html and junit.xml of a stored run")
    report.add_argument("directory", type=Path, metavar="DIR", help="a report directory")
    report.set_defaults(run=_report)

    testlog = commands.add_parser(
        "testlog", help="the test log of a feature and its row of BENCHMARK_RESULTS.md, from a run"
    )
    testlog.add_argument("directory", type=Path, metavar="RUN", help="a report directory")
    testlog.add_argument("--feature", metavar="NAME", help="default: the configuration's name")
    testlog.add_argument("--branch", metavar="NAME", help="default: the engine's commit")
    testlog.add_argument(
        "--baseline", type=Path, metavar="RUN", help="another run, to set beside this one"
    )
    testlog.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write TEST_LOGS/FEATURE_<name>_<date>.md and BENCHMARK_RESULTS.md there "
        "(default: both to standard output)",
    )
    testlog.set_defaults(run=_testlog)

    reference = commands.add_parser(
        "reference", help="the generated pages of the documentation (in a checkout of the suite)"
    )
    reference.add_argument("directory", type=Path, metavar="DIR", help="docs of the checkout")
    reference.set_defaults(run=_reference)


def _report(options: argparse.Namespace) -> int:
    from sm121.core.files import write_text
    from sm121.report import junit, page, stored

    found = stored.read(options.directory)
    write_text(junit.xml(found), found.directory / junit.NAME)
    print(page.write(found))
    return 0


def _testlog(options: argparse.Namespace) -> int:
    from sm121.report import stored, testlog

    found = stored.read(options.directory)
    feature = options.feature or found.run.engine.configuration or found.run.engine.name
    baseline = stored.read(options.baseline) if options.baseline is not None else None
    log = testlog.log(found, feature=feature, branch=options.branch, baseline=baseline)
    if options.output is None:
        print(log)
        print(testlog.entry(found, feature=feature))
    else:
        for file in testlog.write(found, log, options.output, feature=feature):
            print(file)
    return 0


def _reference(options: argparse.Namespace) -> int:
    from sm121 import cli
    from sm121.reference import commands, crash_classes, requirements, schema

    pages = {
        "requirements.md": requirements.page(options.directory.parent / "tests"),
        "crash-classes.md": crash_classes.page(),
        "commands.md": commands.page(cli._parser()),
        "schema.md": schema.page(),
    }
    for name, text in pages.items():
        (options.directory / name).write_text(text, "utf-8")
        print(options.directory / name)
    return 0
