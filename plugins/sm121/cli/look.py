"""The commands that inspect a server, a machine or a report."""

import argparse
import dataclasses
import sys
from pathlib import Path

from sm121.cli import evidence
from sm121.cli.command import Commands, command
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
            "whether a server generates one token in time: exit status 0 or 1; for systemd "
            "and docker's HEALTHCHECK"
        ),
    )
    parser.add_argument(
        "url",
        metavar="URL",
        help="address of the server, as http://127.0.0.1:8000",
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
    if not 0 < within_s < float("inf"):
        raise UsageError(f"--within {options.within}: expected seconds, more than 0")
    key = given_key.api_key(lambda _option: None)
    result = health.check(options.url, within_s=within_s, api_key=key, model=options.model)
    word = "healthy" if result.healthy else "UNHEALTHY"
    print(f"{word}: {printable(result.message)}", flush=True)
    return 0 if result.healthy else 1


def _add_path(commands: Commands) -> None:
    parser = command(
        commands,
        "path",
        _path,
        "what a server runs, read from its log; or what its libraries can run",
    )
    parser.add_argument(
        "logs",
        type=Path,
        nargs="*",
        metavar="LOG",
        help=(
            "the log of a server, or of each node of one that spans machines; -: on standard "
            "input, as of docker logs NAME 2>&1"
        ),
    )
    parser.add_argument(
        "--container",
        metavar="NAME",
        help="a container whose log is read with docker logs",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help=(
            "JSON for programs, each value with the line that proves it (default with LOG: a table)"
        ),
    )
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="vllm, sglang or llama-cpp (default: told by the log)",
    )
    parser.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="the text of the server's /metrics, as evidence next to the log",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help=(
            "kernels by name and share of time, of a trace of the torch profiler (.json, "
            ".json.gz), a .nsys-rep, or the CSV of nsys stats --report cuda_gpu_kern_sum"
        ),
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="with --trace: a Markdown table instead of JSON",
    )
    _path_of_libraries(parser)


def _path_of_libraries(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sm121 path`` for libraries and caches."""
    parser.add_argument(
        "--jit-cache",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="modules that were compiled into these folders, and what their code is for",
    )
    parser.add_argument(
        "--libraries",
        type=Path,
        nargs="*",
        metavar="PATH",
        help=(
            "judge the device code of these files and folders instead of a log (default: the "
            "engine's packages and the caches of compiled kernels)"
        ),
    )
    parser.add_argument(
        "--sass",
        action="store_true",
        help="with --libraries: read the instructions too, and find kernels that only trap",
    )
    parser.add_argument(
        "--gpu",
        metavar="ARCH",
        default="12.1",
        help="with --libraries: the GPU that they are for (default: 12.1, GB10)",
    )
    parser.add_argument(
        "--engine-python",
        metavar="PYTHON",
        default=sys.executable,
        help="with --libraries: the interpreter of the engine's environment (default: this one)",
    )


def _path(options: argparse.Namespace) -> None:
    from sm121.session import path_command

    path_command.run(
        path_command.Request(
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
        "whether this machine is fit for measuring, now",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME|PATH",
        help="default: by architecture",
    )
    parser.add_argument(
        "--device",
        help="cpu, cuda:0, ... (default: what the profile is for)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="JSON for programs, and a line with the state behind it (default: a table)",
    )
    parser.add_argument(
        "--node-command",
        action="append",
        metavar="COMMAND",
        default=[],
        help=(
            "what runs Python on another machine, whose box is read too: --node-command 'ssh "
            "spark2 /opt/venv/bin/python3'"
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
    reading = box.read(device)
    judgement = box_judgement.judge(chosen.box, reading)
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
            "formats of a checkpoint's weights by the headers of its safetensors, the bytes that a "
            "token reads, and where its label is wrong"
        ),
    )
    parser.add_argument(
        "model",
        metavar="DIR|ID",
        help=(
            "a folder, or owner/name of a model in the hub's cache; nothing is downloaded, and no "
            "weight is read"
        ),
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="JSON for programs (default: a table)",
    )


def _checkpoint(options: argparse.Namespace) -> int:
    from sm121.checkpoint import inspection
    from sm121.report import checkpoint_text

    found = inspection.inspect(options.model)
    if options.json:
        print(checkpoint_text.report(found).model_dump_json(indent=2))
    else:
        print(checkpoint_text.text(options.model, found), end="")
    return 1 if found.facts else 0


def _add_compare(commands: Commands) -> None:
    parser = command(
        commands,
        "compare",
        _compare,
        "results of several runs side by side",
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help=(
            "a report directory, verdict.json, a file of pytest-benchmark's storage, JSON or "
            "CSV of llama-benchy, YAML of sparkrun (Spark Arena), or JSON of llama-bench; "
            "NAME=PATH gives it a name"
        ),
    )
    parser.add_argument(
        "--mixed",
        action="store_true",
        help=(
            "also show runs of different machines, models, profiles of one name or measuring "
            "options side by side"
        ),
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
        source = comparison.read(path)
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
            "many runs over time: a row a run, where levels changed, what is red since "
            "when, flaky checks, machines that differ"
        ),
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="DIR",
        help=(
            "folders with report directories, a storage of pytest-benchmark, or files that "
            "compare reads; NAME=DIR: all of it was measured on the machine NAME"
        ),
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help=(
            "write one page that needs no network, and summary.json next to it (default: a "
            "table of the last runs)"
        ),
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print what summary.json has",
    )


def _history(options: argparse.Namespace) -> None:
    from sm121.report import comparison, history

    past = history.read([comparison.named(path) for path in options.runs])
    if options.html is not None:
        print(*history.write(past, options.html), sep="\n")
    else:
        print(history.text(past, "json" if options.json else "txt"), end="")


def _add_report(commands: Commands) -> None:
    parser = command(
        commands,
        "report",
        _report,
        "report.html and junit.xml of a stored run; verdict.json of one that was killed",
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
    if not run.run.finished and is_of_events:
        verdict_file.write(stored_run.file_of(run.directory), written)
        write_text(summary.markdown(run.run, run), run.directory / "summary.md")
    write_text(junit.xml(run), run.directory / junit.NAME)
    print(page.write(run))


def _add_testlog(commands: Commands) -> None:
    testlog = command(
        commands,
        "testlog",
        _testlog,
        "the test log of a feature and its rows of BENCHMARK_RESULTS.md and FEATURE_MATRIX.md",
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
        help="write TEST_LOGS/FEATURE_<name>_<date>.md, BENCHMARK_RESULTS.md and FEATURE_MATRIX.md "
        "there, with the evidence that they link to (default: log and row to standard output)",
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
