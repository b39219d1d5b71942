"""Read values of the kernel path, and counters, from a server's /metrics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sm121.client.exposition import MetricSample, samples_of
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.log_message import cut
from sm121.evidence.signatures import MetricSignature, load_signatures

#: The maximum length of a line in the evidence of a value, in characters.
_LONGEST_EVIDENCE = 200
#: The maximum length of a line in the evidence of an absent metric, in characters.
_LONGEST_ABSENCE = 120


@dataclass(frozen=True)
class _Reading:
    """The value that a metric proves, and the line that shows it."""

    value: str | bool
    line: str


def with_metrics(path: KernelPath, text: str, engine: str = "vllm") -> KernelPath:
    """Add the values that the metrics prove to a kernel path.

    Args:
        path: The path that the log proves. It is not modified.
        text: The answer of /metrics.
        engine: The engine whose signatures are used.

    Returns:
        A copy. If the log proves another value of a field, the field keeps that value, and the
        metric is the evidence ``<field>_also``.

    Raises:
        DataFileError: The engine has no signatures.
    """
    signatures = load_signatures(engine).metric
    metric_names: set[str | None] = set()
    for signature in signatures:
        metric_names.add(signature.metric)
        metric_names.add(signature.served)
    samples = list(samples_of(text, metric_names.__contains__))
    changed = path.model_copy(deep=True)
    for signature in signatures:
        reading = _read(signature, samples)
        if reading is None:
            continue
        evidence = cut(f"/metrics: {reading.line}")
        logged = getattr(changed, signature.field)
        if logged is None:
            setattr(changed, signature.field, reading.value)
            changed.evidence[signature.field] = evidence
        elif logged != reading.value:
            changed.evidence.setdefault(f"{signature.field}_also", evidence)
            others = changed.also.setdefault(signature.field, [])
            if str(reading.value) not in others:
                others.append(str(reading.value))
    return changed


def has_any(text: str) -> bool:
    """Return whether a text contains an engine's metric, for example ``vllm:num_requests_running``.

    Args:
        text: The text. The names of all known engines' metrics begin with the engine and a colon.
    """
    return any(samples_of(text, lambda name: ":" in name))


def total(text: str, name: str) -> float | None:
    """Return the sum of the samples of a metric.

    Args:
        text: The answer of /metrics.
        name: The name of the metric.

    Returns:
        The sum over all labels; None if there is no sample, or if a sample is not finite.
    """
    values = [sample.value for sample in samples_of(text, name.__eq__)]
    if values and all(map(math.isfinite, values)):
        return sum(values)
    return None


def counters(text: str) -> dict[str, float]:
    """Return the engine's counters, which never decrease while the engine runs.

    Args:
        text: The answer of /metrics.

    Returns:
        For each counter, by its name, the sum over all labels.
    """
    totals: dict[str, float] = {}
    for sample in samples_of(text, _is_counter_of_engine):
        if math.isfinite(sample.value):
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def _is_counter_of_engine(name: str) -> bool:
    return name.endswith("_total") and ":" in name


def _read(signature: MetricSignature, samples: Sequence[MetricSample]) -> _Reading | None:
    """Return the value that a signature finds, or None."""
    matches = [sample for sample in samples if sample.name == signature.metric]
    if signature.absent is not None:
        return _read_absence(signature, samples) if not matches else None
    lines: dict[str, str] = {}
    for sample in matches:
        if signature.label is not None and signature.label in sample.labels:
            lines[sample.labels[signature.label]] = sample.line
    if len(lines) != 1:
        return None  # the values of several engines differ, so they prove nothing
    text, line = next(iter(lines.items()))
    if text in signature.nothing:
        return None
    start = max(line.find(f'{signature.label}="'), 0)
    value = signature.mapping.get(text, text)
    return _Reading(value, cut(line, _LONGEST_EVIDENCE, around=start))


def _read_absence(signature: MetricSignature, samples: Sequence[MetricSample]) -> _Reading | None:
    """Return the value that a missing metric proves if the server has served requests."""
    if signature.absent is None:
        return None
    for sample in samples:
        if sample.name == signature.served and sample.value > 0:
            line = cut(sample.line, _LONGEST_ABSENCE)
            return _Reading(signature.absent, f"no {signature.metric}, although {line}")
    return None
