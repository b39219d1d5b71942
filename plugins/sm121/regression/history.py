"""Stored runs: pytest-benchmark's files, as far as they hold measurements of this suite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm121.core.errors import UsageError
from sm121.measure import machine

#: What two runs must share to be compared, and how it is called.
_CONTEXT = {
    "profile": "the profile",
    "configuration": "the configuration",
    "model": "the model",
    "plan": "the measuring plan",
    "path": "the kernel path",
    "definition": "the definition of its metrics",
}


@dataclass(frozen=True)
class StoredMetric:
    """One metric of one run."""

    name: str
    unit: str
    higher_is_better: bool
    quantile: float | None
    samples: tuple[float, ...]
    value: float
    verdict: str
    #: Tokens of a step while it was measured, where drafts were accepted; None without.
    accepted_length: float | None = None
    #: Of a decode rate: its share of what the memory allows, and what a token reads.
    roofline: float | None = None
    bytes_per_token: float | None = None

    @property
    def of_bound(self) -> str:
        """Its share of what the memory allows, behind its value; empty where that is not known."""
        if not self.roofline or not self.bytes_per_token:
            return ""
        return f" ({self.roofline:.0%} of the bound of {self.bytes_per_token / 1e9:.3g} GB a token)"

    @classmethod
    def of(cls, extra_info: Mapping[str, Any]) -> StoredMetric:
        """From what a benchmark says of itself.

        Raises:
            KeyError, TypeError: it says too little.
        """
        return cls(
            name=str(extra_info["metric"]),
            unit=str(extra_info["unit"]),
            higher_is_better=bool(extra_info["higher_is_better"]),
            quantile=extra_info.get("quantile"),
            samples=tuple(float(sample) for sample in extra_info["samples"]),
            value=float(extra_info["value"]),
            verdict=str(extra_info.get("verdict", "unknown")),
            accepted_length=(extra_info.get("extra") or {}).get("mean_accepted_length"),
            roofline=extra_info.get("roofline"),
            bytes_per_token=extra_info.get("bytes_per_token"),
        )


@dataclass(frozen=True)
class StoredRun:
    """One run: when, where, of what, and its metrics."""

    name: str
    when: str
    context: Mapping[str, Any]
    metrics: Mapping[str, StoredMetric]
    #: The machine was not fit, before or after: such a run is nobody's baseline.
    degraded: bool = False
    #: Why nothing in it can be trusted, a phrase each: it was red, or holds what is no number.
    unfit: tuple[str, ...] = ()

    def unlike(self, context: Mapping[str, Any]) -> list[str]:
        """Why this run is no baseline for one of that context, a phrase each."""
        found = []
        if self.degraded:
            found.append("its box was DEGRADED")
        found += self.unfit
        apart = machine.differences(self.context.get("machine") or {}, context.get("machine") or {})
        if apart:
            found.append(f"another machine ({'; '.join(apart)})")
        for key, what in _CONTEXT.items():
            one, other = self.context.get(key), context.get(key)
            if one != other:
                found.append(f"{what} was {_short(one, other)}")
        return found


def folder(storage: str, root: Path) -> Path:
    """The folder of ``--benchmark-storage``.

    Raises:
        UsageError: it is none: a database cannot be read here.
    """
    scheme, separator, rest = storage.partition("://")
    if separator and scheme != "file":
        raise UsageError(
            f"--benchmark-storage {storage}: the regression level reads files; expected file://PATH"
        )
    return (root / (rest if separator else storage)).resolve()


def load(storage: Path, pattern: str = "*") -> list[StoredRun]:
    """The runs of a storage folder that hold measurements, oldest first.

    Args:
        pattern: ``0003`` for one run; a path to a file is that file.

    Raises:
        UsageError: a file that was asked for is none of pytest-benchmark's.
    """
    named = Path(pattern)
    found = storage.glob(f"*/{pattern.rstrip('*')}*.json")
    files = [named] if named.is_file() else sorted(found, key=lambda file: file.name)
    return [run for run in map(read, files) if run is not None]


def read(file: Path) -> StoredRun | None:
    """One file; None when it holds no measurement of this suite.

    Raises:
        UsageError: it is not a file of pytest-benchmark.
    """
    try:
        data = json.loads(file.read_text("utf-8"))
        benchmarks = [bench["extra_info"] for bench in data["benchmarks"]]
        when = str(data.get("datetime", ""))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file}: expected a file of pytest-benchmark ({error!r})") from error
    return of_benchmarks(file.name, when, benchmarks)


def of_benchmarks(
    name: str, when: str, benchmarks: Iterable[Mapping[str, Any]]
) -> StoredRun | None:
    """A run from the ``extra_info`` of its benchmarks."""
    metrics: dict[str, StoredMetric] = {}
    context: Mapping[str, Any] = {}
    degraded = False
    unfit: dict[str, None] = {}
    for extra in benchmarks:
        if "sm121" not in extra:
            continue  # a benchmark of something else
        if (ended := extra.get("run", "PASS")) != "PASS":
            unfit[f"the run was {ended}"] = None
        if extra.get("value") is None:
            unfit[f"its {extra.get('metric')} has no value"] = None
            continue
        metric = StoredMetric.of(extra)
        if metric.verdict != "PASS":
            unfit[f"its {metric.name} was {metric.verdict}"] = None
        if not all(0.0 < value < math.inf for value in (metric.value, *metric.samples)):
            unfit[f"its {metric.name} holds a 0, or what is no number"] = None
        metrics[metric.name] = metric
        context = {key: extra.get(key) for key in ("machine", *_CONTEXT)}
        degraded = degraded or (extra.get("box") or {}).get("state") == "DEGRADED"
    return StoredRun(name, when, context, metrics, degraded, tuple(unfit)) if metrics else None


def _short(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
        return ", ".join(f"{key} {one.get(key)!r}, now {other.get(key)!r}" for key in keys)
    return f"{one!r}, now {other!r}"
