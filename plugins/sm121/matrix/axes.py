"""Axes as data: an engine's features that are chosen at its start (``fixtures/matrix``).

An axis has values. A value lists the arguments for each engine and version, and the evidence that
the log must then contain. `Incompatible` lists values that cannot be combined. A value for which an
engine has no setting is not applicable to that engine, with the reason.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sm121.core import data_file, engine_settings, errors, level_settings
from sm121.core.data_file import DataTable, Pattern, without_retired
from sm121.core.versions import Versions
from sm121.evidence.kernel_path import PATH_FIELDS, KernelPath

#: The value of each axis.
Cell = Mapping[str, str]
#: The values of some axes, as (axis, value) pairs in the order of the axes.
Choice = tuple[tuple[str, str], ...]

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
_Fraction = Annotated[float, Field(ge=0, lt=1)]


class ExpectedEvidence(DataTable):
    """The evidence that a value is in force."""

    #: For each field of the kernel path, a pattern for the whole observed value, ignoring case.
    path: dict[str, Pattern] = Field(default_factory=dict)
    #: Patterns that must match a line of the log.
    must_see: tuple[Pattern, ...] = ()
    #: Patterns that must match no line of the log.
    must_not_see: tuple[Pattern, ...] = ()

    @model_validator(mode="after")
    def _known(self) -> "ExpectedEvidence":
        for name in self.path:
            if name not in PATH_FIELDS:
                fields = ", ".join(sorted(PATH_FIELDS))
                raise ValueError(f"path: expected one of {fields}; got {name!r}")
        return self

    @property
    def proves(self) -> bool:
        """Whether the log must contain something; the absence of a line proves nothing."""
        return bool(self.path or self.must_see)

    def unmet(self, where: str, path: KernelPath, log: str | None) -> list[str]:
        """Return one line per expectation that the path and the log do not meet.

        Args:
            where: The value as ``axis=value``, for the lines.
            path: The kernel path of the server.
            log: The text of the log. None: the server has no log, and only the path is compared.
        """
        lines = []
        for name, pattern in self.path.items():
            observed = getattr(path, name)
            if not re.fullmatch(pattern, str(observed), re.I):
                line = path.evidence.get(name, "no line of the log shows it")
                lines.append(f"{where}: expected {name} {pattern}, got {observed} ({line})")
        if log is None:
            return lines
        for pattern in self.must_see:
            if not re.search(pattern, log):
                lines.append(f"{where}: expected a line {pattern!r}, got none")
        for pattern in self.must_not_see:
            match = re.search(f".*{pattern}.*", log)
            if match is not None:
                lines.append(f"{where}: expected no line {pattern!r}, got {match[0].strip()[:200]}")
        return lines


class Setting(engine_settings.ReleaseSetting):
    """The arguments and variables of one engine for a value; empty if it is the default."""

    engine: str
    #: A pattern for a flag that /proc/cpuinfo must contain, such as ``avx512f|amx_tile``.
    cpu: Pattern | None = None
    #: Evidence in this engine's log, in addition to the value's own ``expected``.
    expected: ExpectedEvidence = ExpectedEvidence()


class AxisValue(DataTable):
    """One value of an axis."""

    settings: tuple[Setting, ...] = ()
    #: The reason why engines without a matching setting lack the value, and what to do instead.
    not_applicable: str | None = None
    expected: ExpectedEvidence = ExpectedEvidence()
    #: The reason if no evidence shows the value, so that the engine may silently fall back.
    unproven: Annotated[str, Field(min_length=3)] | None = None
    #: Fallbacks in the log (ids of ``fixtures/signatures``) that are normal with the value.
    fallbacks: tuple[str, ...] = ()
    #: Bounds on how answers with the value differ. If None, the bounds of the baseline's dtype
    #: apply.
    bound: level_settings.GoldenBound | None = None
    #: Whether the answers with the value are also compared with the oracle, which rounds as the
    #: server does.
    oracle: bool = False
    #: How much slower than the baseline the value may be. If None, the profile's threshold applies.
    may_be_slower: _Fraction | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_costs(cls, data: Any) -> Any:
        return without_retired(data, "boot_s")

    @model_validator(mode="after")
    def _given(self) -> "AxisValue":
        if not self.settings and self.not_applicable is None:
            raise ValueError("expected settings, or not_applicable with the reason")
        return self


class Axis(DataTable):
    """A feature that is chosen at the engine's start."""

    title: str
    #: The name of the value in the baseline cell, with which all cells are compared.
    baseline: str
    values: dict[_Name, AxisValue] = Field(min_length=2)

    @model_validator(mode="after")
    def _has_baseline(self) -> "Axis":
        if self.baseline not in self.values:
            values = ", ".join(self.values)
            raise ValueError(f"baseline: expected one of {values}; got {self.baseline!r}")
        return self

    @model_validator(mode="after")
    def _is_proven(self) -> "Axis":
        """Require evidence for each value but the baseline, or the reason why there is none."""
        for name, value in self.values.items():
            if name == self.baseline or value.unproven is not None or value.expected.proves:
                continue
            for setting in value.settings:
                if not setting.expected.proves:
                    raise ValueError(
                        f"values.{name}: {setting.engine}: expected evidence (path or must_see of "
                        "expected), or unproven with the reason why nothing shows it"
                    )
        return self


class Incompatible(DataTable):
    """Values that are known not to work together."""

    #: For each axis, one value or several alternatives.
    when: dict[str, str | tuple[str, ...]] = Field(min_length=1)
    #: The engine to which the rule applies; None for all engines.
    engine: str | None = None
    #: The releases, as a specifier of PEP 440; empty: all releases.
    versions: Versions = ""
    reason: str = Field(min_length=3)
    source: str = Field(min_length=3)

    def covers(self, cell: Cell) -> bool:
        """Check whether a cell has these values.

        Args:
            cell: The value of each axis. An axis that is absent has none of the values.
        """
        return all(cell.get(axis) in _listed(values) for axis, values in self.when.items())

    @property
    def values(self) -> str:
        """The values as text: ``graphs=eager|piecewise + moe=cutlass``."""
        return " + ".join(f"{axis}={'|'.join(_listed(v))}" for axis, v in self.when.items())

    def __str__(self) -> str:
        return f"{self.values}: {self.reason}"


class Named(DataTable):
    """A cell that is in every plan."""

    #: The value of each listed axis. Other axes have their baseline's value.
    values: dict[str, str]
    source: str = Field(min_length=3)


class AxesFile(DataTable):
    """A file of ``fixtures/matrix``."""

    schema_version: Literal[1]
    name: _Name
    description: str
    axes: dict[_Name, Axis] = Field(min_length=1)
    incompatible: tuple[Incompatible, ...] = ()
    named: dict[_Name, Named] = Field(default_factory=dict)
    #: Features in the order in which they were merged: each is tested with each earlier one.
    features: tuple[dict[str, str], ...] = ()
    #: Axes that stay at their baseline, with the reasons (a profile's ``matrix.left_out``).
    left_out: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> "AxesFile":
        for name, named in self.named.items():
            self._require_known(f"named.{name}", named.values)
        for number, feature in enumerate(self.features):
            self._require_known(f"features.{number}", feature)
        for number, rule in enumerate(self.incompatible):
            self._require_known(f"incompatible.{number}", rule.when)
        self._require_known("left_out", dict.fromkeys(self.left_out, ()))
        baseline = {name: axis.baseline for name, axis in self.axes.items()}
        for rule in self.incompatible:
            if rule.engine is None and rule.covers(baseline):
                raise ValueError(f"incompatible: the baseline itself is ruled out by {rule}")
        return self

    def _require_known(self, key: str, values: Mapping[str, str | tuple[str, ...]]) -> None:
        """Raise ValueError if a key names an axis or a value that does not exist."""
        for axis, listed in values.items():
            if axis not in self.axes:
                names = ", ".join(self.axes)
                raise ValueError(f"{key}: expected an axis ({names}); got {axis!r}")
            names = ", ".join(self.axes[axis].values)
            for value in _listed(listed):
                if value not in self.axes[axis].values:
                    raise ValueError(f"{key}: {axis}: expected one of {names}; got {value!r}")


def _listed(values: str | tuple[str, ...]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else values


def load(name_or_path: str) -> AxesFile:
    """Read a file of axes.

    Args:
        name_or_path: The name of a shipped file, or a path.

    Raises:
        UsageError: There is no such file, or it is invalid.
    """
    return data_file.chosen(name_or_path, "matrix", AxesFile, "matrix axes", "matrix")


def leave_out(file: AxesFile, reasons: Mapping[str, str]) -> AxesFile:
    """Return a copy of a file in which some axes stay at their baseline.

    Args:
        file: The file.
        reasons: The names of these axes, with the reasons.

    Raises:
        UsageError: A name is no axis of the file.
    """
    unknown = sorted(reasons.keys() - file.axes.keys())
    if unknown:
        names = ", ".join(file.axes)
        raise errors.UsageError(
            f"matrix.left_out: expected axes of {file.name} ({names}), got {', '.join(unknown)}"
        )
    return file.model_copy(update={"left_out": dict(reasons)})


def label(choice: Choice) -> str:
    """Return values as text: ``graphs=eager + moe=cutlass``; ``baseline`` if there are none.

    Args:
        choice: The values, as (axis, value) pairs.
    """
    return " + ".join(f"{axis}={value}" for axis, value in choice) or "baseline"
