"""The options that say which engine is started or attached, and where."""

from sm121.core.options import AddOption
from sm121.engines import capabilities


def add_options(add: AddOption) -> None:
    """Add the options of the group "engine".

    Args:
        add: Adds an option.
    """
    _add_started(add)
    _add_image(add)
    _add_attached(add)
    _add_nodes(add)


def _add_started(add: AddOption) -> None:
    engines = ", ".join(capabilities.shipped())
    add(
        "--engine",
        metavar="NAME",
        help=(
            "engine to start: vllm (default); with --base-url the engine that listens there "
            f"({engines}; default: recognised by its answers), whose profile is taken if one is "
            "shipped"
        ),
    )
    add(
        "--engine-python",
        metavar="PATH",
        help="interpreter of the environment that the engine lives in (default: this one)",
    )
    add(
        "--engine-binary",
        metavar="PATH",
        help="program of an engine that is one, as llama-server (default: on the PATH)",
    )
    add(
        "--engine-arg",
        metavar="ARG",
        action="append",
        default=[],
        help="passed to the engine; repeatable; write --engine-arg=--flag",
    )
    add(
        "--engine-args",
        metavar="TEXT",
        action="append",
        default=[],
        help=(
            "the same in one string, as a recipe has it: --engine-args '--max-model-len 8192 "
            "--enforce-eager'; quotes as in a shell, no shell"
        ),
    )
    add(
        "--engine-env",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help=(
            "in the engine's environment; repeatable; without a network "
            "TIKTOKEN_ENCODINGS_BASE=DIR (`sm121 vocabulary DIR`)"
        ),
    )
    add(
        "--engine-debug",
        action="store_true",
        help="the engine runs with blocking launches and full stack traces",
    )


def _add_image(add: AddOption) -> None:
    add(
        "--image-id",
        metavar="ID",
        help=(
            "id of the image that the engine runs in, for the record: docker image inspect -f "
            "'{{.Id}}' IMAGE (default: the variable SM121_IMAGE_ID)"
        ),
    )


def _add_attached(add: AddOption) -> None:
    add("--base-url", metavar="URL", help="attach to a running server; it is never stopped")
    add(
        "--api-key",
        metavar="KEY",
        help=(
            "key of the attached server; the variable OPENAI_API_KEY or SM121_API_KEY, and "
            "--api-key-file, keep it off the command line"
        ),
    )
    add("--api-key-file", metavar="PATH", help="file with the key of the attached server")
    add(
        "--server-log",
        metavar="PATH",
        action="append",
        default=[],
        help=(
            "log of the attached server, for its kernel path; -: on standard input, as of docker "
            "logs -f NAME 2>&1; of one that spans machines once for each node, rank 0 first"
        ),
    )
    add(
        "--container",
        metavar="NAME",
        help=(
            "container of the attached server: its log is that of docker logs NAME, followed "
            "while the run goes on"
        ),
    )


def _add_nodes(add: AddOption) -> None:
    add(
        "--launcher",
        metavar="nnodes|ray",
        help=(
            "how a server that spans machines is started: by vLLM's own --nnodes, or on your Ray "
            "cluster (default: the profile's)"
        ),
    )
    add(
        "--node-command",
        metavar="COMMAND",
        action="append",
        default=[],
        help=(
            "what runs Python on another node of the server, once for each, in the order of "
            "ranks: --node-command 'ssh spark2 /opt/venv/bin/python3'; quotes as in a shell, no "
            "shell (default of a CPU: this Python, here)"
        ),
    )
    add(
        "--master-addr",
        metavar="ADDRESS",
        help=(
            "address of this machine that the other nodes of the server reach (default: "
            "127.0.0.1 where all of them are here)"
        ),
    )
