"""What a server's /metrics say: its samples, and what they prove of its kernel path."""

import math
import re
from collections.abc import Callable, Iterator

from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.log_lines import cut
from sm121.evidence.signatures import MetricSignature, load_signatures

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
#: A longer line is no sample: the longest of vLLM's has 3,000 characters.
_LONGEST_LINE = 1 << 16
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')


def with_metrics(path: KernelPath, text: str, engine: str = "vllm") -> KernelPath:
    """The path with what the metrics show beside it; where the log says another value, that stands
    and ``<field>_also`` has the metric. Raises DataFileError: nothing is known of the engine."""
    signatures = load_signatures(engine).metric
    metric_names = {name for s in signatures for name in (s.metric, s.served) if name is not None}
    samples = list(samples_of(text, metric_names.__contains__))
    changed = path.model_copy(deep=True)
    for signature in signatures:
        reading = _read(signature, samples)
        if reading is None:
            continue
        value, line = reading
        logged = getattr(changed, signature.field)
        if logged is None:
            setattr(changed, signature.field, value)
            changed.evidence[signature.field] = cut(f"/metrics: {line}")
        elif logged != value:
            changed.evidence.setdefault(f"{signature.field}_also", cut(f"/metrics: {line}"))
            others = changed.also.setdefault(signature.field, [])
            if str(value) not in others:
                others.append(str(value))
    return changed


def total(text: str, name: str) -> float | None:
    """The sum of the samples of a metric; None without any, or where one is no number."""
    values = [value for _, _, value, _ in samples_of(text, lambda sample: sample == name)]
    return sum(values) if values and all(map(math.isfinite, values)) else None


def counters(text: str) -> dict[str, float]:
    """The engine's counters by name, summed over labels: they never fall while it lives."""
    totals: dict[str, float] = {}
    for name, _, value, _ in samples_of(text, lambda n: n.endswith("_total") and ":" in n):
        if math.isfinite(value):
            totals[name] = totals.get(name, 0.0) + value
    return totals


def samples_of(
    text: str, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, dict[str, str], float, str]]:
    """Name, labels, value and line of each sample whose name is wanted, in a Prometheus exposition.
    A value may be NaN or infinite. What is no sample is left out."""
    for line in text.splitlines():
        match = _SAMPLE.match(line) if len(line) <= _LONGEST_LINE else None
        if match is None or not wanted(match["name"]):
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        yield match["name"], dict(_LABEL.findall(match["labels"] or "")), value, line


def _read(
    signature: MetricSignature, samples: list[tuple[str, dict[str, str], float, str]]
) -> tuple[str | bool, str] | None:
    matches = [sample for sample in samples if sample[0] == signature.metric]
    if signature.absent is not None:
        served = [s for s in samples if s[0] == signature.served and s[2] > 0]
        if matches or not served:
            return None
        return signature.absent, f"no {signature.metric} though {cut(served[0][3], 120)}"
    values = {
        sample[1][signature.label]: sample[3]
        for sample in matches
        if signature.label is not None and signature.label in sample[1]
    }
    if len(values) != 1:
        return None  # several engines that do not agree prove nothing of any
    text, line = next(iter(values.items()))
    if text in signature.nothing:
        return None
    start = max(line.find(f'{signature.label}="'), 0)
    return signature.mapping.get(text, text), cut(line, 200, around=start)
