"""The commands that inspect a server, a machine or a report."""

import argparse
import dataclasses
import sys
from pathlib import Path

from sm121.cli import evidence
from sm121.cli.command import Commands, command, print_if_read
from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.core.printable import printable


def add(commands: Commands) -> None:
    """Add the commands.

    Args:
        commands: The subcommands of the parser.
    """
    _add_health(commands)
    _add_path(commands)
    evidence.add(commands)
    _add_box(commands)
    _add_checkpoint(commands)
    _add_compare(commands)
    _add_history(commands)
    _add_report(commands)
    _add_testlog(commands)


def _add_health(commands: Commands) -> None:
    parser = command(
        commands,
        "health",
        _health,
        (
            "check whether a server generates one token in time (exit status 0 or 1), for "
            "systemd and docker's HEALTHCHECK"
        ),
    )
    parser.add_argument(
        "url",
        metavar="URL",
        help="address of the server, such as http://127.0.0.1:8000",
    )
    parser.add_argument(
        "--within",
        metavar="SECONDS",
        default="10",
        help="time limit for the token (default: 10)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="name of the model on the server (default: the first that the server lists)",
    )


def _health(options: argparse.Namespace) -> int:
    from sm121.client import health
    from sm121.engines import given_key

    try:
        within_s = float(options.within)
    except ValueError:
        within_s = 0.0
    if not 0 < within_s <= 86400:
        expected = "expected a number of seconds above 0 and at most 86400, a day"
        raise UsageError(f"--within {options.within}: {expected}")
    key = given_key.api_key(lambda _option: None)
    result = health.check(options.url, within_s=within_s, api_key=key, model=options.model)
    word = "healthy" if result.healthy else "UNHEALTHY"
    print_if_read(f"{word}: {printable(result.message)}")
    return 0 if result.healthy else 1


def _add_path(commands: Commands) -> None:
    parser = command(
        commands,
        "path",
        _path,
        "show which kernels a server's log proves, or for which GPUs its libraries contain code",
    )
    parser.add_argument(
        "logs",
        type=Path,
        nargs="*",
        metavar="LOG",
        help=(
            "log file of a server; for a server on several machines, one log per node. With -, "
            "the log is read from standard input (docker logs NAME 2>&1 | sm121 path -)"
        ),
    )
    parser.add_argument(
        "--container",
        metavar="NAME",
        help="name of a container; its log is read with docker logs",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON with the log line that proves each value (default with LOG: a table)",
    )
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="vllm, sglang or llama-cpp (default: recognised from the log)",
    )
    parser.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="file with the text of the server's /metrics, as additional evidence",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help=(
            "list the kernels in a trace, each with its share of the time. FILE is a trace of "
            "the torch profiler (.json, .json.gz), a .nsys-rep, or the CSV of nsys stats "
            "--report cuda_gpu_kern_sum"
        ),
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="with --trace: print a Markdown table instead of JSON",
    )
    _path_of_libraries(parser)


def _path_of_libraries(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sm121 path`` for libraries and caches."""
    parser.add_argument(
        "--jit-cache",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="list the modules in these folders, and the GPUs for which they were compiled",
    )
    parser.add_argument(
        "--libraries",
        type=Path,
        nargs="*",
        metavar="PATH",
        help=(
            "instead of reading a log, check for which GPUs the files in PATH contain code "
            "(default of PATH: the engine's packages, and the caches of compiled kernels)"
        ),
    )
    parser.add_argument(
        "--sass",
        action="store_true",
        help="with --libraries: also read the machine code, and find kernels that only trap",
    )
    parser.add_argument(
        "--gpu",
        metavar="ARCH",
        default="12.1",
        help="with --libraries: compute capability of the GPU (default: 12.1, GB10)",
    )
    parser.add_argument(
        "--engine-python",
        metavar="PYTHON",
        default=sys.executable,
        help=(
            "with --libraries: Python interpreter of the engine's environment (default: the one "
            "that runs the suite)"
        ),
    )


def _path(options: argparse.Namespace) -> None:
    from sm121.session import path_command

    path_command.run(
        path_command.PathRequest(
            logs=tuple(options.logs),
            container=options.container,
            libraries=options.libraries is not None,
            engine=options.engine,
            metrics=options.metrics,
            trace=options.trace,
            jit_caches=options.jit_cache,
            gpu=options.gpu,
            as_table=options.table,
            as_json=options.json,
        )
    )
    if options.libraries is not None:
        _libraries(options)


def _libraries(options: argparse.Namespace) -> None:
    from sm121.compilation import libraries, toolchain
    from sm121.compilation.architecture import CodeArchitecture

    python = options.engine_python
    folders = options.libraries or libraries.engine_places(python)
    if not folders:
        raise UsageError(
            f"--libraries: expected one of {', '.join(libraries.PACKAGES)} in the environment of "
            f"{python}, got none. Name the engine's interpreter with --engine-python, or give paths"
        )
    tool = None
    if options.sass:
        tool = toolchain.find_disassembler(toolchain.site_packages(python))
    gpu = CodeArchitecture.parse(options.gpu).number
    libraries.write_report(folders, sys.stdout, gpu=gpu, disassembler=tool)


def _add_box(commands: Commands) -> None:
    parser = command(
        commands,
        "box",
        _box,
        "check whether this machine is in a state in which measurements are reliable",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME|PATH",
        help="name or path of the profile (default: by architecture)",
    )
    parser.add_argument(
        "--device",
        help="device to measure: cpu, cuda:0, ... (default: that of the profile)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON, followed by a line with the state (default: a table)",
    )
    parser.add_argument(
        "--node-command",
        action="append",
        metavar="COMMAND",
        default=[],
        help=(
            "command that runs Python on another machine, to check that machine as well: "
            "--node-command 'ssh spark2 /opt/venv/bin/python3'"
        ),
    )
    parser.add_argument(
        "--device-only",
        metavar="DEVICE",
        help=argparse.SUPPRESS,
    )


def _box(options: argparse.Namespace) -> int:
    from sm121.core import architecture
    from sm121.machine import box, box_judgement

    if options.device_only:
        print(box.measure(options.device_only).model_dump_json())
        return 0
    arch = architecture.detect().name
    name = options.profile or profile.for_architecture(arch or "unknown")
    chosen = profile.load(name)
    device = options.device or ("cpu" if chosen.arch == architecture.CPU else "cuda:0")
    architecture.require_device(device)
    reading = box.read_machine(device)
    judgement = box_judgement.judge_machine(chosen.box, reading)
    if options.json:
        print(reading.model_dump_json(indent=2))
        print(f"{judgement.state.value}: {judgement.reason}")
    else:
        from sm121.report import glance

        values = {"reference": chosen.box, "reading": reading, "judgement": judgement}
        print(glance.table("box.txt.j2", **values), end="")
    worst = 1 if judgement.state is box.BoxState.DEGRADED else 0
    for launcher in options.node_command:
        status, text = box.of_node(launcher, name)
        print(text, end="")
        worst = max(worst, status)
    return worst


def _add_checkpoint(commands: Commands) -> None:
    parser = command(
        commands,
        "checkpoint",
        _checkpoint,
        (
            "show the formats of a checkpoint's weights, the bytes that the engine reads per "
            "token, and tensors whose format differs from the declared quantisation"
        ),
    )
    parser.add_argument(
        "model",
        metavar="DIR|ID",
        help=(
            "folder of the checkpoint, or owner/name of a model in the Hugging Face cache; "
            "downloads nothing and reads no weights"
        ),
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON (default: a table)",
    )


def _checkpoint(options: argparse.Namespace) -> int:
    from sm121.checkpoint import inspection
    from sm121.report import checkpoint_text

    found = inspection.inspect(options.model)
    if options.json:
        print(checkpoint_text.report(found).model_dump_json(indent=2))
    else:
        print(checkpoint_text.text(options.model, found), end="")
    if found.facts:
        return 1
    return 5 if found.unjudged else 0


def _add_compare(commands: Commands) -> None:
    parser = command(
        commands,
        "compare",
        _compare,
        "show the results of several runs side by side",
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help=(
            "a report directory, verdict.json, a file of pytest-benchmark's storage, JSON or CSV "
            "of llama-benchy, YAML of sparkrun (Spark Arena), or JSON of llama-bench; NAME=PATH "
            "sets the name that the table shows"
        ),
    )
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="also compare runs whose machine, model, profile or measuring options differ",
    )
    parser.add_argument(
        "--format",
        choices=["markdown", "csv"],
        help="default: markdown",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: standard output",
    )


def _compare(options: argparse.Namespace) -> None:
    from sm121.report import comparison

    sources = []
    for argument in options.runs:
        name, path = comparison.named(argument)
        source = comparison.read_results(path)
        sources.append(dataclasses.replace(source, name=name) if name else source)
    chosen = comparison.distinct(sources)
    if not options.mixed:
        comparison.refuse_mixed(chosen)
    write = comparison.csv_text if options.format == "csv" else comparison.markdown
    _write(write(chosen), options.output)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, "utf-8")


def _add_history(commands: Commands) -> None:
    parser = command(
        commands,
        "history",
        _history,
        (
            "show many runs over time: one row per run; when a metric became higher or lower; "
            "since when a check fails; flaky checks; differences between machines"
        ),
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="DIR",
        help=(
            "folder with report directories, a storage of pytest-benchmark, or a file that "
            "compare can read. With NAME=DIR, all runs in DIR belong to the machine NAME"
        ),
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help=(
            "write a self-contained HTML page, and summary.json next to it (default: print a "
            "table of the last runs)"
        ),
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the content of summary.json",
    )


def _history(options: argparse.Namespace) -> None:
    from sm121.report import comparison, history

    past = history.read_runs([comparison.named(path) for path in options.runs])
    if options.html is not None:
        print(*history.write(past, options.html), sep="\n")
    else:
        print(history.text(past, "json" if options.json else "txt"), end="")


def _add_report(commands: Commands) -> None:
    parser = command(
        commands,
        "report",
        _report,
        "write report.html and junit.xml of a stored run again; if the run was killed, also "
        "write verdict.json",
    )
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="a report directory",
    )


def _report(options: argparse.Namespace) -> None:
    from sm121.core.files import write_text
    from sm121.report import junit, page, stored, summary
    from sm121.run import events, stored_run, verdict_file

    run = stored.read(options.directory)
    written = run.directory / verdict_file.NAME
    is_of_events = (run.directory / events.NAME).is_file() or not written.is_file()
    if is_of_events and not stored_run.has_its_verdict(run.directory):
        verdict_file.write(stored_run.file_of(run.directory), written)
        write_text(summary.markdown(run.run, run), run.directory / "summary.md")
    write_text(junit.xml(run), run.directory / junit.NAME)
    print(page.write(run))


def _add_testlog(commands: Commands) -> None:
    testlog = command(
        commands,
        "testlog",
        _testlog,
        "write the test log of a feature (TEST_LOGS/FEATURE_...md), and the feature's rows for "
        "BENCHMARK_RESULTS.md and FEATURE_MATRIX.md",
    )
    testlog.add_argument("directory", type=Path, metavar="RUN", help="a report directory")
    testlog.add_argument("--feature", metavar="NAME", help="default: the configuration's name")
    testlog.add_argument("--branch", metavar="NAME", help="default: the engine's commit")
    testlog.add_argument(
        "--baseline",
        type=Path,
        metavar="RUN",
        help="report directory of a run without the feature, for comparison",
    )
    testlog.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help=(
            "folder for TEST_LOGS/FEATURE_<name>_<date>.md, BENCHMARK_RESULTS.md, "
            "FEATURE_MATRIX.md and the evidence that they link to (default: print the log and "
            "the row)"
        ),
    )


def _testlog(options: argparse.Namespace) -> int:
    from sm121.report import stored, testlog

    found = stored.read(options.directory)
    feature = options.feature or found.run.engine.configuration or found.run.engine.name
    baseline = None
    if options.baseline is not None:
        baseline = stored.read(options.baseline)
    log = testlog.log(found, feature=feature, branch=options.branch, baseline=baseline)
    if options.output is None:
        print(log)
        print(testlog.entry(found, feature=feature))
    else:
        for file in testlog.write(found, log, options.output, feature=feature):
            print(file)
    return 0
