"""``sm121``: what is useful without pytest."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

from sm121 import __version__
from sm121.core import profile
from sm121.core.errors import OptionError, Sm121Error, UsageError

Command: TypeAlias = Callable[[argparse.Namespace], int]

_EXIT_USAGE = 4
_OF_A_CHECKOUT = ("side-by-side", "canary-train", "ablation", "tolerances", "reference")
"""Subcommands that are not installed: `tools.commands` of a checkout has them."""


class _WrongArgumentsError(UsageError):
    """What argparse has to say."""


class _Parser(argparse.ArgumentParser):
    """argparse would print its usage and end with 2, which is pytest's status of an interrupt."""

    def error(self, message: str) -> NoReturn:
        one_line = " ".join(message.split())
        raise _WrongArgumentsError(f"{self.prog}: {one_line} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; exit status 0, 1 when what it computed breaks a promise, 4 with one line on
    what was wrong with the request; ``merge`` has the status of the merged run."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in _OF_A_CHECKOUT and _tools_of_the_checkout() is None:
        print(f"sm121 {given[0]}: needs a checkout of the suite, see tools/ there", file=sys.stderr)
        return _EXIT_USAGE
    try:
        options = parser().parse_args(given)
    except _WrongArgumentsError as error:
        print(error, file=sys.stderr)
        return _EXIT_USAGE
    try:
        status: int = options.run(options)
    except (Sm121Error, OSError, ValueError) as error:
        print(f"sm121 {options.command}: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except ModuleNotFoundError as error:
        print(
            f"sm121 {options.command}: needs {error.name}: pip install 'sm121-conformance[cpu]'",
            file=sys.stderr,
        )
        return _EXIT_USAGE
    return status


def parser() -> argparse.ArgumentParser:
    """The command line, with the commands of a checkout where there is one."""
    parser = _Parser(prog="sm121", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sm121-conformance {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    canary = command(commands, "canary", _canary, "build the canary checkpoint under DIR")
    canary.add_argument("directory", type=Path, metavar="DIR", help="where it goes")
    canary.add_argument(
        "--twin",
        choices=("bf16", "mxfp4", "both"),
        default="both",
        help="in which formats (default: both)",
    )

    path = command(
        commands,
        "path",
        _path,
        "what a server runs, read from its log; or what its libraries can run",
    )
    path.add_argument("log", type=Path, metavar="LOG", nargs="?", help="the log of a server")
    path.add_argument(
        "--engine", metavar="NAME", help="vllm, sglang or llama-cpp (default: told by the log)"
    )
    path.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="the text of the server's /metrics, as evidence beside the log",
    )
    path.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="kernels by name and share of time, of a trace of the torch profiler (.json, "
        ".json.gz), a .nsys-rep, or the CSV of nsys stats --report cuda_gpu_kern_sum",
    )
    path.add_argument(
        "--table", action="store_true", help="with --trace: a Markdown table instead of JSON"
    )
    path.add_argument(
        "--jit-cache",
        type=Path,
        metavar="DIR",
        nargs="+",
        help="modules that were compiled into these folders, and what their code is for",
    )
    path.add_argument(
        "--libraries",
        type=Path,
        metavar="PATH",
        nargs="*",
        help="judge the device code of these files and folders instead of a log "
        "(default: the engine's packages and the caches of compiled kernels)",
    )
    path.add_argument(
        "--sass",
        action="store_true",
        help="with --libraries: read the instructions too, and find kernels that only trap",
    )
    path.add_argument(
        "--gpu",
        metavar="ARCH",
        default="12.1",
        help="with --libraries: the GPU that they are for (default: 12.1, GB10)",
    )
    path.add_argument(
        "--engine-python",
        metavar="PYTHON",
        default=sys.executable,
        help="with --libraries: the interpreter of the engine's environment (default: this one)",
    )

    box = command(commands, "box", _box, "whether this machine is fit for measuring, now")
    box.add_argument("--profile", metavar="NAME|PATH", help="default: by architecture")
    box.add_argument("--device", help="cpu, cuda:0, ... (default: what the profile is for)")
    box.add_argument("--device-only", metavar="DEVICE", help=argparse.SUPPRESS)

    compare = command(commands, "compare", _compare, "results of several runs beside each other")
    compare.add_argument(
        "runs",
        type=Path,
        metavar="RUN",
        nargs="+",
        help="a report directory, verdict.json, a file of pytest-benchmark's storage, or JSON of "
        "llama-benchy or llama-bench; NAME=PATH gives it a name",
    )
    compare.add_argument(
        "--format", choices=("markdown", "csv"), default="markdown", help="default: markdown"
    )
    compare.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")

    matrix = command(
        commands,
        "matrix",
        _matrix,
        "the cells of a profile's matrix, their coverage and their cost",
    )
    matrix.add_argument("--profile", metavar="NAME|PATH", help="default: by architecture")
    matrix.add_argument("--axes", metavar="NAME|PATH", help="default: the profile's")
    matrix.add_argument("--engine", metavar="NAME", help="default: the profile's")
    matrix.add_argument("--version", dest="engine_version", metavar="VERSION", help="of the engine")
    matrix.add_argument("--build", metavar="NAME", help="whose own knobs are used")
    matrix.add_argument("--strength", metavar="N|full", help="show the cells (default: the sizes)")
    matrix.add_argument("--axis", metavar="NAME", help="this one against each other")

    merge = command(commands, "merge", _merge, "one verdict of the shards of a run (--shard I/N)")
    merge.add_argument(
        "directories",
        type=Path,
        metavar="DIR",
        nargs="+",
        help="the report directories of all shards",
    )
    merge.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("conformance-report-merged"),
        help="default: conformance-report-merged",
    )

    schema = command(commands, "schema", _schema, "JSON Schema of verdict.json or of profiles")
    schema.add_argument("what", choices=("verdict", "profile"), help="of which file")
    report = command(commands, "report", _report, "report.html and junit.xml of a stored run")
    report.add_argument("directory", type=Path, metavar="DIR", help="a report directory")

    testlog = command(
        commands,
        "testlog",
        _testlog,
        "the test log of a feature and its row of BENCHMARK_RESULTS.md, from a run",
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

    if (tools := _tools_of_the_checkout()) is not None:
        tools.add(commands)
    return parser


def command(commands: Any, name: str, run: Command, summary: str) -> argparse.ArgumentParser:
    """Add a subcommand to argparse's; ``run`` gets its options and gives the exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary)
    parser.set_defaults(run=run)
    return parser


def _tools_of_the_checkout() -> ModuleType | None:
    """`tools.commands`, where the suite is used from a checkout; None where it was installed."""
    checkout = Path(__file__).parents[2]
    if not (checkout / "tools" / "commands.py").is_file():
        return None
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module("tools.commands")


def _canary(options: argparse.Namespace) -> int:
    from sm121.checkpoint import canary

    for twin in ("bf16", "mxfp4") if options.twin == "both" else (options.twin,):
        canary.build(options.directory / twin, twin, progress=progress)
    return 0


def _path(options: argparse.Namespace) -> int:
    from sm121.evidence.kernel_path import KernelPath, detect_engine, read_log

    others = (options.metrics, options.trace, options.jit_cache)
    given = options.log is not None or any(other is not None for other in others)
    if given == (options.libraries is not None):
        raise UsageError(
            "expected either the LOG of a server or --libraries; "
            "with or without LOG: --metrics, --trace, --jit-cache"
        )
    if options.libraries is not None:
        return _libraries(options)
    for file, what in (
        (options.log, "the log file of a server"),
        (options.metrics, "the text of /metrics"),
        (options.trace, "a trace"),
    ):
        if file is not None and not file.is_file():
            raise UsageError(f"{file}: expected {what}")
    engine = options.engine
    if engine is None:
        engine = "vllm" if options.log is None else detect_engine(options.log)
    path = KernelPath() if options.log is None else read_log(options.log, engine)
    answer: dict[str, object] = {} if options.log is None else {"engine": engine}
    if options.metrics is not None:
        from sm121.evidence.metrics import with_metrics

        path = with_metrics(path, options.metrics.read_text("utf-8", "replace"), engine)
    if options.jit_cache is not None:
        from sm121.compilation.architecture import CodeArchitecture
        from sm121.evidence import jit_cache

        modules = jit_cache.read(options.jit_cache, CodeArchitecture.parse(options.gpu).number)
        path.evidence.update(jit_cache.evidence(modules))
        answer["jit_cache"] = [module.model_dump(mode="json") for module in modules]
    if options.trace is not None:
        from sm121.evidence import kernel_profile

        seen = kernel_profile.read(options.trace)
        if options.table:
            print(kernel_profile.table(seen), end="")
            return 0
        answer["kernels"] = seen.model_dump(mode="json")
    print(json.dumps(path.model_dump(mode="json") | answer, indent=2, ensure_ascii=False))
    return 0


def _libraries(options: argparse.Namespace) -> int:
    from sm121.compilation import libraries, toolchain
    from sm121.compilation.architecture import CodeArchitecture

    python = options.engine_python
    places = options.libraries or libraries.engine_places(python)
    tool = None
    if options.sass:
        tool = toolchain.find_disassembler(toolchain.site_packages(python))
    gpu = CodeArchitecture.parse(options.gpu).number
    libraries.write_report(places, sys.stdout, gpu=gpu, disassembler=tool)
    return 0


def _box(options: argparse.Namespace) -> int:
    from sm121.core import architecture
    from sm121.measure import box

    if options.device_only:
        print(box.measure(options.device_only).model_dump_json())
        return 0
    arch = architecture.detect().name
    name = options.profile or profile.for_architecture(arch or "unknown")
    chosen = profile.load(name)
    device = options.device or ("cpu" if chosen.arch == architecture.CPU else "cuda:0")
    reading = box.read(device)
    state, reason = box.judge(chosen.box, reading)
    print(reading.model_dump_json(indent=2))
    print(f"{state.value}: {reason}")
    return 1 if state is box.BoxState.DEGRADED else 0


def _compare(options: argparse.Namespace) -> int:
    from sm121.measure import comparison

    sources = []
    for given in options.runs:
        name, separator, path = str(given).partition("=")
        named = bool(separator) and not given.exists()
        source = comparison.read(Path(path) if named else given)
        sources.append(dataclasses.replace(source, name=name) if named else source)
    chosen = comparison.distinct(sources)
    write = comparison.markdown if options.format == "markdown" else comparison.csv_text
    if options.output is None:
        print(write(chosen), end="")
    else:
        options.output.write_text(write(chosen), "utf-8")
    return 0


_MATRIX_OPTIONS = {
    "--matrix": "--strength",
    "--matrix-axis": "--axis",
    "--matrix-build": "--build",
}
"""What pytest's options are called here."""


def _matrix(options: argparse.Namespace) -> int:
    try:
        print(_shown_matrix(options), end="")
    except OptionError as error:
        raise OptionError(_MATRIX_OPTIONS[error.option], error.wrong) from error
    return 0


def _shown_matrix(options: argparse.Namespace) -> str:
    from sm121.core import architecture
    from sm121.matrix import outlook
    from sm121.matrix.plan import make_plan, space_of

    name = options.profile
    if name is None:
        name = profile.for_architecture(architecture.detect().name or "unknown")
    chosen = profile.load(name)
    space = space_of(chosen, options.axes, options.engine, options.engine_version, options.build)
    if options.strength is None:
        return outlook.sizes(chosen, space)
    return outlook.cells(make_plan(chosen, space, strength=options.strength, focus=options.axis))


def _merge(options: argparse.Namespace) -> int:
    from sm121.report import merging

    merged = merging.write(merging.read(options.directories), options.output)
    print(f"{merged.verdict}: {merged.reason}")
    print(options.output / "verdict.json")
    return merged.exit_status


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


def _schema(options: argparse.Namespace) -> int:
    from sm121.run import verdict_file

    if options.what == "verdict":
        schema = verdict_file.json_schema()
    else:
        schema = profile.Profile.model_json_schema()
    print(json.dumps(schema, indent=2, sort_keys=True))
    return 0


def progress(line: str) -> None:
    """Print a line of progress with the time of day."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)
