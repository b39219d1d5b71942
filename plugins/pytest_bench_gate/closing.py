"""The end of a run with gates: its exit status, and its numbers on the screen."""

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING

import pytest
from pytest_benchmark.session import PerformanceRegression

from pytest_bench_gate import requests
from pytest_bench_gate.run import GateRun

if TYPE_CHECKING:
    from pytest_bench_gate.judging import Judged

#: The property of a test whose gate could not be judged here; its value is the reason.
NOT_RUN = "bench_gate_not_run"
#: Missing metrics that have a line of their own.
_MOST_MISSING = 6


class Closing:
    """Sets the exit status, and shows the numbers.

    Args:
        config: The configuration of the run.
        run: The key of its gates.
    """

    def __init__(self, config: pytest.Config, run: pytest.StashKey[GateRun]) -> None:
        self._config = config
        self._run = run
        self._has_run = False
        #: Why tests with gates did not run, and how many.
        self._not_run: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what did not run. Reports of workers come here, too."""
        if report.when == "call" and not report.skipped:
            self._has_run = True
        if report.when == "setup":
            for name, value in report.user_properties:
                if name == NOT_RUN:
                    self._not_run[str(value)] = self._not_run.get(str(value), 0) + 1

    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int | pytest.ExitCode
    ) -> None:
        """Set the status of a run that ended well: no gate was judged, or a benchmark got worse.

        pytest-benchmark has compared by now what ``--benchmark-compare-fail`` asks for.
        """
        if exitstatus != pytest.ExitCode.OK:
            return
        was_asked = requests.is_compared(self._config) or not self._has_run
        if self._not_run and was_asked:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        benchmarks = getattr(self._config, "_benchmarksession", None)
        if getattr(benchmarks, "performance_regressions", None):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # below pytest's own summary
    def pytest_terminal_summary(
        self, terminalreporter: "pytest.TerminalReporter"
    ) -> Generator[None, object, object]:
        """Show the numbers, in the place of a traceback of pytest-benchmark.

        It raises what it has shown as "Performance has regressed".
        """
        run = self._config.stash.get(self._run, None)
        shown = [] if run is None else list(lines(run))
        for why, count in self._not_run.items():
            tests = "1 test with a gate" if count == 1 else f"{count} tests with gates"
            shown.append(f"NOT_RUN: {tests}: {why}")
        result: object = None
        try:
            result = yield
        except PerformanceRegression:
            if not shown:
                raise
        if shown:
            terminalreporter.section("gates")
        for line in shown:
            terminalreporter.write_line(line)
        return result


def lines(run: GateRun) -> Iterable[str]:
    """Return the closing lines: a table of numbers, missing metrics, and the compared runs.

    Args:
        run: The gates of the run, which has ended.
    """
    if run.judged:
        from sm121.measure import number_table

        shown, others = _most_telling(list(run.judged.values()), number_table.MOST)
        yield from number_table.aligned([metric.row for metric in shown]).splitlines()
        if others:
            words = sorted({metric.word for metric in others})
            yield f"and {len(others)} more: {', '.join(words)}"
    for metric in run.missing[:_MOST_MISSING]:
        yield (
            f"FAIL: {metric.metric} was measured in {metric.run} by {metric.test}, "
            "and not in this run"
        )
    if len(run.missing) > _MOST_MISSING:
        yield f"FAIL: and {len(run.missing) - _MOST_MISSING} more metrics are missing"
    if run.stored is not None:
        files = [stored.file for stored in run.stored.runs]
        more = f" and {len(files) - 1} before it" if len(files) > 1 else ""
        yield f"compared with {files[-1]}{more}"


def _most_telling(metrics: "Sequence[Judged]", most: int) -> "tuple[list[Judged], list[Judged]]":
    """Return the metrics of the table and the others: those that did not hold come first."""
    ordered = sorted(metrics, key=lambda metric: not metric.facts)
    chosen = ordered[:most]
    shown = [metric for metric in metrics if metric in chosen]
    return shown, ordered[most:]
