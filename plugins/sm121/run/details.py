"""details.json: the parts of report.html that are not in verdict.json.

The file contains the requirement of each test, the full text of failures, raw samples, and the
stored runs that this run was compared with. No verdict depends on the file. Without it, the report
has no such sections.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from sm121.core.files import write_text

NAME = "details.json"
#: How many samples of a metric are stored. A long run has many more gaps between chunks; 20,000 of
#: them show the shape of the tail.
_MOST_SAMPLES = 20_000
#: How many characters of a failure's text are stored.
_MOST_TEXT = 20_000


class FailureDetail(BaseModel):
    """A failed test as pytest showed it."""

    id: str
    text: str = ""
    """The text of the failure, at most 20,000 characters."""
    sections: dict[str, str] = Field(default_factory=dict)
    """The captured output by its heading."""
    location: str | None = None
    """File and line, relative to the root."""
    reproduce: str | None = None
    """The command that runs this test alone, in the same way."""
    logs: list[str] | None = None
    """The logs of its servers in the report directory; null if they were not noted."""


class Samples(BaseModel):
    """The raw samples of a metric."""

    unit: str
    higher_is_better: bool = True
    quantile: float | None = None
    samples: list[float] = Field(default_factory=list)
    taken: int = 0
    """The number of samples before evenly spaced ones were chosen."""
    failures: int = 0
    """The failed requests, whose infinite samples are not kept."""
    verdict: str = "PASS"
    reason: str = ""


class SeriesPoint(BaseModel):
    """A metric in one stored run."""

    run: str
    when: str = ""
    value: float


class Series(BaseModel):
    """A metric over the stored runs, this one last."""

    unit: str
    higher_is_better: bool = True
    points: list[SeriesPoint] = Field(default_factory=list)


class Details(BaseModel):
    """The content of details.json, as any version of the suite writes it."""

    command: str | None = None
    again: str | None = None
    """The command that runs the failed tests again; null before the run has ended."""
    requirements: dict[str, str] = Field(default_factory=dict)
    """The requirement of each test by its id: its docstring."""
    failures: list[FailureDetail] = Field(default_factory=list)
    samples: dict[str, Samples] = Field(default_factory=dict)
    history: dict[str, Series] = Field(default_factory=dict)
    findings: list[str] = Field(default_factory=list)
    """The lines of the regression level."""


def samples_of(extra_info: Mapping[str, Any]) -> Samples:
    """Return the samples of a stored benchmark.

    Args:
        extra_info: The ``extra_info`` of the benchmark.
    """
    samples = [float(sample) for sample in extra_info.get("samples") or []]
    step = max(1, math.ceil(len(samples) / _MOST_SAMPLES))
    fields = {key: value for key, value in extra_info.items() if value is not None}
    return Samples.model_validate({**fields, "samples": samples[::step], "taken": len(samples)})


def shortened(text: str) -> str:
    """Return a failure's text; if it is too long to store, only its beginning and its end.

    Args:
        text: The text.
    """
    if len(text) <= _MOST_TEXT:
        return text
    half = _MOST_TEXT // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"


def write_details(details: Details, directory: Path) -> None:
    """Write details.json of a report directory.

    Args:
        details: The content.
        directory: The report directory.

    Raises:
        OSError: The file cannot be written.
    """
    write_text(json.dumps(details.model_dump(mode="json")) + "\n", directory / NAME)


def read_details(directory: Path) -> Details:
    """Read details.json of a report directory.

    Args:
        directory: The report directory.

    Returns:
        The content; empty if the file is missing or cannot be read.
    """
    try:
        return Details.model_validate_json((directory / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return Details()
