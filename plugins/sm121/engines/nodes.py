"""The other nodes of a server, each through the command that the user gave for it: what they are,
before a start, and how their ranks are, while it serves."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sm121.core import data_file, redaction
from sm121.core.configuration import ServerConfiguration, Span
from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError
from sm121.core.printable import printable
from sm121.core.profile_fields import Sourced
from sm121.core.server import Node
from sm121.engines import listeners, node_agent, process_tree
from sm121.engines.ports import LOOPBACK, free_port

#: Longest line that a node may write; a longer one is cut.
_LONGEST = 1 << 21
_LONGEST_NAME = 64
_AGENT = ("-m", "sm121.engines.node_agent")
#: Options of ssh that have a value.
_SSH_VALUES = frozenset("BbcDEeFIiJLlmOoPpQRSWw")


class NodesFile(DataTable):
    """``fixtures/nodes.toml``."""

    answers_within_s: Sourced
    silent_after_s: Sourced
    lease_s: Sourced
    unreachable_after_s: Sourced
    stopped_after_s: Sourced
    token_within_s: Sourced
    packages: tuple[str, ...]
    variables: tuple[str, ...]
    own_variables: frozenset[str]


def bounds() -> NodesFile:
    """What is waited for, and what must be equal."""
    return data_file.load("nodes.toml", NodesFile)


def name_of(command: Sequence[str], host: str | None = None) -> str:
    """What the user calls the machine of a command: ssh's host, this machine, or its own name."""
    if Path(command[0]).name == "ssh":
        words = iter(command[1:])
        for word in words:
            if not word.startswith("-"):
                return printable(word.rpartition("@")[2])
            if len(word) == 2 and word[1] in _SSH_VALUES:
                next(words, None)
    if host is not None and host != socket.gethostname():
        return printable(host)[:_LONGEST_NAME]
    return "this machine" if host is not None else printable(" ".join(command))


def question(configuration: ServerConfiguration, kind: str, **more: object) -> dict[str, Any]:
    """What a node is asked: ``look`` or ``start``."""
    table = dataclasses.asdict(configuration)
    fields = [each.name for each in dataclasses.fields(configuration) if each.init]
    table = {name: table[name] for name in fields if name != "span"}
    return {"do": kind, "configuration": table, **more}


class NodeProcess:
    """The command of one node, and what it has told. `log`: where that of its rank goes."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        asked: Mapping[str, Any],
        log: Path | None = None,
    ) -> None:
        self.node = Node(rank, name_of(command), log)
        self._command = command
        self.last_line = ""
        self.answers: dict[str, Any] = {}
        self.heard_at = self.state_at = time.monotonic()
        #: When it was first told, of a state that lasts: unreachable, and each stopped process.
        self.since: dict[str, float] = {}
        self.unanswered_since: dict[str, float] = {}  # by connection
        self.has_reached = False
        try:
            self._process = subprocess.Popen(
                [*command, *_AGENT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"{self.node}: {command[0]}: {error.strerror or error}") from error
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"sm121-{rank}")
        self._reader.start()
        self.say(json.dumps(asked) + "\n")

    def say(self, text: str) -> None:
        """To its standard input; nothing where it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except (OSError, ValueError):
            return  # its end is told by `exit_status`, with its last line

    @property
    def exit_status(self) -> int | None:
        """Of the command; None while it runs."""
        return self._process.poll()

    @property
    def state(self) -> Mapping[str, Any]:
        """How its rank was a moment ago; empty before it tells."""
        state: Mapping[str, Any] = self.answers.get("state") or {}
        return state

    def wait_for(self, kind: str, within_s: float) -> Any:
        """An answer of that kind. Raises UsageError: none in time; the message names the node, and
        has the last line that its command wrote."""
        deadline = time.monotonic() + within_s
        while kind not in self.answers:
            ended = self.exit_status is not None and not self._reader.is_alive()
            if ended or time.monotonic() >= deadline:
                how = f"ended with {self.exit_status}" if ended else f"is silent for {within_s:g} s"
                last = self.last_line or "it wrote nothing"
                raise UsageError(f"{self.node} does not answer: its command {how}; last: {last}")
            time.sleep(0.05)
        return self.answers[kind]

    def close(self, within_s: float) -> Mapping[str, Any] | None:
        """Let it stop all that it has started; its report, None where none came in time."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: nobody reads there
            self._process.stdin.close()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # a wrapper's children too
            self._process.wait()
        self._reader.join(5.0)
        report: Mapping[str, Any] | None = self.answers.get("stopped")
        return report

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            while line := lines.readline(_LONGEST):
                self.heard_at = time.monotonic()
                text = line.decode("utf-8", "replace").rstrip("\n")
                try:  # a banner may be before it, without the end of its line
                    self._note(json.loads(text.partition(node_agent.MARK)[2]))
                except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                    if text.strip():
                        self.last_line = printable(redaction.redact(text[:4096].strip())[:300])

    def _note(self, answer: dict[str, Any]) -> None:
        if "log" in answer:
            if self.node.log is not None:
                with self.node.log.open("a", encoding="utf-8") as log:
                    log.write(answer["log"])
            return
        if "host" in answer:
            name = name_of(self._command, answer["host"])
            self.node = dataclasses.replace(self.node, name=name)
        if (state := answer.get("state")) is None:
            self.answers.update(answer)
            return
        lasting = {str(p["pid"]) for p in state["tree"] if p["status"] == "stopped"}
        self.answers.update(answer)
        self.state_at = time.monotonic()
        if state["unreachable"] is None:
            self.has_reached = True
        elif self.has_reached:
            lasting.add("unreachable")
        self.since = {key: self.since.get(key, self.state_at) for key in lasting}
        first, now = self.unanswered_since, self.state_at
        self.unanswered_since = {end: first.get(end, now) for end in state["unanswered"]}


def master(span: Span) -> tuple[str, int]:
    """Where rank 0 gathers the others. Raises UsageError: not of this machine, or in use."""
    host, _, given = (span.address or LOOPBACK).partition(":")
    if given and not (given.isdecimal() and len(given) <= 5 and 0 < int(given) < 1 << 16):
        raise UsageError(f"--master-addr {span.address}: expected ADDRESS or ADDRESS:PORT, of IPv4")
    if not listeners.is_here(host):
        raise UsageError(f"--master-addr {host}: expected an address of this machine")
    # A name may be another machine there, and connections are told by their address.
    every = sorted(each for each in listeners.addresses(host) if "." in each)
    every = [each for each in every if not each.startswith("127.")] or every[:1]
    if len(every) > 1:
        raise UsageError(f"--master-addr {host}: expected one of its addresses: {', '.join(every)}")
    host = every[0] if every else host
    if not given:
        return host, free_port(host)
    try:
        socket.create_server((host, int(given))).close()
    except OSError as error:
        holders = process_tree.describe(listeners.listeners(host, int(given)))
        who = "; ".join(map(str, holders)) or "a process that is not seen from here (a container?)"
        raise UsageError(
            f"--master-addr {span.address}: the port cannot be used ({error.strerror}), held by "
            f"{who}: an earlier server may be left there; end it, or give another port"
        ) from error
    return host, int(given)


def look(configuration: ServerConfiguration) -> list[tuple[Node, dict[str, Any]]]:
    """What each node would start a configuration with, rank 0 first. Raises UsageError, in one
    line: a node does not answer, does not reach this machine, or has something else than rank 0."""
    span, data = configuration.span, bounds()
    assert span is not None
    host, port = master(span)
    with socket.create_server((host, port)):
        asked = question(configuration, "look", reach=[[host, port]])
        nodes = [NodeProcess(rank, command, asked) for rank, command in enumerate(span.commands, 1)]
        try:
            first = node_agent.facts(configuration)
            looks = [(Node(0, "this machine"), first)]
            for node in nodes:
                answer = node.wait_for("facts", data.answers_within_s.value)
                looks.append((node.node, answer))
        finally:
            for node in nodes:
                node.close(5.0)
    for named, answer in looks[1:]:
        if not isinstance(answer, dict) or not {*first, "unreachable"} <= answer.keys():
            raise UsageError(f"{named} tells other facts than this suite's: expected its version")
        if why := answer["unreachable"][str(port)]:
            raise UsageError(
                f"{named} does not reach {host}:{port} of this machine ({why}): give --master-addr "
                "an address, and a port if need be, that it reaches"
            )
        if wrong := unequal(_compared(first), _compared(answer)):
            raise UsageError(f"{named} is not as this machine: {'; '.join(wrong[:5])}")
    return looks


def unequal(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """What another node has that the first one has not, or has otherwise, a line each."""
    names = sorted({**first, **other})
    rows = [(name, first.get(name) or "none", other.get(name) or "none") for name in names]
    return [f"{name} {its}, expected {value}" for name, value, its in rows if its != value]


def _compared(facts: Mapping[str, Any]) -> dict[str, str]:
    data, record = bounds(), facts["record"]
    packages = record["engine_packages"]["packages"] or {}
    values = {name: packages[name] for name in data.packages if name in packages}
    for name, made in record["git_shas"].items():
        parts = (made.get(key) for key in ("version", "sha", "changes"))
        values[f"source of {name}"] = " ".join(map(str, filter(None, parts)))
    values["CUDA"] = record["cuda_version"]
    values["GPUs"] = ", ".join(str(gpu["name"]) for gpu in record["gpus"] or ())
    values["the model's files"] = facts["model"]
    for name, value in record["environment"].items():
        if name.startswith(data.variables) and name not in data.own_variables:
            values[name] = value
    return values
