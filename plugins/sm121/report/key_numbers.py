"""The numbers of a run as a table of at most six rows, rates first.

The table has three forms: aligned text, Markdown, and Markdown with the columns of llama-benchy
(eugr/llama-benchy, ``results.py``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields

from sm121.clock import benchy
from sm121.clock.benchy import BenchyRate
from sm121.core import metric_name
from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.measure import number_table
from sm121.measure.number_table import HEADER, MOST, NumberRow
from sm121.regression.change import is_price
from sm121.report import metric_names, metric_verdicts
from sm121.run.details import Samples
from sm121.run.verdict_file import MetricReport, VerdictFile

#: Maximum number of rates above their bound that are named.
_MOST_ABOVE = 3
#: These metrics follow the rates in this order; all other metrics come last.
_TIMES = ("ttft_p50", "ttft_p99", "tpot_p50", "itl_p99", "e2e_p99")
#: The lowest grade of a gate, which a PASS does not mention.
_LOWEST_GRADE = "minimum"


def names(run: VerdictFile, most: int = MOST) -> list[str]:
    """Return the most important metrics of a run, in the order of the table.

    Metrics that did not pass are chosen first, then metrics with a gate, then rates of one stream
    by depth, other rates, and times. The price of rounding is shown in its own line instead.

    Args:
        run: The verdict file.
        most: The largest number of metrics to return.

    Returns:
        Keys of the run's metrics.
    """
    shown = [name for name, metric in run.metrics.items() if _has_a_row(name, metric)]
    chosen = sorted(shown, key=lambda name: _importance(run, name))[:most]
    return sorted(chosen, key=lambda name: _place(name, run.metrics[name]))


def rows(run: VerdictFile, most: int = MOST) -> list[NumberRow]:
    """Return the rows of the table.

    Args:
        run: The verdict file.
        most: The largest number of rows.
    """
    return [_row(run, name) for name in names(run, most)]


def not_shown(run: VerdictFile, most: int = MOST) -> list[str]:
    """Return the metrics whose gate did not pass, but for which the table has no row left.

    Args:
        run: The verdict file.
        most: The number of rows of the table.
    """
    shown = names(run, most)
    left_out = []
    for name, metric in run.metrics.items():
        if metric.gated and name not in shown and _is_bad(run, name):
            left_out.append(name)
    return left_out


def markdown(table: Sequence[NumberRow]) -> str:
    """Return the rows as a Markdown table.

    Args:
        table: The rows.

    Returns:
        The table with a header; empty if there are no rows.
    """
    if not table:
        return ""
    numeric_columns = len(fields(NumberRow)) - 2
    rule = ["---", *["---:"] * numeric_columns, "---"]
    rows = [astuple(row) for row in table]
    return benchy.piped([astuple(HEADER), rule, *rows])


def llama_benchy(run: VerdictFile, samples: Mapping[str, Samples]) -> str:
    """Return the rates of one stream as llama-benchy prints them; empty if none was measured.

    Each cell has the mean ± standard deviation over the rounds; without samples, only the value.
    Columns that this suite does not measure are empty.

    Args:
        run: The verdict file.
        samples: The raw samples by metric, from details.json.
    """
    of_one_stream = []
    for name, metric in run.metrics.items():
        rate = metric_names.rate(name)
        if rate is not None and rate.streams == 1 and metric.value is not None:
            of_one_stream.append(name)
    chosen = sorted(of_one_stream, key=lambda name: _importance(run, name))[:MOST]
    rates = [_benchy_rate(run, name, samples.get(name)) for name in chosen]
    return benchy.table(run.engine.model, rates, run.started)


def _benchy_rate(run: VerdictFile, name: str, samples: Samples | None) -> BenchyRate:
    rate = metric_names.rate(name)
    value = run.metrics[name].value
    assert rate is not None and value is not None
    known: Sequence[float] = ()
    if samples is not None and samples.failures == 0:
        known = samples.samples
    return BenchyRate(
        kind=rate.kind,
        depth=rate.depth,
        prompt_tokens=None if rate.decoding else rate.tokens + rate.depth,
        value=value,
        samples=known,
    )


def _has_a_row(name: str, metric: MetricReport) -> bool:
    was_measured = metric.value is not None or metric.verdict is not Verdict.NOT_RUN
    return was_measured and not metric_name.is_of_ab(name)


def _row(run: VerdictFile, name: str) -> NumberRow:
    metric = run.metrics[name]
    return NumberRow(
        metric=name,
        value=f"{number(metric.value)} {metric.unit}" if metric.value is not None else "none",
        interval=_interval(metric),
        required=metric_verdicts.required(metric),
        share=share(metric),
        verdict=_verdict(run, name),
    )


def _verdict(run: VerdictFile, name: str) -> str:
    judged = metric_verdicts.of_run(run, name)
    if judged.verdict is not run.metrics[name].verdict:  # a comparison decided the verdict
        return judged.text
    own = run.metrics[name].configuration_gate
    if own is not None:
        return (
            f"{judged.word} (gate for releases, {metric_verdicts.limit(own)}: {own.verdict.value})"
        )
    grade = run.metrics[name].grade
    if judged.verdict is Verdict.PASS and grade not in (None, _LOWEST_GRADE):
        return f"{judged.word} ({grade})"
    return judged.word


def _interval(metric: MetricReport) -> str:
    confidence = "" if metric.confidence is None else f"{metric.confidence:.0%}"
    if metric.ci_low is None and metric.ci_high is None:
        if confidence and metric.gated:
            return f"{confidence} confidence"
        return ""
    return number_table.interval(metric.ci_low, metric.ci_high, metric.confidence)


def share(metric: MetricReport) -> str:
    """Return which fraction of the memory's bound a rate reached.

    Args:
        metric: The metric's entry in verdict.json.

    Returns:
        The share, for example ``80 % of 74.2``; empty if the bound is unknown.
    """
    if metric.roofline is None:
        return ""
    text = f"{metric.roofline * 100:.0f} %"
    if metric.bound is not None:
        text += f" of {metric_verdicts.bound(metric)}"
    return text


def bound_doubt(run: VerdictFile) -> str | None:
    """Return why the bound of the rates is too low.

    Args:
        run: The verdict file. Its bandwidth was measured at the first reading of the machine.

    Returns:
        One line, or None if nothing shows that the bound is too low.
    """
    has_shares = False
    above = []
    for name, metric in run.metrics.items():
        if metric.roofline:
            has_shares = True
            if metric.roofline > 1.0:
                above.append(f"{name} is {metric.roofline:.0%} of the bound")
    reading = run.box.before
    is_busy = reading is not None and reading.is_of_busy_cpu
    if not has_shares or not (is_busy or above):
        return None
    why = "the measured memory bandwidth is too low"
    if reading is not None and is_busy:
        load = f"{reading.other_load:.0%}"
        why = f"other processes took {load} of the CPU while the memory bandwidth was measured"
    if above:
        why += f" ({', '.join(above[:_MOST_ABOVE])})"
    return f"bound of the rates: not reliable: {why}. Run again on a quiet machine"


def _is_bad(run: VerdictFile, name: str) -> bool:
    judged = metric_verdicts.of_run(run, name)
    return judged.verdict not in (Verdict.PASS, Verdict.NOT_RUN)


def _importance(run: VerdictFile, name: str) -> tuple[object, ...]:
    rate = metric_names.rate(name)
    return (
        not _is_bad(run, name),
        is_price(name),
        not run.metrics[name].gated,
        rate is None or rate.streams > 1,
        *_place(name, run.metrics[name]),
    )


def _place(name: str, metric: MetricReport) -> tuple[int, int, int, str]:
    """Return a sort key: rates by depth, decode first; other rates; times; the rest by name."""
    rate = metric_names.rate(name)
    if rate is not None:
        return (0, rate.streams, rate.depth, "" if rate.decoding else name)
    if metric.unit == "tok/s":
        return (1, 0, 0, name)
    if name in _TIMES:
        return (2, _TIMES.index(name), 0, name)
    return (2, len(_TIMES), 0, name)
