"""Measure the decode rate of a cell, and compare it with the baseline's."""

import math
from pathlib import Path

from sm121.core import level_settings, numbers
from sm121.core.server import Server
from sm121.evidence.compile_watch import CompileWatch
from sm121.measure import measurement, statistics
from sm121.measure.cells import MeasuredCell
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.metrics.tg import DecodeRate
from sm121.measure.plan import Plan
from sm121.run.cell_record import CellRate

#: Keys of a profile's ``[matrix]`` that replace those of ``[performance.measuring]``.
_OWN_SETTINGS = ("rounds", "short_rounds", "warm_up_requests", "drift_bound", "second_clock_bound")


def measure_rate(
    server: Server,
    settings: level_settings.MatrixPlan,
    measuring: level_settings.Measuring,
    records: Path,
) -> tuple[str, list[float], list[measurement.Invalidity]]:
    """Measure the decode rate of one stream.

    Args:
        server: The server of the cell.
        settings: The sizes of the sample, and its bounds.
        measuring: The other settings of the measurement.
        records: The folder for the timed requests.

    Returns:
        The name of the metric, the rate of each round in tok/s, and the reasons why the sample is
        not valid.
    """
    changed: dict[str, object] = {name: getattr(settings, name) for name in _OWN_SETTINGS}
    changed["maximum_rounds"] = settings.rounds
    plan = Plan(
        settings.prompt_tokens,
        (settings.generated_tokens,),
        (0,),
        measuring.model_copy(update=changed),
    )
    compiled = CompileWatch(server.log, server.reader).new
    with MeasuredServer.open(server.endpoint, plan, records, compiled=compiled) as measured_server:
        cell = MeasuredCell(measured_server, 0).gather(settings.rounds)
        measured = DecodeRate(settings.generated_tokens).settle(cell)
    rates = [rate for rate in measured.samples if math.isfinite(rate) and rate > 0]
    return f"tg{settings.generated_tokens}@d0", rates, measured.invalid


def compare_rates(rate: CellRate, baseline: CellRate, allowed: float) -> bool:
    """Compare a cell's rate with the baseline's, and record the ratio and its interval.

    Args:
        rate: The rate of the cell, which is changed.
        baseline: The rate of the baseline.
        allowed: How much slower the cell may be, as a fraction.

    Returns:
        Whether the cell is slower than allowed: the whole interval of the ratio is too low.
    """
    ratio, low, high = statistics.ratio_interval(rate.samples, baseline.samples)
    rate.ratio = round(ratio, 4)
    rate.ci_low = round(low, 4)
    rate.ci_high = round(high, 4)
    rate.allowed = round(allowed, 4)
    return rate.ci_high < 1.0 - rate.allowed


def describe_ratio(rate: CellRate, baseline: CellRate) -> str:
    """Return one line with both rates and the ratio that `compare_rates` recorded.

    Args:
        rate: The rate of the cell, after `compare_rates`.
        baseline: The rate of the baseline.
    """
    return (
        f"{rate.metric} {numbers.number(rate.value)} tok/s, "
        f"{rate.ratio:.3f} of the baseline's {numbers.number(baseline.value)} "
        f"[{rate.ci_low:.3f}, {rate.ci_high:.3f}]; at most {rate.allowed:.0%} slower allowed"
    )
