"""The options for starting an engine, or for attaching to a running server."""

from sm121.core.options import AddOption
from sm121.engines import capabilities


def add_options(add: AddOption) -> None:
    """Add the options of the group "engine".

    Args:
        add: A function that adds an option.
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
            "engine to start (default: vllm); with --base-url, the engine that runs there "
            f"({engines}; default: recognised by the server's answers). The default of --profile "
            "becomes the suite's profile for this engine"
        ),
    )
    add(
        "--engine-python",
        metavar="PATH",
        help=(
            "Python interpreter of the engine's environment (default: the one that runs the suite)"
        ),
    )
    add(
        "--engine-binary",
        metavar="PATH",
        help=(
            "executable of an engine that is a single program, such as llama-server (default: "
            "found on the PATH)"
        ),
    )
    add(
        "--engine-arg",
        metavar="ARG",
        action="append",
        default=[],
        help="argument to pass to the engine; repeatable; write --engine-arg=--flag",
    )
    add(
        "--engine-args",
        metavar="TEXT",
        action="append",
        default=[],
        help=(
            "several arguments in one string, which is split as by a shell: --engine-args "
            "'--max-model-len 8192 --enforce-eager'"
        ),
    )
    add(
        "--engine-env",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help=(
            "environment variable for the engine; repeatable. Example, for a machine without a "
            "network: TIKTOKEN_ENCODINGS_BASE=DIR, where `sm121 vocabulary DIR` has written the "
            "vocabulary"
        ),
    )
    add(
        "--engine-debug",
        action="store_true",
        help="run the engine with blocking kernel launches and full stack traces",
    )


def _add_image(add: AddOption) -> None:
    add(
        "--image-id",
        metavar="ID",
        help=(
            "id of the engine's container image, for the report: docker image inspect -f "
            "'{{.Id}}' IMAGE (default: the variable SM121_IMAGE_ID)"
        ),
    )


def _add_attached(add: AddOption) -> None:
    add("--base-url", metavar="URL", help="attach to a running server; the suite never stops it")
    add(
        "--api-key",
        metavar="KEY",
        help=(
            "API key of the attached server. To keep the key off the command line, use the "
            "variable OPENAI_API_KEY or SM121_API_KEY, or --api-key-file"
        ),
    )
    add("--api-key-file", metavar="PATH", help="file with the API key of the attached server")
    add(
        "--server-log",
        metavar="PATH",
        action="append",
        default=[],
        help=(
            "log file of the attached server, which shows the kernels that it runs. With -, the "
            "log is read from standard input (docker logs -f NAME 2>&1 | ...). For a server on "
            "several machines, give the option once per node, rank 0 first"
        ),
    )
    add(
        "--container",
        metavar="NAME",
        help=(
            "container of the attached server; its log is read with docker logs -f NAME during "
            "the run"
        ),
    )


def _add_nodes(add: AddOption) -> None:
    add(
        "--launcher",
        metavar="nnodes|ray",
        help=(
            "how to start a server on several machines: with vLLM's --nnodes, or on your Ray "
            "cluster (default: as the profile sets it)"
        ),
    )
    add(
        "--node-command",
        metavar="COMMAND",
        action="append",
        default=[],
        help=(
            "command that runs Python on another node of the server; give the option once per "
            "node, in the order of ranks. The text is split as by a shell, and run without one: "
            "--node-command 'ssh spark2 /opt/venv/bin/python3' (default on a CPU: this Python, "
            "on this machine)"
        ),
    )
    add(
        "--master-addr",
        metavar="ADDRESS",
        help=(
            "address of this machine that the other nodes of the server can reach (default: "
            "127.0.0.1 if all nodes are on this machine)"
        ),
    )
