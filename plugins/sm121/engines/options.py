"""The options for starting an engine, or for attaching to a running server.

Most of these options depend on each other. The modules ``given_engine``, ``given_attached`` and
``given_nodes`` of `sm121.session` contain these checks.
"""

import sys
from dataclasses import dataclass
from typing import get_args

from sm121.core.address import root_of
from sm121.core.engine_settings import Launcher
from sm121.core.option_values import assignment, checked_by, one_of, words
from sm121.core.options import flag, option, repeated
from sm121.engines import capabilities, followed_log

#: The engine of a run whose command line names none.
DEFAULT = "vllm"


@dataclass(frozen=True)
class GivenEngine:
    """The engine that the suite starts."""

    name: str = option(
        "--engine",
        default=DEFAULT,
        metavar="NAME",
        help=(
            "engine to start (default: vllm); with --base-url, the engine that runs there "
            f"({', '.join(capabilities.shipped())}; default: recognised by the server's answers). "
            "The default of --profile becomes the suite's profile for this engine"
        ),
    )
    #: The engine's Python interpreter; for an engine that is a program, its executable.
    python: str = option(
        "--engine-python",
        default=sys.executable,
        metavar="PATH",
        help=(
            "Python interpreter of the engine's environment (default: the one that runs the suite)"
        ),
    )
    #: The value of the option. `python` contains it as well.
    binary: str | None = option(
        "--engine-binary",
        metavar="PATH",
        help=(
            "executable of an engine that is a single program, such as llama-server (default: "
            "found on the PATH)"
        ),
    )
    #: The arguments of ``--engine-arg`` and ``--engine-args``.
    arguments: tuple[str, ...] = repeated(
        "--engine-arg",
        metavar="ARG",
        help="argument to pass to the engine; repeatable; write --engine-arg=--flag",
    )
    #: The words of each ``--engine-args``. `arguments` contains them as well.
    argument_texts: tuple[tuple[str, ...], ...] = repeated(
        "--engine-args",
        words(),
        metavar="TEXT",
        help=(
            "several arguments in one string, which is split as by a shell: --engine-args "
            "'--max-model-len 8192 --enforce-eager'"
        ),
    )
    environment: tuple[tuple[str, str], ...] = repeated(
        "--engine-env",
        assignment(),
        metavar="KEY=VALUE",
        help=(
            "environment variable for the engine; repeatable. Example, for a machine without a "
            "network: TIKTOKEN_ENCODINGS_BASE=DIR, where `sm121 vocabulary DIR` has written the "
            "vocabulary"
        ),
    )
    debug: bool = flag(
        "--engine-debug",
        help="run the engine with blocking kernel launches and full stack traces",
    )
    #: The id of the engine's container image. If None, it is the value of the variable
    #: SM121_IMAGE_ID.
    image_id: str | None = option(
        "--image-id",
        metavar="ID",
        help=(
            "id of the engine's container image, for the report: docker image inspect -f "
            "'{{.Id}}' IMAGE (default: the variable SM121_IMAGE_ID)"
        ),
    )
    #: How a server on several machines is started. If None, its profile determines this.
    launcher: str | None = None
    #: The commands that run Python on the other nodes.
    node_commands: tuple[tuple[str, ...], ...] = ()
    master_address: str | None = None


def _root(text: str) -> str:
    return root_of(text, "--base-url")


def _container(name: str) -> str:
    followed_log.check_container(name)
    return name


@dataclass(frozen=True)
class AttachedOptions:
    """The options that describe an attached server."""

    base_url: str | None = option(
        "--base-url",
        checked_by(_root, wrong=("127.0.0.1:8000", "ftp://host")),
        metavar="URL",
        help="attach to a running server; the suite never stops it",
    )
    api_key: str | None = option(
        "--api-key",
        metavar="KEY",
        help=(
            "API key of the attached server. To keep the key off the command line, use the "
            "variable OPENAI_API_KEY or SM121_API_KEY, or --api-key-file"
        ),
    )
    api_key_file: str | None = option(
        "--api-key-file",
        metavar="PATH",
        help="file with the API key of the attached server",
    )
    #: The files, or ``-`` for standard input.
    server_logs: tuple[str, ...] = repeated(
        "--server-log",
        metavar="PATH",
        help=(
            "log file of the attached server, which shows the kernels that it runs. With -, the "
            "log is read from standard input (docker logs -f NAME 2>&1 | ...). For a server on "
            "several machines, give the option once per node, rank 0 first"
        ),
    )
    container: str | None = option(
        "--container",
        checked_by(_container, wrong=("no/container", "a b")),
        metavar="NAME",
        help=(
            "container of the attached server; its log is read with docker logs -f NAME during "
            "the run"
        ),
    )


@dataclass(frozen=True)
class NodeOptions:
    """The options of a server on several machines."""

    launcher: str | None = option(
        "--launcher",
        one_of(get_args(Launcher)),
        metavar="nnodes|ray",
        help=(
            "how to start a server on several machines: with vLLM's --nnodes, or on your Ray "
            "cluster (default: as the profile sets it)"
        ),
    )
    commands: tuple[tuple[str, ...], ...] = repeated(
        "--node-command",
        words(),
        metavar="COMMAND",
        help=(
            "command that runs Python on another node of the server; give the option once per "
            "node, in the order of ranks. The text is split as by a shell, and run without one: "
            "--node-command 'ssh spark2 /opt/venv/bin/python3' (default on a CPU: this Python, "
            "on this machine)"
        ),
    )
    master_address: str | None = option(
        "--master-addr",
        metavar="ADDRESS",
        help=(
            "address of this machine that the other nodes of the server can reach (default: "
            "127.0.0.1 if all nodes are on this machine)"
        ),
    )
