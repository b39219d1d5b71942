"""Log signatures: what a line of a server's log proves, as data.

One TOML file for each engine in ``fixtures/signatures``. A wrong file is an error when it is
loaded, never a signature that silently does not match.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from sm121.core import data_file
from sm121.core.data_file import DataFileError
from sm121.evidence.log_lines import LogLine

SignatureField = Literal[
    "attention",
    "moe",
    "cuda_graphs",
    "kv_layout",
    "speculative",
    "native_fp4",
    "kv_cache_dtype",
    "dtype",
    "load_format",
    "quantization",
    "prefix_caching",
    "block_size",
    "unknown_env",
    "fallback",
    "silent_fallback",
    "version",
    "progress",
    "fact",
]
"""What a signature speaks of. A ``fact`` is no result of its own: other signatures lean on it."""


class LinePattern(BaseModel):
    """A pattern on one clean line; path signatures and crash causes are made of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    hint: tuple[str, ...] = Field(min_length=1)
    """Plain texts of which one must be in the line; they keep a long log from costing a regex a
    line."""
    regex: str
    unless: str | None = None
    """A line that matches this too proves nothing."""
    file: str | None = None
    """Pattern on the source file's name. A line that names another file is no match."""
    file_required: bool = False
    """With `file`: a line that names no file is no match either."""
    source: str = Field(min_length=3)
    """Where it is known from: the file of the engine, its version, and whether a log or the source
    was read."""

    _regex: re.Pattern[str] = PrivateAttr()
    _unless: re.Pattern[str] | None = PrivateAttr(default=None)
    _file: re.Pattern[str] | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _compile(self) -> LinePattern:
        self._regex = _compiled(self.regex)
        self._unless = None if self.unless is None else _compiled(self.unless)
        self._file = None if self.file is None else _compiled(self.file)
        if self.file_required and self.file is None:
            raise ValueError("file_required needs file")
        return self

    def search(self, line: LogLine) -> re.Match[str] | None:
        """The match of this pattern in a line, or None."""
        if not any(hint in line.text for hint in self.hint):
            return None
        if self._file is not None:
            if line.file is None:
                if self.file_required:
                    return None
            elif self._file.fullmatch(line.file) is None:
                return None
        match = self._regex.search(line.text)
        if match is None or (self._unless is not None and self._unless.search(line.text)):
            return None
        return match


class Signature(LinePattern):
    """A line that proves something about the kernel path, or tells how far a start is."""

    field: SignatureField
    value: str | bool | None = None
    """The value, when the line always means the same. Otherwise the group ``value`` of `regex`."""
    mapping: dict[str, str | bool] = Field(default_factory=dict)
    """From the captured text to the value; what is not in it is taken as it stands."""
    mapping_only: bool = False
    """With `mapping`: a captured text that is not in it proves nothing."""
    transform: Literal["enum"] | None = None
    """``enum``: upper case, blanks to underscores, as vLLM spells its enumerations."""
    strength: int = Field(default=5, ge=1, le=9)
    """Of two lines that disagree the stronger one counts; 1 is an inference, 5 a plain
    statement."""
    needs: tuple[str, ...] = ()
    """Facts (ids) that the log must state too."""
    drafter: bool = False
    """True when the line still means the target model after the drafter began to load."""
    opens: bool = False
    """True for the line that every server prints first: what came before is another run's."""
    since: str | None = None
    until: str | None = None
    """Versions between which the wording is known. For readers; a fork's version says nothing."""

    @model_validator(mode="after")
    def _check_value(self) -> Signature:
        captures = "value" in self._regex.groupindex
        if self.field == "progress":
            if not isinstance(self.value, str):
                raise ValueError("a progress entry needs value, the name of the phase")
        elif self.field in ("fallback", "silent_fallback"):
            pass  # the id is the value
        elif captures == (self.value is not None):
            raise ValueError("exactly one of value and a group (?P<value>...) in regex is needed")
        if self.mapping_only and not self.mapping:
            raise ValueError("mapping_only needs mapping")
        wants_bool = self.field in ("cuda_graphs", "native_fp4", "prefix_caching")
        constants = [self.value] if self.value is not None else list(self.mapping.values())
        if wants_bool != all(isinstance(constant, bool) for constant in constants) and constants:
            raise ValueError(f"{self.field} takes {'true or false' if wants_bool else 'text'}")
        if wants_bool and captures and not self.mapping_only:
            raise ValueError(f"a captured {self.field} needs mapping and mapping_only")
        return self

    def read(self, match: re.Match[str]) -> str | bool | None:
        """The value that a matching line states; None when the mapping does not have it."""
        if self.value is not None:
            return self.value
        if self.field in ("fallback", "silent_fallback"):
            return self.id
        captured = match["value"].strip()
        if captured in self.mapping:
            return self.mapping[captured]
        if self.mapping_only:
            return None
        return re.sub(r"[\s-]+", "_", captured).upper() if self.transform == "enum" else captured


class MetricSignature(BaseModel):
    """A metric that proves something about the kernel path."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    def _one_way(self) -> MetricSignature:
        if (self.label is None) == (self.absent is None):
            raise ValueError("expected either label or absent")
        if (self.absent is None) != (self.served is None):
            raise ValueError("absent and served go together")
        return self


class SignatureSet(BaseModel):
    """What is known of one engine's log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    detect: tuple[str, ...] = ()
    """Texts that only this engine's log has; the more of them, the surer it is."""
    harmless_env: tuple[str, ...] = ()
    """Patterns of unknown variables that official images and Kubernetes set: no mistake of the
    user."""
    signature: tuple[Signature, ...] = Field(min_length=1)
    metric: tuple[MetricSignature, ...] = ()

    @model_validator(mode="after")
    def _check_references(self) -> SignatureSet:
        ids = [entry.id for entry in self.signature]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(f"ids must be unique, seen twice: {', '.join(twice)}")
        facts = {entry.id for entry in self.signature if entry.field == "fact"}
        for entry in self.signature:
            if missing := set(entry.needs) - facts:
                raise ValueError(
                    f"{entry.id} needs {', '.join(sorted(missing))}, which is no fact here"
                )
        for pattern in self.harmless_env:
            _compiled(pattern)
        return self

    def of(self, *fields: SignatureField) -> tuple[Signature, ...]:
        """The entries that speak of any of `fields`, in the order of the file."""
        return tuple(entry for entry in self.signature if entry.field in fields)

    def is_harmless_env(self, name: str) -> bool:
        """True for an unknown variable that images or Kubernetes set by themselves."""
        return any(re.fullmatch(pattern, name) for pattern in self.harmless_env)


def _compiled(regex: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error as error:
        raise ValueError(f"a regular expression is expected, got {regex!r}: {error}") from error


def known_engines() -> tuple[str, ...]:
    """The engines whose logs can be read."""
    folder = files("sm121.fixtures") / "signatures"
    names = (item.name for item in folder.iterdir() if item.name.endswith(".toml"))
    return tuple(sorted({name.removesuffix(".toml") for name in names} - {"failures"}))


def read_signature_text(name: str) -> str:
    """The text of ``fixtures/signatures/<name>``. Raises DataFileError naming what there is."""
    entry = files("sm121.fixtures") / "signatures" / name
    if not entry.is_file():
        raise DataFileError(
            f"fixtures/signatures/{name}: no such file; known engines: {', '.join(known_engines())}"
        )
    return entry.read_text(encoding="utf-8")


def parse_signatures(name: str, text: str) -> SignatureSet:
    """A signature file's text, validated. Raises DataFileError naming file and entry."""
    return data_file.parse(text, SignatureSet, name)


@cache
def load_signatures(engine: str) -> SignatureSet:
    """The signatures of an engine: ``vllm``, ``sglang``, ``llama-cpp``.

    Raises DataFileError when there is no such file or when it is wrong.
    """
    name = f"{engine}.toml"
    signatures = parse_signatures(name, read_signature_text(name))
    if signatures.engine != engine:
        raise DataFileError(f"{name}: engine must be {engine!r}, seen {signatures.engine!r}")
    return signatures
