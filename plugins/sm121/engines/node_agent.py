"""The agent on another node of a server, started as ``COMMAND -m sm121.engines.node_agent``.

The agent works without pytest. It reads a request in JSON from standard input, and writes its
answers as lines of JSON with the prefix `MARK`. The requests are:

- ``look``: report the facts of the machine.
- ``start``: start a rank of the server, and report the state of this rank repeatedly.

While the agent reports, the suite may send the line `STACKS` to request the stack traces of the
rank's processes. If standard input ends, or brings no line for ``lease_s`` seconds, the agent stops
everything that it has started.
"""

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from sm121.core import digest, interpreter
from sm121.core.configuration import Rank, ServerConfiguration
from sm121.engines import dead_runs, registry
from sm121.engines.managed import ManagedServer
from sm121.engines.other_nodes import NoOtherNodes
from sm121.engines.starting import StartLimits
from sm121.engines.supervision import scratch_base
from sm121.evidence import environment, kernel_messages, mapped, process_snapshot, stacks
from sm121.evidence.unanswered import unanswered

#: The prefix of each answer. Lines without it come from other programs.
MARK = "sm121-node "
#: The line that requests the stack traces.
STACKS = "stacks"
#: Seconds between two reports of the state.
_STATE_EVERY_S = 1.0
#: Seconds between two readings of all processes. One reading takes tens of milliseconds on a slow
#: core.
_TREE_EVERY_S = 3.0
_MAPPED_EVERY_S = 10.0
_REACH_EVERY_S = 2.0
_REACH_WITHIN_S = 2.0
#: The limits of one report (processes, kernel messages), and of the log and the stack traces, in
#: bytes.
_MOST_PROCESSES = 64
_MOST_LINES = 50
_LOG_PIECE_BYTES = 1 << 18
_MOST_LOG_BYTES = 64 << 20
_MOST_STACKS = 1 << 18


def facts(configuration: ServerConfiguration) -> dict[str, Any]:
    """Return this machine's packages, environment variables, GPUs and model for a configuration.

    Args:
        configuration: The configuration.

    Returns:
        ``model``: the digest of the model's files; None if the model is not a folder.
            ``available_bytes``: the free memory. ``record``: the reproducibility record.
    """
    engine = registry.engine(configuration.engine)
    folder = Path(configuration.model)
    model = None
    if folder.is_dir():
        model = digest.of_files(folder, (file for file in folder.iterdir() if file.is_file()))
    record = environment.record(
        configuration.python,
        arguments=configuration.given,
        environment=engine.environment(configuration, api_key=""),
        workload={},
    )
    return {
        "model": model,
        "available_bytes": psutil.virtual_memory().available,
        "record": record.model_dump(mode="json"),
    }


def bound_to(toward: str, configuration: ServerConfiguration) -> dict[str, str]:
    """Return the environment variables that make a rank use the network link to an address.

    Variables that the user has set are not changed.

    Args:
        toward: The IPv4 address of rank 0.
        configuration: The configuration, with the user's variables.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((toward, 9))  # sends nothing, but makes the kernel choose the route
        address = str(probe.getsockname()[0])
    variables = {"VLLM_HOST_IP": address}
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            variables |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    chosen = {*dict(configuration.environment), *os.environ} - {"VLLM_HOST_IP"}
    return {name: value for name, value in variables.items() if name not in chosen}


def write_answer(kind: str, content: object) -> None:
    """Write one answer.

    Args:
        kind: The kind of the answer.
        content: Its content, which must be serialisable as JSON.
    """
    sys.stdout.write(f"{MARK}{json.dumps({kind: content})}\n")
    sys.stdout.flush()


def answer_in(line: str) -> dict[str, Any]:
    """Parse a line of an agent, and return its answer with the kind as the key.

    Args:
        line: The line. Other output of the node, such as a banner without a line end, may precede
            `MARK`.

    Raises:
        ValueError: The line contains no answer.
    """
    answer = json.loads(line.partition(MARK)[2])
    if not isinstance(answer, dict):
        raise ValueError(f"expected an object, got {answer!r}")
    return answer


def _look(question: Mapping[str, Any], configuration: ServerConfiguration) -> None:
    leftovers = []
    for ended in dead_runs.end_dead_runs():
        processes = "; ".join(map(str, ended.processes))
        leftovers.append(f"{ended.run}: {processes}")
    reached = {str(port): _why_unreachable(host, port) for host, port in question["reach"]}
    write_answer("facts", {**facts(configuration), "leftovers": leftovers, "unreachable": reached})


def _why_unreachable(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=_REACH_WITHIN_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


class _Reporter:
    """Reports the state of a rank, until the suite ends or sends nothing for too long."""

    def __init__(self, server: ManagedServer, question: Mapping[str, Any]) -> None:
        self._server = server
        self._beacon: tuple[str, int] = tuple(question["beacon"])
        self._lease_s: float = question["lease_s"]
        #: How many bytes of the log were sent.
        self._sent = 0
        self._reached_at = 0.0
        self._unreachable: str | None = None
        self._address = server.added["VLLM_HOST_IP"]
        self._address_of_rank_0 = question["rank"]["address"]
        self._unanswered: list[str] = []
        self._tree: list[dict[str, Any]] = []
        self._tree_at = 0.0
        self._nccl: list[dict[str, Any]] = []
        self._nccl_at = 0.0
        #: Stack traces that were read and not yet reported; None if there are none.
        self._stacks: str | None = None

    def run(self) -> None:
        heard_at = reported_at = time.monotonic()
        heard = b""
        while time.monotonic() - heard_at < self._lease_s:
            patience_s = max(0.0, reported_at + _STATE_EVERY_S - time.monotonic())
            readable, _, _ = select.select([0], [], [], patience_s)
            if readable:
                piece = os.read(0, 4096)
                if not piece:
                    return
                heard_at = time.monotonic()
                *lines, heard = (heard + piece).split(b"\n")
                if STACKS.encode() in lines:
                    self._take_stacks()
            if time.monotonic() - reported_at >= _STATE_EVERY_S:
                reported_at = time.monotonic()
                self.tell_log()
                self.tell_state()
            if self._stacks is not None:
                write_answer("stacks", self._stacks[:_MOST_STACKS])
                self._stacks = None

    def _take_stacks(self) -> None:
        """Read the stack traces in a thread, so that the states are reported meanwhile."""
        launch = self._server.launch
        tree = process_snapshot.snapshot(launch.processes())

        def take() -> None:
            self._stacks = stacks.take_or_why(tree, launch.supervision.stacks_folder)

        threading.Thread(target=take, daemon=True, name="sm121-stacks").start()

    def tell_log(self) -> None:
        while self._sent < _MOST_LOG_BYTES:
            with self._server.launch.log.open("rb") as log:
                log.seek(self._sent)
                piece = log.read(_LOG_PIECE_BYTES)
            if not piece:
                return
            self._sent += len(piece)
            write_answer("log", piece.decode("utf-8", "replace"))

    def tell_state(self) -> None:
        self._refresh(time.monotonic())
        server = self._server
        # Read the exit status first. If it came after the exits, a report could contain the exit
        # status without the exit of the process that caused it. Reading the kernel messages is
        # slow, so it comes last.
        exit_status = server.launch.exit_status
        exits = server.launch.exits()
        kernel = kernel_messages.since(server.launch.at).of_note[-_MOST_LINES:] if exits else []
        write_answer(
            "state",
            {
                "exit_status": exit_status,
                "exits": [_with_age(entry) for entry in exits[:_MOST_PROCESSES]],
                "tree": self._tree[:_MOST_PROCESSES],
                "nccl": self._nccl,
                "available_bytes": psutil.virtual_memory().available,
                "unreachable": self._unreachable,
                "unanswered": self._unanswered,
                "address": self._address,
                "kernel": kernel,
            },
        )

    def _refresh(self, now: float) -> None:
        """Read those parts of the state again that are too old."""
        server = self._server
        if now - self._reached_at > _REACH_EVERY_S:
            self._reached_at = now
            self._unreachable = _why_unreachable(*self._beacon)
            found = unanswered(server.launch.processes, {self._address_of_rank_0})
            self._unanswered = [str(connection) for connection in found]
        if now - self._tree_at > _TREE_EVERY_S or server.launch.exits():
            self._tree_at = now
            self._tree = process_snapshot.snapshot(server.launch.processes())
        if now - self._nccl_at > _MAPPED_EVERY_S:
            self._nccl_at = now
            libraries = mapped.nccl(server.launch.processes())
            self._nccl = [library.model_dump() for library in libraries]


def _with_age(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Add how long ago a process ended, because the clock of the suite's machine may differ."""
    return {**entry, "ago_s": time.monotonic() - entry["monotonic_s"]}


def _start(question: Mapping[str, Any], configuration: ServerConfiguration) -> None:
    rank = Rank(**question["rank"])
    added = {**bound_to(rank.address, configuration), **question["added"]}
    # The engine creates the folder for its traces. This folder is in the report directory, which
    # does not exist on this machine.
    traces = Path(configuration.traces or "/")
    missing = [parent for parent in traces.parents if not parent.exists()]
    with tempfile.TemporaryDirectory(prefix="sm121-node-", dir=scratch_base()) as folder:
        server = ManagedServer(
            configuration,
            registry.engine(configuration.engine),
            StartLimits(ready_s=0.0, stalled_s=0.0, stop_s=question["stop_s"]),
            directory=Path(folder),
            run_id=question["run"],
            added=added,
            other_nodes=NoOtherNodes(rank),
        )
        reporter = _Reporter(server, question)
        try:
            server.start_rank()
            reporter.run()
        finally:
            report = dataclasses.asdict(server.stop())
            if missing:
                shutil.rmtree(traces, ignore_errors=True)
            for parent in missing:
                with contextlib.suppress(OSError):  # another program has put a file there
                    parent.rmdir()
        reporter.tell_log()
        kernel = kernel_messages.since(server.launch.at)
        lines = [*kernel.no_memory, *kernel.host_faults, *kernel.xids][-_MOST_LINES:]
        write_answer("stopped", {**report, "kernel": [lines, kernel.unavailable, time.monotonic()]})


def main() -> int:
    """Read a request from standard input, and answer it.

    Returns:
        The exit status.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the suite handles Ctrl-C
    with open(0, "rb", buffering=0, closefd=False) as questions:
        question = json.loads(questions.readline())
    write_answer("host", socket.gethostname())
    fields = question["configuration"]
    fields["arguments"] = tuple(fields["arguments"])
    fields["environment"] = tuple((name, value) for name, value in fields["environment"])
    if interpreter.package(sys.executable, fields["engine"], os.environ) is not None:
        fields["python"] = sys.executable
    configuration = ServerConfiguration(**fields)
    answers = {"look": _look, "start": _start}
    answers[question["do"]](question, configuration)
    return 0


if __name__ == "__main__":
    sys.exit(main())
