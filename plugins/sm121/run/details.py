"""details.json: what report.html shows beside verdict.json: requirements, the whole text of
failures, raw samples, the stored runs that this one was compared with. Nothing here decides
anything; without the file a report has less in it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from sm121.core.files import write_text

NAME = "details.json"
#: A tail of all gaps between chunks can have very many; these many show its shape.
_MOST_SAMPLES = 20_000
_MOST_TEXT = 20_000


class FailureDetail(BaseModel):
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


class Samples(BaseModel):
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
    """The whole of details.json; one of another version is read for what it has."""

    command: str | None = None
    again: str | None = None
    """A command that runs the failed tests again; null before the run has ended."""
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
    fields = {key: value for key, value in extra_info.items() if value is not None}
    return Samples.model_validate({**fields, "samples": every[::step], "taken": len(every)})


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
    except (OSError, ValueError):
        return Details()
