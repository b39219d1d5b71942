"""``sm121``: what is useful without pytest."""

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

from sm121 import __version__
from sm121.cli.arguments import COMMANDS, EVERY, GROUPS, OF_A_CHECKOUT
from sm121.core import own_tests, profile, templates
from sm121.core.command_parser import InvalidArgumentsError, Parser
from sm121.core.errors import OptionError, Sm121Error, UsageError
from sm121.core.printable import printable

#: Runs a subcommand and returns its exit status; None is 0.
Command: TypeAlias = Callable[[argparse.Namespace], int | None]

#: The exit status of a wrong request, as pytest's.
_EXIT_USAGE = 4
#: The columns of a bar of progress.
_BAR = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: The words behind ``sm121``. None: those of this process.

    Returns:
        The exit status: 0, 1 for a negative result, or 4 for a wrong request, with one line on
        standard error. ``merge`` has the status of the merged run.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in OF_A_CHECKOUT and _tools_of_the_checkout() is None:
        print(f"sm121 {words[0]}: needs a checkout of the suite, see tools/ there", file=sys.stderr)
        return _EXIT_USAGE
    try:
        # The words behind `run`, `plan` and `certify` are pytest's.
        own_help = words in (["plan", "-h"], ["plan", "--help"])
        passed_on = words[:1] in (["run"], ["plan"], ["certify"]) and not own_help
        options = parser().parse_args(words[:1] if passed_on else words)
        options.words = words[1:]
    except InvalidArgumentsError as error:
        print(error, file=sys.stderr)
        return _EXIT_USAGE
    try:
        status: int = options.run(options) or 0
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
    """Return the parser of the command line, with the commands of a checkout if there is one."""
    parser = Parser(prog="sm121", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sm121-conformance {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for row in COMMANDS:
        row.add_arguments(command(commands, row.name, _COMMANDS[row.name], row.help))
    tools = _tools_of_the_checkout()
    if tools is not None:
        tools.add(commands)
    parser.commands = commands.choices
    groups = {row.name: row.group for row in COMMANDS}
    for group, title in GROUPS.items():
        names = [name for name in commands.choices if groups.get(name, "authors") == group]
        if names:
            summaries = {name: commands.choices[name].description or "" for name in names}
            parser.groups[title] = summaries
    return parser


def command(commands: Any, name: str, run: Command, summary: str) -> argparse.ArgumentParser:
    """Add a subcommand.

    Args:
        commands: The result of ``add_subparsers``.
        name: The name of the subcommand.
        run: Runs the subcommand.
        summary: The help.

    Returns:
        The parser of the subcommand.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    return parser


def _tools_of_the_checkout() -> ModuleType | None:
    """Return the module ``tools.commands`` of a checkout; None if the suite was installed."""
    checkout = Path(__file__).parents[3]
    if not (checkout / "tools" / "commands.py").is_file():
        return None
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module("tools.commands")


def _run(options: argparse.Namespace) -> int:
    own = Parser(prog="sm121 run", add_help=False, allow_abbrev=False)
    own.add_argument("--every")
    found, of_pytest = own.parse_known_args(options.words)
    if found.every is not None:
        from sm121.session import repeated

        return repeated.run(found.every, of_pytest, progress)
    _become_pytest(options.words)
    return 0


def _become_pytest(given: Sequence[str]) -> None:
    """Replace this process by pytest, or print the help of the suite's options."""
    if {"-h", "--help"} & {*given}:
        print(f"{_help_of_options()}\npytest's options: pytest --help")
        sys.exit()
    words = own_tests.command(given, Path.cwd())
    os.execv(words[0], words)  # noqa: S606 - pytest takes this process, and its signals


def _help_of_options() -> str:
    """Return the help of the options that the suite adds to pytest's."""
    from sm121.session import own_options

    usage = "sm121 run [OPTIONS] [TESTS]"
    run = Parser(prog="sm121 run", usage=usage, add_help=False, allow_abbrev=False)
    for own in own_options.GROUPS:
        own.add(run.add_argument_group(f"SM121: {own.title}").add_argument)
    again = run.add_argument_group("Again and again")
    again.add_argument("--every", metavar="DURATION", help=EVERY)
    return run.format_help()


def _certify(options: argparse.Namespace) -> NoReturn:
    from sm121.session import certified_run

    certified_run.start(options.words)


def _canary(options: argparse.Namespace) -> None:
    from sm121.checkpoint import canary

    folder = options.directory or canary.folder()
    for twin in ("bf16", "mxfp4") if options.twin == "both" else (options.twin,):
        canary.build(folder / twin, twin, progress=progress)


def _vocabulary(options: argparse.Namespace) -> None:
    from sm121.checkpoint import vocabulary

    print(vocabulary.write(options.directory))


def _golden(options: argparse.Namespace) -> None:
    from sm121.answers import oracle_file, oracle_making
    from sm121.measure import machine
    from sm121.oracles.formats import Rounding

    rounding = Rounding.parse(options.rounding)
    if not (options.checkpoint / "config.json").is_file():
        raise UsageError(f"{options.checkpoint}: expected a checkpoint folder with config.json")
    if not options.output.absolute().parent.is_dir():
        raise UsageError(f"-o {options.output}: expected a folder for it, there is none")
    begun = time.monotonic()
    peak = 0.0

    def show_progress(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, machine.own_memory_gib())
        filled = "#" * (_BAR * done // total)
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        minutes = (time.monotonic() - begun) / 60
        line = f"[{filled:{_BAR}}] {done} of {total} passes of a layer, {minutes:.1f} minutes"
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


def _box(options: argparse.Namespace) -> int:
    from sm121.core import architecture
    from sm121.measure import box, box_judgement

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
    for command in options.node_command:
        status, text = box.of_node(command, name)
        print(text, end="")
        worst = max(worst, status)
    return worst


def _warm(options: argparse.Namespace) -> int:
    from sm121.core import architecture
    from sm121.engines.warm import Warmth

    name = options.profile or profile.for_architecture(architecture.detect().name or "unknown")
    variables = {}
    for assignment in options.engine_env:
        key, equals, value = assignment.partition("=")
        if not (key and equals):
            raise UsageError(f"--engine-env {assignment}: expected KEY=VALUE")
        variables[key] = value
    warmth = Warmth.of(
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
        progress(f"{module.name}: {fault or 'there'}")
        if fault is not None:
            failed.append(module)
    if failed:
        print(f"not there: {', '.join(module.name for module in failed)}")
    return 1 if failed else 0


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


def _history(options: argparse.Namespace) -> None:
    from sm121.report import comparison, history

    past = history.read([comparison.named(path) for path in options.runs])
    if options.html is not None:
        print(*history.write(past, options.html), sep="\n")
    else:
        print(history.text(past, "json" if options.json else "txt"), end="")


def _matrix(options: argparse.Namespace) -> None:
    from sm121.core import architecture
    from sm121.matrix import plan, size

    name = options.profile or profile.for_architecture(architecture.detect().name or "unknown")
    try:
        chosen = profile.load(name)
        space = plan.space_of(chosen, options.axes, options.engine, options.engine_version)
        if options.strength is None:
            print(size.sizes(space), end="")
        else:
            print(size.cells(plan.make_plan(chosen, space, strength=options.strength)), end="")
    except OptionError as error:  # pytest calls it --matrix
        raise OptionError("--strength", error.fault) from error


def _plan(options: argparse.Namespace) -> None:
    """Print the section of pytest's report on the collected tests that the plugin adds."""
    done = subprocess.run(
        own_tests.command(["--collect-only", "-qq", *options.words], Path.cwd()),
        check=False,
        capture_output=True,
        text=True,
    )
    report = done.stdout.partition(" sm121 conformance ")[2].partition("\n")[2]
    if done.returncode or not report:
        message = (done.stdout + done.stderr).strip().rpartition("ERROR: ")[2]
        message = message.rpartition(" error: ")[2].partition("\n")[0]
        raise UsageError(message or "pytest says nothing")
    print(report, end="")


def _health(options: argparse.Namespace) -> int:
    from sm121.client import health

    try:
        within_s = float(options.within)
    except ValueError:
        within_s = 0.0
    if not 0 < within_s < float("inf"):
        raise UsageError(f"--within {options.within}: expected seconds, more than 0")
    key = os.environ.get("SM121_API_KEY") or os.environ.get("OPENAI_API_KEY")
    result = health.check(options.url, within_s=within_s, api_key=key, model=options.model)
    word = "healthy" if result.healthy else "UNHEALTHY"
    print(f"{word}: {printable(result.message)}", flush=True)
    return 0 if result.healthy else 1


def _merge(options: argparse.Namespace) -> int:
    from sm121.report import merging

    merged = merging.write(merging.read(options.directories), options.output)
    print(f"{merged.verdict}: {merged.reason}")
    print(options.output / "verdict.json")
    return merged.exit_status


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
            f"  not judged until {more} more {runs} of this build are trusted, unless twice as "
            f"bad:\n    {', '.join(metrics)}"
        )


def _report(options: argparse.Namespace) -> None:
    from sm121.core.files import write_text
    from sm121.report import junit, page, stored

    run = stored.read(options.directory)
    write_text(junit.xml(run), run.directory / junit.NAME)
    print(page.write(run))


def _bundle(options: argparse.Namespace) -> None:
    from sm121.report import archive

    written, omitted = archive.write(options.directory, options.output)
    print(f"{written}: {written.stat().st_size / (1 << 20):.1f} MiB")
    for name in omitted:
        print(f"  left out: {name}")


def _schema(options: argparse.Namespace) -> None:
    from sm121.run import verdict_file

    if options.what == "verdict":
        schema = verdict_file.json_schema()
    else:
        schema = profile.Profile.model_json_schema()
    print(json.dumps(schema, indent=2, sort_keys=True))


def progress(line: str) -> None:
    """Print a line of progress with the time of day."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


_COMMANDS: dict[str, Command] = {
    "run": _run,
    "certify": _certify,
    "canary": _canary,
    "vocabulary": _vocabulary,
    "golden": _golden,
    "path": _path,
    "health": _health,
    "box": _box,
    "warm": _warm,
    "compare": _compare,
    "history": _history,
    "matrix": _matrix,
    "plan": _plan,
    "trust": _trust,
    "merge": _merge,
    "schema": _schema,
    "report": _report,
    "bundle": _bundle,
}
