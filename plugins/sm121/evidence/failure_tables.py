"""The known failures of a server, as data (``fixtures/signatures/failures.toml``)."""

import re
from functools import cache
from typing import Literal

from pydantic import Field, model_validator

from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries, Regex
from sm121.evidence import signatures

Kind = Literal[
    "oom", "illegal_memory_access", "illegal_instruction", "unsupported_arch", "no_kernel",
    "kernel_launch", "device_assert", "jit_build", "xid", "ecc", "nan", "import_error",
    "checkpoint", "vocabulary", "disk", "hang", "nccl", "garbage_output", "engine_dead", "port",
    "config", "busy_gpu", "unknown",
]  # fmt: skip


class FailureSignature(signatures.LinePattern):
    """A line that shows why a server is dead."""

    kind: Kind
    rank: int = Field(ge=1, le=99)
    """Lower is more specific."""
    levels: Literal["error", "any"] = "error"
    never_green: bool = False
    """A server that prints this line has failed, at any level, even one that goes on to serve."""
    weak: bool = False
    """True when the line counts only if no line after it shows that the engine goes on."""
    at_start_only: bool = False
    """True when the same line, once the server serves, is about a single request."""
    summary: str | None = None
    """Template of the summary: groups of `regex`, and ``{line}``. The line itself without one."""
    detail: Regex | None = None
    """Lines right behind this one that match are added to the summary."""
    owner: str
    remedy: str | None = None

    @model_validator(mode="after")
    def _check_summary(self) -> "FailureSignature":
        if self.summary is None:
            return self
        groups = dict.fromkeys(self.regex.groupindex, "") | {"line": ""}
        try:
            self.summary.format_map(groups)
        except (KeyError, ValueError, IndexError) as error:
            raise ValueError(f"summary may name {', '.join(sorted(groups))}; {error!r}") from error
        return self


class Markers(DataTable):
    """Lines and names that show the state of a server."""

    ready: tuple[Regex, ...] = Field(min_length=1)
    """It serves."""
    stopped: tuple[Regex, ...] = Field(min_length=1)
    """It received the request to stop."""
    fatal: tuple[Regex, ...] = Field(min_length=1)
    """An exception ends the process that prints it. A killed process prints no such line."""
    error: tuple[Regex, ...] = ()
    """An error, in a line without a level."""
    quiet: tuple[Regex, ...] = Field(min_length=1)
    """No error, where only the message has a level."""
    of_gpu: tuple[str, ...] = ()
    """Ids of the failures of the GPU that the kernel reports."""
    of_host: tuple[Regex, ...] = ()
    """Messages of the kernel about the host after which no result is sure."""
    engine_process: tuple[Regex, ...] = Field(min_length=1)
    """Names of processes that run the model or schedule requests: no exception there is healthy."""
    engine_frame: tuple[Regex, ...] = Field(min_length=1)
    """Frames of stacks of those processes, where the line does not name its process."""


class AcceptedError(DataTable):
    """An error that a healthy server logs, such as the refusal of a request of the suite."""

    id: str
    regex: Regex
    """On the message, or on the exception under its traceback."""
    traceback: bool = False
    """Whether the traceback right under the message belongs to it, whatever its exception."""
    engine: str
    """``any`` for all engines."""
    reason: str = Field(min_length=3)
    source: str = Field(min_length=3)


class Ending(DataTable):
    """A cause that no line of the log states, and its words."""

    id: str
    kind: str
    summary: str
    """Template. The caller that finds the cause has the words for its braces."""
    owner: str
    remedy: str | None = None


class FailureSet(DataTable):
    """All known failures; the same for every engine."""

    markers: Markers
    failure: Entries[FailureSignature]
    ending: Entries[Ending]
    accepted: Entries[AcceptedError]


def load_failures() -> FailureSet:
    """Load the known failures.

    Raises:
        DataFileError: The file breaks the schema.
    """
    return data_file.load("signatures/failures.toml", FailureSet)


@cache
def any_of(patterns: tuple[re.Pattern[str], ...]) -> re.Pattern[str]:
    """Return a pattern that matches where one of several does.

    Args:
        patterns: The patterns.
    """
    return re.compile("|".join(f"(?:{pattern.pattern})" for pattern in patterns))
