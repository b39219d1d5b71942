"""Log signatures: patterns for lines of a server's log, and the values that the lines prove.

``fixtures/signatures`` has one TOML file for each engine. The files are validated when they are
loaded, so that a mistake in a file is an error.
"""

import re
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import Field, model_validator

from sm121.core import data_file
from sm121.core.data_file import DataFileError, DataTable, Entries, Regex
from sm121.evidence.log_message import LogLine, clean

#: The file in this folder that does not belong to one engine (`sm121.evidence.failure_tables`).
_FAILURES = "failures.toml"

SignatureField = Literal[
    "attention", "moe", "cuda_graphs", "kv_layout", "speculative", "native_fp4", "kv_cache_dtype",
    "dtype", "load_format", "quantization", "prefix_caching", "block_size", "context",
    "requantised", "moe_variant", "moe_tiles", "weights", "unknown_env", "fallback",
    "silent_fallback", "version", "build", "asked", "model", "served_model", "drafter",
    "draft_tokens", "device",
    "progress", "fact", "rank", "world_size", "group", "graph_sizes", "channels", "network",
    "rdma_devices", "rerouted", "start", "generation_rate", "accepted_length",
    "compiled", "attention_decode",
]  # fmt: skip
"""The subject of a signature.

A ``fact`` is a condition of other signatures (`Signature.needs`). ``asked`` stands for the server's
arguments. ``generation_rate`` and ``accepted_length`` describe the requests of the last seconds.
``compiled`` is a kernel that was compiled while a request waited. A rank prints its number
(``rank``), the number of ranks (``world_size``), the library of their process group (``group``) and
NCCL's ``channels``.
"""


class LinePattern(DataTable):
    """A pattern for one clean line: the base of path signatures and crash causes."""

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    hint: tuple[str, ...] = Field(min_length=1)
    """Plain texts, of which at least one must be in the line. This check avoids applying the regex
    to each line."""
    regex: Regex
    unless: Regex | None = None
    """Lines that also match this pattern prove nothing."""
    file: Regex | None = None
    """A pattern for the name of the source file. Lines that name another file do not match."""
    file_required: bool = False
    """If true, lines that contain no file name do not match `file` either."""
    source: str = Field(min_length=3)
    """The origin of the pattern: the engine's source file and version, and whether a log or the
    source code was read."""

    @model_validator(mode="after")
    def _file_is_named(self) -> "LinePattern":
        if self.file_required and self.file is None:
            raise ValueError("file_required needs file")
        return self

    def search(self, line: LogLine) -> re.Match[str] | None:
        """Search a line for this pattern.

        Args:
            line: A clean line.

        Returns:
            The match of `regex`, or None.
        """
        if not any(hint in line.text for hint in self.hint):
            return None
        if not self._may_come_from(line.file):
            return None
        match = self.regex.search(line.text)
        if match is None or self.excludes(line):
            return None
        return match

    def excludes(self, line: LogLine) -> bool:
        """Return whether `unless` excludes a line.

        Args:
            line: A clean line.
        """
        return self.unless is not None and self.unless.search(line.text) is not None

    def _may_come_from(self, file: str | None) -> bool:
        """Return whether the source file in a line (None if the line has none) is accepted."""
        if self.file is None:
            return True
        if file is None:
            return not self.file_required
        return self.file.fullmatch(file) is not None


class Signature(LinePattern):
    """A line that proves a value of the kernel path, or shows the progress of a start."""

    field: SignatureField
    value: str | bool | None = None
    """The value, if it is the same for all lines. If None, the value is the group ``value`` of
    `regex`."""
    template: str | None = None
    """A template for the value, with several groups of `regex` as ``\\g<name>``."""
    mapping: dict[str, str | bool] = Field(default_factory=dict)
    """The value for each captured text. A captured text that is not in the mapping is itself the
    value."""
    mapping_only: bool = False
    """If true, a captured text that is not in `mapping` proves nothing."""
    transform: Literal["enum"] | None = None
    """``enum`` converts the captured text to the form of vLLM's enumerations: upper case, with
    underscores in place of blanks and hyphens."""
    strength: int = Field(default=5, ge=1, le=9)
    """How strong the proof is. If lines prove several values, the strongest one counts. 1 is an
    inference, 5 a plain statement."""
    needs: tuple[str, ...] = ()
    """The ids of facts that the log must also state, so that the line counts."""
    drafter: bool = False
    """Whether the line is about the target model even after the draft model began to load."""
    remedy: str | None = None
    """The options for a start without this fallback, if they are known."""
    opens: bool = False
    """Whether the line is the first one of each run, so that all lines before it belong to another
    run."""
    since: str | None = None
    until: str | None = None
    """The versions between which the engine prints this line. They are only informative, because
    the version number of a fork may mean anything."""

    @model_validator(mode="after")
    def _check_value(self) -> "Signature":
        captures = "value" in self.regex.groupindex
        self._check_source_of_value(captures)
        if self.mapping_only and not self.mapping:
            raise ValueError("mapping_only needs mapping")
        self._check_type_of_value(captures)
        return self

    def _check_source_of_value(self, captures: bool) -> None:
        """Require exactly one source of the value.

        `captures` means that `regex` has the group ``value``.
        """
        if self.field == "progress":
            if not isinstance(self.value, str):
                raise ValueError("a progress entry needs value, the name of the phase")
        elif self.field in ("fallback", "silent_fallback"):
            pass  # the value is the id of the signature
        elif self.template is not None:
            if captures or self.value is not None:
                raise ValueError("expected template, or value or the group of that name, not both")
        elif captures == (self.value is not None):
            raise ValueError("exactly one of value and a group (?P<value>...) in regex is needed")

    def _check_type_of_value(self, captures: bool) -> None:
        """Require true or false for boolean fields, and text for all other fields."""
        is_switch = self.field in ("cuda_graphs", "native_fp4", "prefix_caching")
        constants = list(self.mapping.values())
        if self.value is not None:
            constants = [self.value]
        if constants and is_switch != all(isinstance(constant, bool) for constant in constants):
            raise ValueError(f"{self.field} takes {'true or false' if is_switch else 'text'}")
        if is_switch and captures and not self.mapping_only:
            raise ValueError(f"a captured {self.field} needs mapping and mapping_only")

    def read(self, match: re.Match[str]) -> str | bool | None:
        """Return the value that a matching line states.

        Args:
            match: The result of `search`.

        Returns:
            The value; None if `mapping_only` is set and the text is not in the mapping.
        """
        if self.value is not None:
            return self.value
        if self.field in ("fallback", "silent_fallback"):
            return self.id
        if self.template is not None:
            return match.expand(self.template)
        captured = match["value"].strip()
        if captured in self.mapping:
            return self.mapping[captured]
        if self.mapping_only:
            return None
        if self.transform == "enum":
            return re.sub(r"[\s-]+", "_", captured).upper()
        return captured


class MetricSignature(DataTable):
    """A metric that proves a value of the kernel path."""

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    field: Literal["kv_cache_dtype", "prefix_caching", "block_size", "kv_layout", "speculative"]
    metric: str
    label: str | None = None
    """The label of the metric that contains the value."""
    nothing: tuple[str, ...] = ()
    """Values of the label that prove nothing, such as ``auto``."""
    mapping: dict[str, str | bool] = Field(default_factory=dict)
    absent: str | None = None
    """The value if the metric is missing although the counter `served` is above zero."""
    served: str | None = None
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _has_one_source(self) -> "MetricSignature":
        if (self.label is None) == (self.absent is None):
            raise ValueError("expected either label or absent")
        if (self.absent is None) != (self.served is None):
            raise ValueError("expected both absent and served, got one of them")
        return self


class SignatureSet(DataTable):
    """The signatures of one engine's log."""

    engine: str
    detect: tuple[str, ...] = ()
    """Texts that only this engine's log contains. A log belongs to the engine with the most
    matches."""
    harmless_env: tuple[Regex, ...] = ()
    """Patterns for unknown environment variables that are set by images and Kubernetes, not by
    users."""
    signature: Entries[Signature]
    metric: tuple[MetricSignature, ...] = ()

    @model_validator(mode="after")
    def _check_references(self) -> "SignatureSet":
        facts = {entry.id for entry in self.signature if entry.field == "fact"}
        for entry in self.signature:
            missing = set(entry.needs) - facts
            if missing:
                names = ", ".join(sorted(missing))
                raise ValueError(
                    f"{entry.id} needs {names}, but no signature of field fact has that id"
                )
        return self

    def of(self, *fields: SignatureField) -> tuple[Signature, ...]:
        """Return the signatures for some fields, in the order of the file.

        Args:
            fields: The fields.
        """
        return tuple(entry for entry in self.signature if entry.field in fields)

    def is_harmless_env(self, name: str) -> bool:
        """Return whether images or Kubernetes set this unknown environment variable.

        Args:
            name: The name of the variable.
        """
        return any(pattern.fullmatch(name) for pattern in self.harmless_env)


@cache
def known_engines() -> tuple[str, ...]:
    """Return the engines whose logs can be read."""
    folder = files("sm121.fixtures") / "signatures"
    names = {item.name for item in folder.iterdir() if item.name.endswith(".toml")}
    engines = {name.removesuffix(".toml") for name in names - {_FAILURES}}
    return tuple(sorted(engines))


def load_signatures(engine: str) -> SignatureSet:
    """Load the signatures of an engine.

    Args:
        engine: One of `known_engines`.

    Raises:
        DataFileError: The engine has no signatures, or the file breaks the schema.
    """
    if engine not in known_engines():
        raise DataFileError(
            f"fixtures/signatures/{engine}.toml: no such file; "
            f"known engines: {', '.join(known_engines())}"
        )
    return data_file.load(f"signatures/{engine}.toml", SignatureSet)


def startup_progress(line: str, engine: str = "vllm") -> str | None:
    """Return the phase of the start that a log line reports.

    Args:
        line: A line of the log.
        engine: The engine. For an engine without signatures, vLLM's are used.

    Returns:
        The phase, such as ``loading weights (33 %)``, or None.
    """
    message = clean(line)
    known = engine if engine in known_engines() else "vllm"
    for phase in load_signatures(known).of("progress"):
        match = phase.search(message)
        if match is None:
            continue
        groups = match.groupdict()
        if groups.get("percent"):
            return f"{phase.value} ({groups['percent']} %)"
        if groups.get("done") and groups.get("total"):
            return f"{phase.value} ({groups['done']} of {groups['total']})"
        return str(phase.value)
    return None
