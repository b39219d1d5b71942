"""The commands that profile decoding, and that print the environment record of a run."""

import argparse
import json
import shlex
import sys
from pathlib import Path

from sm121.cli.command import Commands, command, progress
from sm121.core.errors import UsageError
from sm121.core.printable import printable


def add(commands: Commands) -> None:
    """Add the commands.

    Args:
        commands: The subcommands of the parser.
    """
    _add_profile(commands)
    _add_record(commands)
    _add_init_profile(commands)


def _add_profile(commands: Commands) -> None:
    parser = command(
        commands,
        "profile",
        _profile,
        (
            "profile decoding: kernels by part, the host's share of a step, and the conclusions; "
            "exit status 1 if a kernel of another backend ran or a limit is exceeded, 5 if a "
            "limit could not be judged"
        ),
    )
    parser.add_argument(
        "target",
        metavar="URL|CONFIGURATION|FILE",
        help=(
            "URL of a running server; a configuration of the profile, which is started and "
            "stopped; or a file: a trace of the torch profiler, a .nsys-rep, or the CSV of nsys "
            "stats"
        ),
    )
    parser.add_argument(
        "--prompt", type=int, default=2048, metavar="TOKENS",
        help="length of the prompt (default: 2048)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="TOKENS",
        help="number of decode steps to profile (default: 64)",
    )  # fmt: skip
    parser.add_argument(
        "--layout", choices=["HND", "NHD"],
        help="with a configuration: the KV layout to request; the log must show it",
    )  # fmt: skip
    parser.add_argument(
        "--backend", action="append", default=[], metavar="NAME",
        help=(
            "the requested backend of the experts, such as MARLIN or CUTLASS; repeatable "
            "(default: those of the configuration)"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--profile", metavar="NAME|PATH",
        help="profile of the suite with the configuration (default: by architecture)",
    )  # fmt: skip
    parser.add_argument(
        "--traces", type=Path, metavar="DIR",
        help="with a URL: the server's torch_profiler_dir, on this machine",
    )  # fmt: skip
    _add_engine_of_a_configuration(parser)
    parser.add_argument(
        "--output", type=Path, default=Path("decode-profile"), metavar="DIR",
        help="folder for decode.md and decode.json (default: decode-profile)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print decode.json")


def _add_engine_of_a_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine-python", metavar="PYTHON",
        help=(
            "with a configuration: Python interpreter of the engine's environment (default: the "
            "one that runs the suite)"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--engine-arg", action="append", default=[], metavar="ARG",
        help="with a configuration: argument to pass to the engine; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--engine-env", action="append", default=[], metavar="KEY=VALUE",
        help="with a configuration: environment variable for the engine; repeatable",
    )  # fmt: skip


def _profile(options: argparse.Namespace) -> int:
    from sm121.core.verdict import NotRun
    from sm121.session import decode_command

    if options.prompt < 1 or options.tokens < 1:
        raise UsageError("--prompt, --tokens: expected at least 1")
    request = decode_command.DecodeRequest(
        target=options.target,
        prompt=options.prompt,
        tokens=options.tokens,
        layout=options.layout,
        profile=options.profile,
        backends=tuple(options.backend),
        traces=options.traces,
        engine_python=options.engine_python,
        arguments=tuple(options.engine_arg),
        environment=_variables(options),
        output=options.output,
    )
    try:
        result = decode_command.run(request)
    except NotRun as error:
        print(f"NOT_RUN: {printable(str(error))}", file=sys.stderr)
        return error.verdict.exit_status
    print(json.dumps(result.record(), indent=2) if options.json else result.text(), end="")
    return result.verdict.exit_status


def _variables(options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Return the variables of ``--engine-env``."""
    variables = []
    for assignment in options.engine_env:
        key, equals, value = assignment.partition("=")
        if not (key and equals):
            raise UsageError(f"--engine-env {assignment}: expected KEY=VALUE")
        variables.append((key, value))
    return tuple(variables)


def _add_record(commands: Commands) -> None:
    parser = command(
        commands,
        "record",
        _record,
        (
            "print the environment record of a run as JSON, without a run: commits, packages, "
            "driver, clocks, flags, variables, workload, FlashInfer's configuration"
        ),
    )
    parser.add_argument(
        "--profile", metavar="NAME|PATH",
        help="name or path of the profile (default: by architecture)",
    )  # fmt: skip
    parser.add_argument(
        "--configuration", metavar="NAME",
        help="configuration of the profile (default: the one under test)",
    )  # fmt: skip
    parser.add_argument(
        "--engine-python", metavar="PYTHON", default=sys.executable,
        help=(
            "Python interpreter of the engine's environment (default: the one that runs the "
            "suite)"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--engine-arg", action="append", default=[], metavar="ARG",
        help="passed to the engine; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--engine-env", action="append", default=[], metavar="KEY=VALUE",
        help="in the engine's environment; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--image-id", metavar="ID",
        help="id of the engine's container image (default: the variable SM121_IMAGE_ID)",
    )  # fmt: skip


def _record(options: argparse.Namespace) -> None:
    from sm121.session import record_command

    record = record_command.run(
        record_command.RecordRequest(
            profile=options.profile,
            configuration=options.configuration,
            engine_python=options.engine_python,
            arguments=tuple(options.engine_arg),
            environment=_variables(options),
            image_id=options.image_id,
        )
    )
    print(record.model_dump_json(indent=2))


def _add_init_profile(commands: Commands) -> None:
    parser = command(
        commands,
        "init-profile",
        _init_profile,
        (
            "write a profile for the model that a server serves: its kernel path, the bytes of a "
            "token, the questions that it answers, and gates as measured less a tenth"
        ),
    )
    parser.add_argument("--base-url", metavar="URL", help="a running server")
    parser.add_argument(
        "--server-log", type=Path, metavar="FILE",
        help="with --base-url: the server's log, which shows the kernel path and the arguments",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="DIR|ID",
        help=(
            "without --base-url: the model that is started and stopped. With --base-url: the "
            "checkpoint on this machine, if the server does not name its folder"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--engine-args", default="", metavar="TEXT",
        help='arguments of the engine that is started, as "--max-model-len 8192"',
    )  # fmt: skip
    parser.add_argument(
        "--engine", default="vllm", metavar="NAME", help="the engine that is started"
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the model, if the server serves several"
    )
    parser.add_argument(
        "--arch", metavar="NAME", help="the architecture of the target (default: this machine's)"
    )
    parser.add_argument(
        "--no-rates", action="store_true", help="measure no rates; the profile has no gates"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("mine.toml"), metavar="FILE",
        help="the profile; its exam is written beside it (default: mine.toml)",
    )  # fmt: skip


def _init_profile(options: argparse.Namespace) -> int:
    from sm121.session import init_command

    request = init_command.InitRequest(
        base_url=options.base_url,
        model=options.model,
        served_name=options.served_model_name,
        log=options.server_log,
        engine=options.engine,
        engine_arguments=tuple(shlex.split(options.engine_args)),
        arch=options.arch,
        measures=not options.no_rates,
        output=options.output,
    )
    for path in init_command.run(request, progress):
        print(printable(str(path)))
    return 0
