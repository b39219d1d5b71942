"""Texts on how certain a metric's value is: its interval, acceptance of drafts, and starts."""

from sm121.core.numbers import number
from sm121.run.verdict_file import MetricReport


def interval(metric: MetricReport) -> str:
    """Return the interval of a metric's value with its confidence.

    A quantile that was compared with a bound has no interval, but only the confidence of that
    comparison.

    Args:
        metric: The metric's entry in verdict.json.

    Returns:
        The text, for example ``50.1 to 52.3, 95% confidence`` or ``95% confidence``; empty if
        neither is known.
    """
    confidence = ""
    if metric.confidence is not None:
        confidence = f"{metric.confidence:.0%} confidence"
    if metric.ci_low is None and metric.ci_high is None:
        return confidence if metric.gated else ""
    low = number(metric.ci_low) or "?"
    high = number(metric.ci_high) or "unbounded"
    if confidence:
        return f"{low} to {high}, {confidence}"
    return f"{low} to {high}"


def certainty(metric: MetricReport) -> str:
    """Return the interval, the acceptance of drafts and the number of starts of a metric.

    Args:
        metric: The metric's entry in verdict.json.

    Returns:
        The parts that are known, joined by commas.
    """
    text = interval(metric)
    if metric.accepted_length is not None and metric.acceptance_rate is not None:
        share = f"{metric.acceptance_rate:.0%} of drafts accepted"
        text += f" ({share}, {metric.accepted_length:.2f} tokens a step)"
    parts = []
    if text:
        parts.append(text)
    if metric.starts is not None:
        parts.append("of one start" if metric.starts == 1 else f"of {metric.starts} starts")
    return ", ".join(parts)
