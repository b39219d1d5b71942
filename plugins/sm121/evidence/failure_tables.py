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
    "config", "busy_gpu", "host", "unknown",
]  # fmt: skip


class FailureSignature(signatures.LinePattern):
    """A log line that shows why a server died."""

    kind: Kind
    rank: int = Field(ge=1, le=99)
    """How specific the line is; lower is more specific."""
    levels: Literal["error", "any"] = "error"
    never_green: bool = False
    """Whether a server that prints this line has failed even if it continues to serve."""
    weak: bool = False
    """Whether the line is ignored if a later line shows that the engine continues to run."""
    at_start_only: bool = False
    """Whether the line is ignored once the server is ready, because it then concerns only one
    request."""
    summary: str | None = None
    """A template for the summary, with groups of `regex` and ``{line}``. None: the line itself is
    the summary."""
    detail: Regex | None = None
    """Lines directly after this one that match this pattern are appended to the summary."""
    cut: tuple[str, ...] = ()
    """Texts that identify the failure in a line that a terminal has truncated. The truncated line
    ends within one of them or directly behind it. The part of the text before a ``|`` must be
    complete in the truncated line."""
    owner: str
    remedy: str | None = None

    @property
    def beginnings(self) -> list[str]:
        """The beginnings of messages that identify the failure (`cut`)."""
        beginnings: list[str] = []
        for text in self.cut:
            least, _, rest = text.partition("|")
            beginnings += [least + rest[:length] for length in range(len(rest) + 1)]
        return beginnings

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
    """Lines that show that the server is ready."""
    stopped: tuple[Regex, ...] = Field(min_length=1)
    """Lines that show that a stop of the server was requested."""
    fatal: tuple[Regex, ...] = Field(min_length=1)
    """Lines that a process prints when an exception ends it. A killed process prints no such
    line."""
    error: tuple[Regex, ...] = ()
    """Lines without a level that report an error."""
    quiet: tuple[Regex, ...] = Field(min_length=1)
    """Lines whose message contains a level below error, for example "warning"."""
    of_gpu: tuple[str, ...] = ()
    """The ids of the GPU failures that the Linux kernel reports."""
    of_host: tuple[Regex, ...] = ()
    """Messages of the Linux kernel about faults of the host that make all results unreliable."""
    engine_process: tuple[Regex, ...] = Field(min_length=1)
    """Names of processes that run the model or schedule requests. Their exceptions are faults."""
    engine_frame: tuple[Regex, ...] = Field(min_length=1)
    """Stack frames of those processes, for lines that do not name their process."""


class AcceptedError(DataTable):
    """An error that a healthy server logs, such as the refusal of a request of the suite."""

    id: str
    regex: Regex
    """A pattern that is searched in messages, and in the exception at the end of a traceback."""
    traceback: bool = False
    """Whether a traceback directly after the message is accepted, too, with any exception."""
    engine: str
    """The name of the engine, or ``any``."""
    reason: str = Field(min_length=3)
    source: str = Field(min_length=3)


class Ending(DataTable):
    """The texts for a cause that no line of the log states."""

    id: str
    kind: str
    summary: str
    """A template, whose placeholders are filled in by the caller of `failure.ended`."""
    owner: str
    remedy: str | None = None


class FailureSet(DataTable):
    """All known failures. They are the same for every engine."""

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
    """Return a pattern that matches if any of several patterns does.

    Args:
        patterns: The patterns.
    """
    return re.compile("|".join(f"(?:{pattern.pattern})" for pattern in patterns))
