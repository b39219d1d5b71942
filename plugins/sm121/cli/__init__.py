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
from sm121.core import own_options, own_tests, profile, templates
from sm121.core.command_parser import InvalidArgumentsError, Parser
from sm121.core.errors import OptionError, Sm121Error, UsageError
from sm121.core.printable import printable

#: What runs a subcommand; its exit status, where that may be another one than 0.
Command: TypeAlias = Callable[[argparse.Namespace], int | None]

_EXIT_USAGE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; exit status 0, 1 when what it computed breaks a promise, 4 with one line on
    what was wrong with the request; ``merge`` has the status of the merged run."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in OF_A_CHECKOUT and _tools_of_the_checkout() is None:
        print(f"sm121 {words[0]}: needs a checkout of the suite, see tools/ there", file=sys.stderr)
        return _EXIT_USAGE
    try:
        # What follows `run` is pytest's, and what follows `plan` is what would follow `run`.
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
    """The command line, with the commands of a checkout where there is one."""
    parser = Parser(prog="sm121", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sm121-conformance {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for row in COMMANDS:
        row.add_arguments(command(commands, row.name, _COMMANDS[row.name], row.help))
    if (tools := _tools_of_the_checkout()) is not None:
        tools.add(commands)
    parser.commands = commands.choices
    groups = {row.name: row.group for row in COMMANDS}
    for group, title in GROUPS.items():
        names = [name for name in commands.choices if groups.get(name, "authors") == group]
        if names:
            parser.groups[title] = {
                name: commands.choices[name].description or "" for name in names
            }
    return parser


def command(commands: Any, name: str, run: Command, summary: str) -> argparse.ArgumentParser:
    """Add a subcommand to argparse's; ``run`` gets its options and gives the exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    return parser


def _tools_of_the_checkout() -> ModuleType | None:
    """`tools.commands`, where the suite is used from a checkout; None where it was installed."""
    checkout = Path(__file__).parents[3]
    if not (checkout / "tools" / "commands.py").is_file():
        return None
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module("tools.commands")


def _run(options: argparse.Namespace) -> int:
    own = Parser(prog="sm121 run", add_help=False, allow_abbrev=False)
    own.add_argument("--every")
    found, others = own.parse_known_args(options.words)
    if found.every is not None:
        from sm121.session import repeated

        return repeated.run(found.every, others, progress)
    _become_pytest(options.words)
    return 0


def _become_pytest(given: Sequence[str]) -> None:
    if {"-h", "--help"} & {*given}:
        print(f"{_help_of_options()}\npytest's options: pytest --help")
        sys.exit()
    words = own_tests.command(given, Path.cwd())
    os.execv(words[0], words)  # noqa: S606 - pytest takes this process, and its signals


def _help_of_options() -> str:
    """The options that the suite adds to pytest's, by their groups."""
    from sm121.session import shipped

    names = shipped.names()
    usage = "sm121 run [OPTIONS] [TESTS]"
    run = Parser(prog="sm121 run", usage=usage, add_help=False, allow_abbrev=False)
    for titled in own_options.file().group:
        group = run.add_argument_group(f"SM121: {titled.title}")
        for option in titled.option:
            keywords = option.given(**names)
            group.add_argument(option.name, **{"help": argparse.SUPPRESS, **keywords})
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
    begun, peak = time.monotonic(), 0.0

    def bar(done: int, of: int) -> None:
        nonlocal peak
        peak = max(peak, machine.own_memory_gib())
        filled = "#" * (30 * done // of)
        end = "\r" if sys.stderr.isatty() and done < of else "\n"
        minutes = (time.monotonic() - begun) / 60
        line = f"[{filled:30}] {done} of {of} passes of a layer, {minutes:.1f} minutes"
        print(line, end=end, file=sys.stderr, flush=True)

    partial = options.output.with_name(f"{options.output.name}.partial")
    depths, device = map(int, options.depth), options.device
    made = oracle_making.make(options.checkpoint, rounding, depths, device, kept=partial, say=bar)
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
    from sm121.measure import box

    if options.device_only:
        print(box.measure(options.device_only).model_dump_json())
        return 0
    arch = architecture.detect().name
    name = options.profile or profile.for_architecture(arch or "unknown")
    chosen = profile.load(name)
    device = options.device or ("cpu" if chosen.arch == architecture.CPU else "cuda:0")
    architecture.require_device(device)
    reading = box.read(device)
    judgement = box.judge(chosen.box, reading)
    if options.json:
        print(reading.model_dump_json(indent=2))
        print(f"{judgement.state.value}: {judgement.reason}")
    else:
        from sm121.report import glance

        values = {"reference": chosen.box, "reading": reading, "judgement": judgement}
        print(glance.table("box.txt.j2", **values), end="")
    others = [box.of_node(command, name) for command in options.node_command]
    print(*(text for _, text in others), sep="", end="")
    return max([int(judgement.state is box.BoxState.DEGRADED), *(status for status, _ in others)])


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
    failed = [module for module in warmth.missing if warmth.obstacle(module) is not None]
    if options.dry_run:
        return 0
    for module in [module for module in warmth.missing if module not in failed]:
        progress(f"{module.name}: compiling")
        wrong = warmth.build(module, progress)
        progress(f"{module.name}: {wrong or 'there'}")
        failed += [] if wrong is None else [module]
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
    from sm121.run import stored_run
    from sm121.session import against

    storage = stored_run.storage_folder(options.benchmark_storage, Path.cwd())
    for number, report in enumerate(options.directories):
        anew = options.anew and number == 0
        stored_at, run, narrower = against.trust(report, storage, anew=anew)
        print(templates.rendered("trusted.txt.j2", templates.one_line,
                                 folder=stored_at, run=run, narrower=narrower), end="")  # fmt: skip
    metrics, more = trend.not_judged(against.load(against.TRUSTED, storage).runs)
    if metrics:
        print(f"  not judged until {more} more run{'s'[: more != 1]} of this build are trusted, "
              f"unless twice as bad:\n    {', '.join(metrics)}")  # fmt: skip


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
    command.__name__[1:]: command
    for command in (
        _run, _certify, _canary, _vocabulary, _golden, _path, _health, _box, _warm, _compare,
        _history, _matrix, _plan, _trust, _merge, _schema, _report, _bundle,
    )
}  # fmt: skip
