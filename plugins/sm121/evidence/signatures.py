"""Log signatures: what a line of a server's log proves.

``fixtures/signatures`` has one TOML file for each engine. A file that breaks the schema is an error
when it is loaded, never a silent mismatch.
"""

import re
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import Field, model_validator

from sm121.core import data_file
from sm121.core.data_file import DataFileError, DataTable, Entries, Regex
from sm121.evidence.log_message import LogLine, clean

#: The file of this folder that has no engine's signatures (`sm121.evidence.failure_tables`).
_FAILURES = "failures.toml"

SignatureField = Literal[
    "attention", "moe", "cuda_graphs", "kv_layout", "speculative", "native_fp4", "kv_cache_dtype",
    "dtype", "load_format", "quantization", "prefix_caching", "block_size", "context",
    "requantised", "moe_variant", "moe_tiles", "weights", "unknown_env", "fallback",
    "silent_fallback", "version", "build", "asked", "model", "served_model",
    "progress", "fact", "rank", "world_size", "group", "graph_sizes", "channels", "network",
    "rdma_devices", "rerouted", "start", "generation_rate", "accepted_length",
    "compiled", "attention_decode",
]  # fmt: skip
"""The subject of a signature.

A ``fact`` is a premise of other signatures (`Signature.needs`). ``asked`` has the arguments of the
server. ``generation_rate`` and ``accepted_length`` are of the requests of the last seconds.
``compiled`` is a kernel that a request waited for. A rank prints its number (``rank``), the number
of ranks (``world_size``), the library of their process group (``group``) and NCCL's ``channels``.
"""


class LinePattern(DataTable):
    """A pattern on one clean line; path signatures and crash causes are made of it."""

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    hint: tuple[str, ...] = Field(min_length=1)
    """Plain texts of which one must be in the line: a regex a line would cost too much."""
    regex: Regex
    unless: Regex | None = None
    """A line that matches this too proves nothing."""
    file: Regex | None = None
    """Pattern on the source file's name. A line that names another file is no match."""
    file_required: bool = False
    """With `file`: a line that names no file is no match either."""
    source: str = Field(min_length=3)
    """The file of the engine, its version, and whether a log or the source was read."""

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
        if match is None or (self.unless is not None and self.unless.search(line.text)):
            return None
        return match

    def _may_come_from(self, file: str | None) -> bool:
        """Whether a source file prints this line. None: the line names no file."""
        if self.file is None:
            return True
        if file is None:
            return not self.file_required
        return self.file.fullmatch(file) is not None


class Signature(LinePattern):
    """A line that proves something about the kernel path, or tells how far a start is."""

    field: SignatureField
    value: str | bool | None = None
    """The value, when the line always means the same. Otherwise the group ``value`` of `regex`."""
    template: str | None = None
    """The value put together of several groups of `regex`, as ``\\g<name>``."""
    mapping: dict[str, str | bool] = Field(default_factory=dict)
    """From the captured text to the value; what is not in it is taken as it stands."""
    mapping_only: bool = False
    """With `mapping`: a captured text that is not in it proves nothing."""
    transform: Literal["enum"] | None = None
    """``enum``: upper case, blanks to underscores, as vLLM spells its enumerations."""
    strength: int = Field(default=5, ge=1, le=9)
    """The stronger of two values counts. 1 is an inference, 5 a plain statement."""
    needs: tuple[str, ...] = ()
    """Facts (ids) that the log must state too."""
    drafter: bool = False
    """True when the line still means the target model after the drafter began to load."""
    remedy: str | None = None
    """The options of a start without this fallback, if they are known."""
    opens: bool = False
    """True for the line that every server prints first: what came before is another run's."""
    since: str | None = None
    until: str | None = None
    """Versions between which the wording is known. For readers; a fork's version says nothing."""

    @model_validator(mode="after")
    def _check_value(self) -> "Signature":
        captures = "value" in self.regex.groupindex
        self._check_source_of_value(captures)
        if self.mapping_only and not self.mapping:
            raise ValueError("mapping_only needs mapping")
        self._check_type_of_value(captures)
        return self

    def _check_source_of_value(self, captures: bool) -> None:
        """Require exactly one source of the value. `captures`: `regex` has the group ``value``."""
        if self.field == "progress":
            if not isinstance(self.value, str):
                raise ValueError("a progress entry needs value, the name of the phase")
        elif self.field in ("fallback", "silent_fallback"):
            pass  # the id is the value
        elif self.template is not None:
            if captures or self.value is not None:
                raise ValueError("template stands instead of value and of the group of that name")
        elif captures == (self.value is not None):
            raise ValueError("exactly one of value and a group (?P<value>...) in regex is needed")

    def _check_type_of_value(self, captures: bool) -> None:
        """Require true or false for the fields that are switches, and text for all others."""
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
            match: What `search` returned.

        Returns:
            The value; None if `mapping_only` is set and the mapping does not have the text.
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
    """A metric that proves something about the kernel path."""

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    field: Literal["kv_cache_dtype", "prefix_caching", "block_size", "kv_layout", "speculative"]
    metric: str
    label: str | None = None
    """Label of the metric that has the value."""
    nothing: tuple[str, ...] = ()
    """Values of the label that say nothing, such as ``auto``."""
    mapping: dict[str, str | bool] = Field(default_factory=dict)
    absent: str | None = None
    """The value where the metric is not there though `served`, a counter, has counted."""
    served: str | None = None
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _has_one_source(self) -> "MetricSignature":
        if (self.label is None) == (self.absent is None):
            raise ValueError("expected either label or absent")
        if (self.absent is None) != (self.served is None):
            raise ValueError("absent and served go together")
        return self


class SignatureSet(DataTable):
    """The signatures of one engine's log."""

    engine: str
    detect: tuple[str, ...] = ()
    """Texts that only this engine's log has; the more of them, the surer it is."""
    harmless_env: tuple[Regex, ...] = ()
    """Unknown variables that images and Kubernetes set: no mistake of the user."""
    signature: Entries[Signature]
    metric: tuple[MetricSignature, ...] = ()

    @model_validator(mode="after")
    def _check_references(self) -> "SignatureSet":
        facts = {entry.id for entry in self.signature if entry.field == "fact"}
        for entry in self.signature:
            missing = set(entry.needs) - facts
            if missing:
                raise ValueError(
                    f"{entry.id} needs {', '.join(sorted(missing))}, which is no fact here"
                )
        return self

    def of(self, *fields: SignatureField) -> tuple[Signature, ...]:
        """Return the entries of some fields, in the order of the file.

        Args:
            fields: The fields.
        """
        return tuple(entry for entry in self.signature if entry.field in fields)

    def is_harmless_env(self, name: str) -> bool:
        """Return whether images or Kubernetes set an unknown variable by themselves.

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
    """Return the phase of a start that a line announces.

    Args:
        line: A line of the log.
        engine: The engine. An engine without signatures is read as vLLM.

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
