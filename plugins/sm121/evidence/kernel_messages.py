"""The messages of the Linux kernel about a server: Xid, NVRM, the OOM killer."""

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sm121.core.data_file import named
from sm121.evidence import cgroup
from sm121.evidence.failure_tables import any_of, load_failures

#: The programs that print the messages. Both print seconds since boot, like ``time.monotonic``.
_READERS = (
    ("dmesg", ("dmesg",)),
    ("journalctl", ("journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager")),
)
#: The time limit of dmesg or journalctl, in seconds.
_READER_TIMEOUT_S = 20
_STAMP = re.compile(r"^\S*?\s*\[\s*(\d+\.\d+)\]|^\[\s*(\d+\.\d+)\]")
#: The beginning of a message: the time, the thread or processor (``CONFIG_PRINTK_CALLER``), and
#: journalctl's name of this machine.
_BEFORE_TEXT = re.compile(r"^\S*?\s*\[\s*\d+\.\d+\](?:\[\s*[TC]\d+\])?\s*(?:\S+ kernel: )?")
_OF_NOTE = re.compile(
    r"NVRM|Xid|ut of memory|oom[-_ ]kill|Killed process|nvidia|segfault|hung task"
)
_NO_MEMORY = re.compile(r"NVRM: .*\b(NV_ERR_NO_MEMORY|[Oo]ut of memory)\b")
_KILLED = re.compile(r"Killed process (\d+)")
#: The maximum number of messages that are kept: the last ones, and as many important ones before
#: them.
_MOST_LINES = 4000


@dataclass(frozen=True)
class KernelBefore:
    """The beginning of a run. Later messages of the Linux kernel may concern the run."""

    #: The time, by ``time.monotonic``.
    at: float = field(default_factory=time.monotonic)
    #: The control group's memory events so far.
    cgroup: Mapping[str, int] | str = field(default_factory=cgroup.memory_events)


@dataclass(frozen=True)
class KernelMessages:
    """The messages of the Linux kernel since a point in time.

    Attributes:
        lines: The messages.
        unavailable: The reason why messages are missing; None if no messages are missing.
        starts: The times at which successful server starts began and ended (``time.monotonic``).
    """

    lines: tuple[str, ...] = ()
    unavailable: str | None = None
    starts: Sequence[tuple[float, float]] = ()

    @property
    def of_note(self) -> list[str]:
        """The messages that may explain the death of a process."""
        return [line for line in self.lines if _OF_NOTE.search(line)]

    @property
    def xids(self) -> list[str]:
        """The messages in which NVIDIA's driver reports an error of the GPU."""
        failures = load_failures()
        rows = [named(failures.failure, name, "failure") for name in failures.markers.of_gpu]
        reports_error = any_of(tuple(row.regex for row in rows))
        return [line for line in self.lines if reports_error.search(line)]

    @property
    def host_faults(self) -> list[str]:
        """The messages about uncorrected errors of the host, or about a lack of memory."""
        reports_fault = any_of(load_failures().markers.of_host)
        return [line for line in self.lines if reports_fault.search(line)]

    @property
    def no_memory(self) -> list[str]:
        """The messages about failed allocations of NVIDIA's driver, which a process may survive.

        Messages during one of the `starts` are left out.
        """
        at_start = set(self.no_memory_at_start)
        return [line for line in self.lines if line not in at_start and _NO_MEMORY.search(line)]

    @property
    def no_memory_at_start(self) -> list[str]:
        """The messages about failed allocations during one of the `starts`.

        On a GB10, they also occur during healthy starts
        (https://github.com/vllm-project/vllm/issues/56824).
        """
        return [line for line in self.lines if _NO_MEMORY.search(line) and self._is_at_start(line)]

    def _is_at_start(self, line: str) -> bool:
        match = _STAMP.match(line)
        if match is None:
            return False
        seconds = _seconds(match)
        return any(begin <= seconds <= end for begin, end in self.starts)

    def killed(self, pids: set[int]) -> list[str]:
        """Return the messages in which the OOM killer names one of the processes.

        Args:
            pids: The pids of the processes.
        """
        lines: list[str] = []
        for line in self.lines:
            match = _KILLED.search(line)
            if match is not None and int(match[1]) in pids:
                lines.append(line)
        return lines


def without_stamp(message: str) -> str:
    """Return the text of a message, without its time and without the name of the machine.

    Args:
        message: A line of dmesg or of journalctl.
    """
    return _BEFORE_TEXT.sub("", message)


def since(monotonic_s: float, starts: Sequence[tuple[float, float]] = ()) -> KernelMessages:
    """Read the messages of the Linux kernel since a point in time, with dmesg or journalctl.

    Args:
        monotonic_s: The point in time, as a value of ``time.monotonic``.
        starts: As in `KernelMessages`.

    Returns:
        The messages. `KernelMessages.unavailable` is set if neither program printed all of them.
    """
    reasons: list[str] = []
    messages: tuple[str, ...] = ()
    for name, command in _READERS:
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_READER_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{name}: {error}")
            continue
        if answer.returncode != 0:
            last_line = answer.stderr.strip().splitlines()[-1:]
            reasons.append(f"{name}: {last_line or answer.returncode}")
            continue
        first_s = _first_stamp(answer.stdout)
        if first_s is None and answer.stdout.strip():
            reasons.append(f"{name}: its lines have no times")
            continue
        later = tuple(_later(answer.stdout, monotonic_s))
        if first_s is None or first_s < monotonic_s:
            return KernelMessages(later, starts=starts)
        messages = messages or later
        reasons.append(
            f"{name}: its first line is later than the server's start: earlier messages are lost"
        )
    return KernelMessages(messages, unavailable="; ".join(reasons), starts=starts)


def _first_stamp(text: str) -> float | None:
    """Return the time of the first line with a time stamp, in seconds since boot."""
    for line in text.splitlines():
        match = _STAMP.match(line)
        if match is not None:
            return _seconds(match)
    return None


def _seconds(stamp: re.Match[str]) -> float:
    return float(stamp[1] or stamp[2])


def _later(text: str, monotonic_s: float) -> list[str]:
    """Return the lines since a point in time: the important ones, and the last `_MOST_LINES`."""
    lines: list[str] = []
    is_later = False
    for line in text.splitlines():
        match = _STAMP.match(line)
        if match is not None:
            is_later = _seconds(match) >= monotonic_s
        if is_later:
            lines.append(line)
    early = KernelMessages(tuple(lines[:-_MOST_LINES]))
    noted = {*early.of_note, *early.xids, *early.host_faults}
    kept = [line for line in early.lines if line in noted]
    return kept[:_MOST_LINES] + lines[-_MOST_LINES:]
