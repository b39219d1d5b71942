"""The verdict on a metric as text, for all tables, pages and comparisons."""

from dataclasses import dataclass
from typing import Literal

from sm121.core.numbers import number
from sm121.core.verdict import Verdict, worst
from sm121.measure import gate, statistics
from sm121.report import metric_names
from sm121.run.verdict_file import ChangeReport, ConfigurationGate, MetricReport, VerdictFile

#: The reference of ``--ab`` comparisons. Their changes are no verdict on this run.
OF_AB = "A"
#: The words for a worse value in these units. In other units, the word is "slower".
_MORE = {"GiB": "larger", "%": "worse", "tokens": "worse", "nats": "worse"}
_MEASURED = "measured"
#: Maximum number of decimal digits of a percentage.
_MOST_DIGITS = 5


@dataclass(frozen=True)
class MetricVerdict:
    """The verdict on a metric, over all of its requirements."""

    verdict: Verdict
    #: One or two words for a badge or a column.
    word: str
    #: The word with its reason or grade.
    text: str
    #: Whether the metric has a value but no requirement.
    is_measured: bool = False

    @property
    def shade(self) -> Literal["measured"] | Verdict:
        """The CSS class of the verdict's badge on a page."""
        if self.is_measured:
            return "measured"
        return self.verdict


def of_metric(name: str, metric: MetricReport) -> MetricVerdict:
    """Return the verdict on a metric by its own gate.

    Args:
        name: The metric's name, such as ``ttft_p99``.
        metric: The metric's entry in verdict.json.
    """
    verdict = metric.verdict
    why = no_evidence(name, metric)
    if why is not None:
        return MetricVerdict(Verdict.NOT_RUN, "little evidence", str(why))
    if metric.gated or verdict not in (Verdict.PASS, Verdict.NOT_RUN):
        text = f"{verdict.value} ({metric.grade})" if metric.grade else verdict.value
        own = metric.configuration_gate
        if own is not None:
            text += f"; gate for releases, {limit(own)}: {own.verdict.value}"
        return MetricVerdict(verdict, verdict.value, text)
    if verdict is Verdict.PASS:
        return MetricVerdict(verdict, _MEASURED, _MEASURED, is_measured=True)
    if metric.value is None:
        return MetricVerdict(verdict, "not measured", "not measured")
    return MetricVerdict(verdict, _MEASURED, "measured on a busy machine", is_measured=True)


def of_run(run: VerdictFile, name: str) -> MetricVerdict:
    """Return the verdict on a metric of a run, by its gate and by comparisons with other runs.

    ``--benchmark-compare-fail`` is such a comparison, too.

    Args:
        run: The verdict file.
        name: A key of its metrics.
    """
    metric = run.metrics[name]
    changes = []
    for change in run.changes:
        is_judged = change.verdict is not Verdict.PASS and change.beside != OF_AB
        if is_judged and change.metric == name:
            changes.append(change)
    by_option = [test for test in run.tests if test.is_of_option and name in test.metrics]
    decided = [each.verdict for each in changes] + [each.verdict for each in by_option]
    verdict = worst([metric.verdict, *decided])
    if verdict is metric.verdict:
        return of_metric(name, metric)
    texts = [f"{by(each)} {each.beside}" for each in changes if each.verdict is verdict]
    texts += [each.facts[0].reason for each in by_option if each.verdict is verdict]
    return MetricVerdict(verdict, verdict.value, f"{verdict.value}: {texts[0]}")


@dataclass(frozen=True)
class TooFewRequests:
    """Why the PASS of a percentile's gate shows little.

    Attributes:
        text: The number of requests, and what it shows.
        confidence: The reached confidence, and the number of requests that a proof needs.
    """

    text: str
    confidence: str

    def __str__(self) -> str:
        return f"{self.text} ({self.confidence})"


def no_evidence(name: str, metric: MetricReport) -> TooFewRequests | None:
    """Return why the PASS of a percentile's gate shows little.

    With too few requests, a violation of the gate could not have been detected.

    Args:
        name: The metric's name, such as ``ttft_p99``.
        metric: Its entry in verdict.json.

    Returns:
        The reason; None if there is enough evidence, or for any other metric.
    """
    fraction = metric_names.fraction(name)
    sure = metric.confidence
    if fraction is None or fraction <= 0.5 or metric.at_most is None or sure is None:
        return None
    if metric.verdict is not Verdict.PASS or sure >= statistics.CONFIDENCE:
        return None
    how = "no evidence" if sure < 0.5 else "little evidence"
    needed = gate.requests_needed(fraction)
    return TooFewRequests(
        f"p{100 * fraction:g} of {metric.rounds} requests: {how}",
        f"{sure:.0%} confidence; {statistics.CONFIDENCE:.0%} needs {needed}",
    )


def bound(metric: MetricReport) -> str:
    """Return the maximum rate that the memory allows, with three digits.

    Args:
        metric: The metric's entry in verdict.json.

    Returns:
        The rate in the metric's unit; empty if it is unknown.
    """
    if metric.bound is None:
        return ""
    return number(float(f"{metric.bound:.3g}"))


def limit(gate: MetricReport | ConfigurationGate) -> str:
    """Return the number of a gate.

    Args:
        gate: The gate, or a metric with one. Without one the text is empty.
    """
    return number(gate.at_most if gate.minimum is None else gate.minimum)


def required(gate: MetricReport | ConfigurationGate) -> str:
    """Return the requirement of a gate, for example ``at least 52``.

    Args:
        gate: The gate, or a metric with one. Without one the text is empty.
    """
    if gate.minimum is None and gate.at_most is None:
        return ""
    word = "at least" if gate.at_most is None else "at most"
    return f"{word} {limit(gate)}"


def by(change: ChangeReport) -> str:
    """Return how much worse a metric is, for example ``5.1 % slower than``.

    Args:
        change: The change. The percentage has enough digits to differ from the allowed one.
    """
    word = _MORE.get(change.unit, "slower")
    if change.worse is None:
        return f"{word} than"
    for digits in range(1, _MOST_DIGITS + 1):
        text = percent(change.worse, digits)
        if text != percent(change.allowed):
            return f"{text} {word} than"
    return f"hardly {word} than"


def percent(fraction: float, digits: int = 1) -> str:
    """Return a fraction in percent.

    Args:
        fraction: The fraction, for example 0.051 for 5.1 %.
        digits: The maximum number of decimal digits.
    """
    return f"{round(100 * fraction, digits):.10g} %"
