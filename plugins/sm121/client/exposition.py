"""The samples in a server's /metrics.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
#: A longer line is no sample: the longest of vLLM's has 3,000 characters.
_LONGEST_LINE = 1 << 16
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class MetricSample:
    """One sample of a Prometheus exposition."""

    name: str
    labels: dict[str, str]
    #: The number; may be NaN or infinite.
    value: float
    #: The line that it was read from.
    line: str


def samples_of(text: str, wanted: Callable[[str], bool]) -> Iterator[MetricSample]:
    """Parse a Prometheus exposition.

    Args:
        text: The exposition.
        wanted: Returns whether the samples of a metric with this name are parsed.

    Yields:
        Each sample of the wanted metrics. Lines that are no samples are skipped.
    """
    for line in text.splitlines():
        if len(line) > _LONGEST_LINE:
            continue
        match = _SAMPLE.match(line)
        if match is None or not wanted(match["name"]):
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        labels = dict(_LABEL.findall(match["labels"] or ""))
        yield MetricSample(name=match["name"], labels=labels, value=value, line=line)
