"""What the kernel said: Xid, NVRM, the OOM killer."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from sm121.core.data_file import named
from sm121.evidence.failure import any_of, load_failures

#: Both print seconds since boot, of the clock that ``time.monotonic`` uses.
_READERS = (
    ("dmesg", ("dmesg",)),
    ("journalctl", ("journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager")),
)
_STAMP = re.compile(r"^\S*?\s*\[\s*(\d+\.\d+)\]|^\[\s*(\d+\.\d+)\]")
_OF_NOTE = re.compile(
    r"NVRM|Xid|ut of memory|oom[-_ ]kill|Killed process|nvidia|segfault|hung task"
)
_NO_MEMORY = re.compile(r"NVRM: .*\b(NV_ERR_NO_MEMORY|[Oo]ut of memory)\b")
_KILLED = re.compile(r"Killed process (\d+)")
_MOST_LINES = 4000


@dataclass(frozen=True)
class KernelMessages:
    """Messages since some moment. ``unavailable`` says why there are none, or not all, to read.
    `starts`: from when to when servers were started that then served (``time.monotonic``)."""

    lines: tuple[str, ...] = ()
    unavailable: str | None = None
    starts: Sequence[tuple[float, float]] = ()

    @property
    def of_note(self) -> list[str]:
        """Those that may explain the death of a process."""
        return [line for line in self.lines if _OF_NOTE.search(line)]

    @property
    def xids(self) -> list[str]:
        """Those in which NVIDIA's driver reports an error of the GPU."""
        failures = load_failures()
        rows = [named(failures.failure, name, "failure") for name in failures.markers.of_gpu]
        return list(filter(any_of(tuple(row.regex for row in rows)).search, self.lines))

    @property
    def host_faults(self) -> list[str]:
        """Those that report an error of the host that nothing corrected, or lack of memory."""
        return list(filter(any_of(load_failures().markers.of_host).search, self.lines))

    @property
    def no_memory(self) -> list[str]:
        """Those in which NVIDIA's driver says that it found no memory; a process may live on."""
        at_start = {*self.no_memory_at_start}
        return [line for line in self.lines if line not in at_start and _NO_MEMORY.search(line)]

    @property
    def no_memory_at_start(self) -> list[str]:
        """The same of `starts`: a GB10 logs it at starts that are well, too (vllm#56824)."""
        return [
            line
            for line in filter(_NO_MEMORY.search, self.lines)
            if (match := _STAMP.match(line)) is not None
            and any(begin <= _seconds(match) <= end for begin, end in self.starts)
        ]

    def killed(self, pids: set[int]) -> list[str]:
        """Lines in which the OOM killer names one of the processes."""
        return [line for line in self.lines if (m := _KILLED.search(line)) and int(m[1]) in pids]


def since(monotonic_s: float, starts: Sequence[tuple[float, float]] = ()) -> KernelMessages:
    """The kernel's messages since a moment of ``time.monotonic``. `starts`: see the class."""
    reasons, messages = [], tuple[str, ...]()
    for name, command in _READERS:
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=20
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{name}: {error}")
            continue
        if answer.returncode != 0:
            cause = f"{answer.stderr.strip().splitlines()[-1:] or answer.returncode}"
        elif answer.stdout.strip() and not any(map(_STAMP.match, answer.stdout.splitlines())):
            cause = "its lines have no times"
        else:
            messages = messages or tuple(_later(answer.stdout, monotonic_s))
            stamps = filter(None, map(_STAMP.match, answer.stdout.splitlines()))
            if (first := next(stamps, None)) is None or _seconds(first) < monotonic_s:
                return KernelMessages(tuple(_later(answer.stdout, monotonic_s)), starts=starts)
            cause = "its first line is of later than the start: what was before it is lost"
        reasons.append(f"{name}: {cause}")
    return KernelMessages(messages, unavailable="; ".join(reasons), starts=starts)


def _seconds(stamp: re.Match[str]) -> float:
    return float(stamp[1] or stamp[2])


def _later(text: str, monotonic_s: float) -> list[str]:
    lines, later = [], False
    for line in text.splitlines():
        match = _STAMP.match(line)
        if match is not None:
            later = _seconds(match) >= monotonic_s
        if later:
            lines.append(line)
    early = KernelMessages(tuple(lines[:-_MOST_LINES]))
    noted = {*early.of_note, *early.xids, *early.host_faults}
    return [x for x in early.lines if x in noted][:_MOST_LINES] + lines[-_MOST_LINES:]
