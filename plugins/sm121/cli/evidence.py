"""The commands that profile decoding, and that print the environment record of a run."""

import argparse
import json
import shlex
import sys
from pathlib import Path

from sm121.cli.command import Commands, command, progress
from sm121.core.errors import UsageError
from sm121.core.printable import printable

#: The default length of the prompt of `sm121 profile`, in tokens.
_PROMPT = 2048
#: The default number of decode steps that `sm121 profile` records.
_STEPS = 64


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
            "profile decode steps: the kernels of each part of the model, the host's share of a "
            "step, and the conclusions; exit status 1 if a kernel of another backend ran or a "
            "limit is exceeded, 5 if a limit could not be judged"
        ),
    )
    parser.add_argument(
        "target",
        metavar="URL|CONFIGURATION|FILE",
        help=(
            "URL of a running server; configuration whose server the command starts and stops; "
            "or a trace of the torch profiler, a .nsys-rep, or the CSV of nsys stats"
        ),
    )
    parser.add_argument(
        "--prompt", type=int, metavar="TOKENS",
        help=f"with a URL or a configuration: length of the prompt (default: {_PROMPT})",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, metavar="TOKENS",
        help=(
            "with a URL or a configuration: fewest decode steps to profile "
            f"(default: {_STEPS})"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--layout", choices=["HND", "NHD"],
        help=(
            "KV layout that the server's log must show; with a configuration, the command requests "
            "it; with a URL, --server-log names the log"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--backend", action="append", default=[], metavar="NAME",
        help=(
            "backend of the experts that should run, such as MARLIN or CUTLASS; repeatable "
            "(default: the backends that the configuration requires)"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--profile", metavar="NAME|PATH",
        help="name or path of the profile (default: by architecture)",
    )  # fmt: skip
    _add_options_of_another(parser)
    _add_engine_of_a_configuration(parser)
    parser.add_argument(
        "--output", type=Path, default=Path("decode-profile"), metavar="DIR",
        help="folder for decode.md and decode.json (default: decode-profile)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print decode.json")


def _add_options_of_another(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--configuration", metavar="NAME",
        help=(
            "with a URL or a file: configuration of the profile that the server runs; its "
            "backends and limits are judged (default: only the limits of the profile)"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--traces", type=Path, metavar="DIR",
        help="with a URL: folder of the server's torch_profiler_dir, on this machine",
    )  # fmt: skip
    parser.add_argument(
        "--server-log", type=Path, metavar="FILE",
        help="with a URL: log file of the server, which shows the KV layout",
    )  # fmt: skip


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

    lengths = {"--prompt": options.prompt, "--tokens": options.tokens}
    given = [name for name, length in lengths.items() if length is not None]
    if given and Path(options.target).is_file():
        raise UsageError(
            f"{', '.join(given)}: expected a URL or a configuration, got a file, whose requests "
            "were sent before"
        )
    prompt = _PROMPT if options.prompt is None else options.prompt
    tokens = _STEPS if options.tokens is None else options.tokens
    if prompt < 1 or tokens < 1:
        raise UsageError("--prompt, --tokens: expected at least 1")
    request = decode_command.DecodeRequest(
        target=options.target,
        prompt=prompt,
        tokens=tokens,
        layout=options.layout,
        profile=options.profile,
        configuration=options.configuration,
        backends=tuple(options.backend),
        traces=options.traces,
        log=options.server_log,
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
            "print as JSON, without a run, the environment that a run records: commits, "
            "packages, driver, clocks, flags, variables, workload, FlashInfer's configuration"
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
        help="argument that would be passed to the engine; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--engine-env", action="append", default=[], metavar="KEY=VALUE",
        help="environment variable that the engine would have; repeatable",
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
            "write a profile for the model of a server: the kernels that it runs, the bytes that "
            "it reads per token, an exam of questions that it answers correctly, and gates that "
            "are 10 percent worse than the measured values"
        ),
    )
    parser.add_argument("--base-url", metavar="URL", help="URL of a running server")
    parser.add_argument(
        "--server-log", type=Path, metavar="FILE",
        help=(
            "with --base-url: log file of the server, from which the command reads the kernels "
            "and the arguments"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="DIR|ID",
        help=(
            "without --base-url: model whose server the command starts and stops. With "
            "--base-url: folder of the checkpoint on this machine, if the server does not report "
            "it"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--engine-args", default="", metavar="TEXT",
        help=(
            "without --base-url: arguments of the engine in one string, such as "
            '"--max-model-len 8192"'
        ),
    )  # fmt: skip
    parser.add_argument(
        "--engine",
        default="vllm",
        metavar="NAME",
        help="without --base-url: engine to start (default: vllm)",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name of the model on the server, if the server serves several",
    )
    parser.add_argument(
        "--arch",
        metavar="NAME",
        help="architecture of the server's machine (default: that of this machine)",
    )
    parser.add_argument(
        "--no-rates", action="store_true", help="measure no rates; the profile then has no gates"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("mine.toml"), metavar="FILE",
        help="file for the profile; the exam is written into the same folder (default: mine.toml)",
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
