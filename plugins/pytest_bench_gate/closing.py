"""The end of a run with gates: the exit status, and the table in the terminal summary."""

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING

import pytest
from pytest_benchmark.session import PerformanceRegression

from pytest_bench_gate import against, requests
from pytest_bench_gate.run import GateRun

if TYPE_CHECKING:
    from pytest_bench_gate.judging import Judged

#: The user property of a test whose gate could not be judged. The value is the reason.
NOT_RUN = "bench_gate_not_run"
#: The maximum number of missing metrics that are listed on lines of their own.
_MOST_MISSING = 6


class Closing:
    """Sets the exit status, and shows the metrics in the terminal summary.

    Args:
        config: The configuration of the run.
        run: The stash key of the run's gates.
    """

    def __init__(self, config: pytest.Config, run: pytest.StashKey[GateRun]) -> None:
        self._config = config
        self._run = run
        self._has_run = False
        self._has_report = False
        #: Why the run does not pass although no test failed; None if there is no such reason.
        self._nothing: str | None = None
        #: The number of tests with gates that did not run. The keys are the reasons.
        self._not_run: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record tests that did not run. This hook also gets the reports of xdist workers."""
        self._has_report = True
        if report.when == "call" and not report.skipped:
            self._has_run = True
        if report.when == "setup":
            for name, value in report.user_properties:
                if name == NOT_RUN:
                    self._not_run[str(value)] = self._not_run.get(str(value), 0) + 1

    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int | pytest.ExitCode
    ) -> None:
        """Change the status of a successful run if nothing was compared or a benchmark regressed.

        When this hook is called, pytest-benchmark has made the comparisons of
        ``--benchmark-compare-fail``.
        """
        if exitstatus != pytest.ExitCode.OK:
            return
        was_asked = requests.is_compared(self._config) or not self._has_run
        if self._not_run and was_asked:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        run = self._config.stash.get(self._run, None)
        judged = [] if run is None else list(run.judged.values())
        is_compared = any(metric.comparison is not None for metric in judged)
        if self._has_report and against.is_given(self._config) and not is_compared:
            why = "the stored run has no metric of this run" if judged else "no gate was judged"
            self._nothing = f"NOT_RUN: {against.NAME}: {why}, so nothing was compared"
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        benchmarks = getattr(self._config, "_benchmarksession", None)
        if getattr(benchmarks, "performance_regressions", None):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # shown below pytest's own summary
    def pytest_terminal_summary(
        self, terminalreporter: "pytest.TerminalReporter"
    ) -> Generator[None, object, object]:
        """Show the metrics, in place of the traceback of pytest-benchmark's own error.

        pytest-benchmark raises `PerformanceRegression` after it has printed the regression itself.
        """
        run = self._config.stash.get(self._run, None)
        shown = [] if run is None else list(lines(run))
        for why, count in self._not_run.items():
            tests = "1 test with a gate" if count == 1 else f"{count} tests with gates"
            shown.append(f"NOT_RUN: {tests}: {why}")
        if self._nothing is not None:
            shown.append(self._nothing)
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
    """Return the lines of the summary: the table of metrics, missing metrics, compared runs.

    Args:
        run: The gates of the finished run.
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
    """Return the metrics for the table, and those left out.

    Metrics that did not pass come first.
    """
    ordered = sorted(metrics, key=lambda metric: not metric.facts)
    chosen = ordered[:most]
    shown = [metric for metric in metrics if metric in chosen]
    return shown, ordered[most:]
