"""Parse the samples in a server's /metrics.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
#: Longer lines are not parsed. vLLM's longest line has 3,000 characters.
_LONGEST_LINE = 1 << 16
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class MetricSample:
    """One sample in a text of Prometheus metrics."""

    name: str
    labels: dict[str, str]
    #: The value, which may be NaN or infinite.
    value: float
    #: The line that it was read from.
    line: str


def samples_of(text: str, wanted: Callable[[str], bool]) -> Iterator[MetricSample]:
    """Parse a text of Prometheus metrics.

    Args:
        text: The text.
        wanted: Returns whether to parse the samples of the metric with a given name.

    Yields:
        Each sample of the wanted metrics. Other lines are skipped.
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
