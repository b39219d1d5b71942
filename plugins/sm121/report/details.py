"""details.json: what report.html shows beside verdict.json, so that it can be made anew from files.

What a test requires, the whole text of a failure, the raw samples, the stored runs that this one
was held against. Nothing here decides anything; a report directory without the file has a report
with less in it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sm121.core.files import write_text
from sm121.core.verdict import Verdict
from sm121.regression import trend as regression
from sm121.regression.history import StoredMetric, StoredRun
from sm121.run.verdict_file import VerdictFile

NAME = "details.json"
#: A tail of all gaps between chunks can have very many; these many show its shape.
_MOST_SAMPLES = 20_000
_MOST_RUNS = 60
_MOST_TEXT = 20_000


class _Part(BaseModel):
    # A report of another version is read for what it has.
    model_config = ConfigDict(extra="ignore")


class FailureDetail(_Part):
    """What pytest showed of a test that did not hold."""

    id: str
    text: str = ""
    """The whole of it, at most 20,000 characters."""
    sections: dict[str, str] = Field(default_factory=dict)
    """Captured output, by its heading."""
    location: str | None = None
    """File and line, relative to the root."""
    reproduce: str | None = None
    """A command that runs this test alone, in the same way."""
    logs: list[str] | None = None
    """Logs of the servers that it used, in the report directory; null where that was not noted."""


class Samples(_Part):
    """The raw samples of a metric."""

    unit: str
    higher_is_better: bool = True
    quantile: float | None = None
    samples: list[float] = Field(default_factory=list)
    taken: int = 0
    """How many there were: of very many, evenly chosen ones are kept."""
    failures: int = 0
    """Requests that failed: infinite, and so not among the samples."""
    verdict: str = "PASS"
    reason: str = ""


class SeriesPoint(_Part):
    """A metric in one stored run."""

    run: str
    when: str = ""
    value: float


class Series(_Part):
    """A metric over the stored runs, this one last, and where its level changed."""

    unit: str
    higher_is_better: bool = True
    points: list[SeriesPoint] = Field(default_factory=list)
    levels: list[tuple[int, int, float]] = Field(default_factory=list)
    """First point, one past the last, and the median of these."""


class Details(_Part):
    """The whole of details.json."""

    command: str | None = None
    requirements: dict[str, str] = Field(default_factory=dict)
    """What each test requires, by its id: its own docstring."""
    failures: list[FailureDetail] = Field(default_factory=list)
    samples: dict[str, Samples] = Field(default_factory=dict)
    history: dict[str, Series] = Field(default_factory=dict)
    findings: list[str] = Field(default_factory=list)
    """What the regression level said, a line each."""


def samples_of(extra_info: Mapping[str, Any]) -> Samples:
    """From what a stored benchmark says of itself."""
    every = [float(sample) for sample in extra_info.get("samples") or []]
    step = max(1, math.ceil(len(every) / _MOST_SAMPLES))
    given = {key: value for key, value in extra_info.items() if value is not None}
    return Samples.model_validate({**given, "samples": every[::step], "taken": len(every)})


def measured(run: VerdictFile, known: Mapping[str, Samples]) -> dict[str, StoredMetric]:
    """What a run measured and has the samples of, as other runs are held against it. What counts
    neither way is left out."""
    return {
        name: StoredMetric(
            name=name,
            unit=metric.unit,
            higher_is_better=known[name].higher_is_better,
            quantile=known[name].quantile,
            samples=tuple(known[name].samples),
            value=metric.value,
            verdict=metric.verdict.value,
            accepted_length=metric.accepted_length,
            roofline=metric.roofline,
            bytes_per_token=metric.bytes_per_token,
        )
        for name, metric in run.metrics.items()
        if metric.value is not None
        and metric.verdict in (Verdict.PASS, Verdict.FAIL)
        and name in known
        and known[name].samples
    }


def series_of(
    current: Mapping[str, StoredMetric], history: Sequence[StoredRun], started: str
) -> dict[str, Series]:
    """Each metric of this run over the stored ones, oldest first, with the levels between its
    changes."""
    found = {}
    for name, metric in current.items():
        runs = [run for run in history if name in run.metrics][-_MOST_RUNS:]
        points = [
            SeriesPoint(run=run.name, when=run.when, value=run.metrics[name].value) for run in runs
        ]
        points.append(SeriesPoint(run="this run", when=started, value=metric.value))
        values = [point.value for point in points]
        levels = []
        if len(values) >= 2 and all(value > 0 for value in values):
            levels = [
                (start, end, statistics.median(values[start:end]))
                for start, end in regression.segments(values)
            ]
        found[name] = Series(
            unit=metric.unit,
            higher_is_better=metric.higher_is_better,
            points=points,
            levels=levels,
        )
    return found


def shortened(text: str) -> str:
    """At most as much of a failure's text as a page should hold: its beginning and its end."""
    if len(text) <= _MOST_TEXT:
        return text
    half = _MOST_TEXT // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"


def write(details: Details, directory: Path) -> None:
    """Write details.json of a report directory."""
    write_text(json.dumps(details.model_dump(mode="json")) + "\n", directory / NAME)


def read(directory: Path) -> Details:
    """details.json of a report directory; empty where it is missing or cannot be read."""
    try:
        return Details.model_validate_json((directory / NAME).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return Details()
