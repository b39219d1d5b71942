"""The options of the commands that look at a server, a machine or a report."""

import argparse
import sys
from pathlib import Path


def health(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sm121 health``."""
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


def path(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sm121 path``."""
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


def box(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sm121 box``."""
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


def compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sm121 compare``."""
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


def history(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sm121 history``."""
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


def report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sm121 report``."""
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="a report directory",
    )
