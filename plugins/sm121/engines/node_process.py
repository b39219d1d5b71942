"""Another node of a server, reached through the command that the user gave for it."""

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

from sm121.core import redaction
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import UsageError
from sm121.core.printable import printable
from sm121.core.server import Node
from sm121.engines import node_agent

#: The maximum length of a line of a node, in bytes; a longer line is truncated.
_LONGEST = 1 << 21
_LONGEST_NAME = 64
_AGENT = ("-m", "sm121.engines.node_agent")
#: The options of ssh that take a value (ssh(1)).
_SSH_VALUES = frozenset("BbcDEeFIiJLlmOoPpQRSWw")


def name_of(command: Sequence[str], host: str | None = None) -> str:
    """Return a name for the machine on which a command runs Python.

    It is the host of an ssh command, "this machine", or the machine's own host name.

    Args:
        command: The command of the node.
        host: The machine's own host name; None before the machine has reported it.
    """
    if Path(command[0]).name == "ssh":
        destination = _ssh_destination(command[1:])
        if destination is not None:
            return printable(destination.rpartition("@")[2])
    if host is None:
        return printable(" ".join(command))
    if host == socket.gethostname():
        return "this machine"
    return printable(host)[:_LONGEST_NAME]


def _ssh_destination(arguments: Sequence[str]) -> str | None:
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            return word
        if len(word) == 2 and word[1] in _SSH_VALUES:
            next(words, None)
    return None


def question(configuration: ServerConfiguration, kind: str, **more: object) -> dict[str, Any]:
    """Return the request for a node.

    Args:
        configuration: The configuration of the server.
        kind: ``look`` or ``start``, of `node_agent`.
        more: The other fields of that request.
    """
    table = dataclasses.asdict(configuration)
    fields = [one.name for one in dataclasses.fields(configuration) if one.init]
    own = {name: table[name] for name in fields if name != "span"}
    return {"do": kind, "configuration": own, **more}


class NodeProcess:
    """The command of one node, and the answers of the node.

    Args:
        rank: The number of the node; 1 or more.
        command: The command that runs Python on the node.
        request: The request for the node, a result of `question`.
        log: The file into which the log of the node's rank is copied.

    Raises:
        UsageError: The command cannot be started.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        request: Mapping[str, Any],
        log: Path | None = None,
    ) -> None:
        self.node = Node(rank, name_of(command), log)
        self._command = command
        #: The last line of the command's output that is not an answer.
        self.last_line = ""
        #: The last answer of each kind.
        self.answers: dict[str, Any] = {}
        #: When the node sent its last line (``time.monotonic``).
        self.heard_at = time.monotonic()
        #: When the node sent its last state (``time.monotonic``).
        self.state_at = self.heard_at
        #: For each lasting fault, when it was first reported. The keys are "unreachable", and the
        #: pids of stopped processes.
        self.since: dict[str, float] = {}
        #: For each connection whose other end does not answer, when this was first reported.
        self.unanswered_since: dict[str, float] = {}
        #: Whether the node has ever connected to this machine.
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
        self.say(json.dumps(request) + "\n")

    def say(self, text: str) -> None:
        """Write to the standard input of the node's command. If the command has ended, do nothing.

        Args:
            text: The text.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except (OSError, ValueError):
            return  # `exit_status` and the last line will show that the command has ended

    @property
    def exit_status(self) -> int | None:
        """The exit status of the command; None while it runs."""
        return self._process.poll()

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of the rank in the node's last report; empty before the first report."""
        state: Mapping[str, Any] = self.answers.get("state") or {}
        return state

    def wait_for(self, kind: str, within_s: float) -> Any:
        """Wait for an answer of the given kind, and return it.

        Args:
            kind: ``host``, ``facts``, ``state``, ``stacks`` or ``stopped``.
            within_s: How long to wait, in seconds.

        Raises:
            UsageError: No answer came in time. The message names the node, and contains the last
                line that its command wrote.
        """
        deadline = time.monotonic() + within_s
        while kind not in self.answers:
            ended = self.exit_status is not None and not self._reader.is_alive()
            if ended or time.monotonic() >= deadline:
                how = (
                    f"ended with {self.exit_status}" if ended else f"was silent for {within_s:g} s"
                )
                last = self.last_line or "it wrote nothing"
                raise UsageError(
                    f"{self.node} does not answer: its command {how}; last line of its output: "
                    f"{last}"
                )
            time.sleep(0.05)
        return self.answers[kind]

    def ask_for_stacks(self) -> None:
        """Request the stack traces of the rank's processes.

        They arrive as the answer ``stacks``.
        """
        self.answers.pop("stacks", None)
        self.say(f"{node_agent.STACKS}\n")

    def close(self, within_s: float) -> Mapping[str, Any] | None:
        """Make the node stop everything that it has started.

        Args:
            within_s: The seconds after which its command is killed.

        Returns:
            The node's report; None if no report came in time.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the command has ended, and does not read its input
            self._process.stdin.close()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # also ends the children of a wrapper
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
                try:
                    self._note(node_agent.answer_in(text))
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
        state = answer.get("state")
        if state is None:
            self.answers.update(answer)
        else:
            self._note_state(state, answer)

    def _note_state(self, state: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        lasting = {str(entry["pid"]) for entry in state["tree"] if entry["status"] == "stopped"}
        self.answers.update(answer)
        now = time.monotonic()
        self.state_at = now
        if state["unreachable"] is None:
            self.has_reached = True
        elif self.has_reached:
            lasting.add("unreachable")
        self.since = {key: self.since.get(key, now) for key in lasting}
        before = self.unanswered_since
        self.unanswered_since = {end: before.get(end, now) for end in state["unanswered"]}
