"""A file with results: its rows, and the tool that measured them.

Each source states how its times were measured (``clock``), since the accuracy of a value depends on
it: ``token_ids`` and ``usage`` count tokens, ``chunks`` counts events, ``in-process`` is the
engine's own loop without server and network.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sm121.core.verdict import Severity, Verdict
from sm121.report import metric_verdicts
from sm121.report.rows import shown
from sm121.run.verdict_file import MetricReport, TestReport, VerdictFile

#: The parts of a kernel path that are compared, in this order.
KERNELS = (
    "attention",
    "moe",
    "quantization",
    "weights",
    "dtype",
    "kv_cache_dtype",
    "kv_layout",
    "native_fp4",
    "cuda_graphs",
    "speculative",
    "prefix_caching",
    "load_format",
)


@dataclass(frozen=True)
class ComparedRow:
    """One measured metric of one source."""

    metric: str
    report: MetricReport
    #: The standard deviation that the source states; None if it states none or has an interval.
    deviation: float | None = None
    verdict: str | None = None

    @property
    def word(self) -> str | None:
        """The row's verdict, or ``measured`` without a gate; None if the tool has no verdicts."""
        if self.verdict is None:
            return None
        return metric_verdicts.of_metric(self.metric, self.report).word

    @property
    def counts(self) -> bool:
        """Whether the row has a value that no verdict invalidates."""
        return self.report.value is not None and self.verdict in (None, "PASS", "FAIL")


@dataclass(frozen=True)
class Source:
    """A file with results."""

    name: str
    engine: str
    model: str
    #: The tool that measured the results.
    tool: str
    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...] = ()
    #: The verdict.json, if the results come from a run of this suite.
    run: VerdictFile | None = None
    #: The time of the measurement, in the form that the file uses; empty if the file has none.
    started: str = ""

    def row(self, metric: str) -> ComparedRow | None:
        """Return the row of a metric; None if the source lacks it.

        Args:
            metric: The metric's name, such as ``tg32@d0``.
        """
        return next((row for row in self.rows if row.metric == metric), None)

    @property
    def failed(self) -> list[TestReport]:
        """The failed tests without a waiver, most severe first."""
        if self.run is None:
            return []
        failed = [test for test in self.run.tests if test.counted is Verdict.FAIL]
        severities = list(Severity)
        return sorted(failed, key=lambda test: severities.index(test.severity))

    @property
    def kernels(self) -> Mapping[str, str]:
        """The parts of the kernel path that the server's log proves."""
        if self.run is None:
            return {}
        path = self.run.engine.path
        parts = {}
        for part in KERNELS:
            value = getattr(path, part)
            if value not in (None, []):
                parts[part] = shown(value, path.also.get(part, ()))
        return parts
