"""How long tests take: recorded by file, the slowest printed, and the order of the next run."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

#: Seconds by file of `make test`, and of the slow tests of `make catalogues`, as each last took
#: here. A clean checkout has none.
RECORD = Path(__file__).parent.parent / ".cache" / "test-durations.json"
#: What comes first without a record, in this order. Begun last, one would keep one of two workers
#: busy while the other one has nothing left to do.
LONGEST = (
    "test_measuring_gate.py", "test_measuring_traps.py", "test_fault_catalogue.py",
    "test_ci_paths.py", "test_compare_option.py", "test_flashinfer_attention.py",
    "test_false_greens.py", "test_kernel_mutants.py", "test_oracle_file.py",
    "test_kernel_benchmark.py", "test_recording.py", "test_kernel_path_gb10.py",
    "test_benchmark_bridge.py", "test_gb10.py", "test_default_plan.py", "test_certificate.py",
    "test_bad_input.py", "test_bad_input_server.py", "test_durations.py", "test_report_browser.py",
    "test_chat_rate.py", "test_report_files.py", "test_report_whole_runs.py", "test_box_reading.py",
    "test_managed_server.py", "test_kernel_path_engines.py", "test_headline_action.py",
    "test_followed_log.py", "test_kernel_provider.py", "test_fast_build.py",
    "test_matrix_shards.py", "test_docs.py", "test_regression.py", "test_order_of_events.py",
    "test_compare_browser.py",
)  # fmt: skip
_SHOWN = 10


def recorded(which: str) -> dict[str, float]:
    """Seconds by file's name of the runs `which`, "test" or "slow"; empty without a record."""
    seconds: dict[str, dict[str, float]] = {}
    if RECORD.is_file():
        seconds = json.loads(RECORD.read_text("utf-8"))
    return seconds.get(which, {})


def longest_first(items: list[pytest.Item]) -> None:
    """Order tests by the seconds of their files; tests of one file stay together. A file of the
    levels may have the same name, and its order is the suite's."""
    first = {name: 60.0 + number for number, name in enumerate(reversed(LONGEST))}
    seconds, folder = first | recorded("test"), Path(__file__).parent
    items.sort(key=lambda item: -(seconds.get(item.path.name, 1) * (item.path.parent == folder)))


def wanted(config: pytest.Config) -> bool:
    """Whether a run is one of `make test`, or a worker of one: no scenario, no part of a file."""
    whole = config.args == ["meta_tests"] or config.option.markexpr == "alone"
    return (whole and not config.option.keyword) or hasattr(config, "workerinput")


class Durations:
    """A plugin: it adds up what the tests of a run take, in xdist's controller too."""

    def __init__(self, config: pytest.Config) -> None:
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._by_test: dict[str, float] = defaultdict(float)
        self._by_file: dict[str, float] = defaultdict(float)
        self._slow = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_file[Path(report.location[0]).name] += report.duration
        self._by_test[report.nodeid] += report.duration

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """Count what `make catalogues` runs; each worker of xdist collects all tests."""
        self._slow += sum(item.get_closest_marker("slow") is not None for item in items)
        if self._output is not None:
            self._output["slow"] = self._slow

    def pytest_testnodedown(self, node: Any) -> None:
        self._slow = max(self._slow, getattr(node, "workeroutput", {}).get("slow", 0))

    def pytest_terminal_summary(
        self, terminalreporter: "pytest.TerminalReporter", config: pytest.Config
    ) -> None:
        """Print the slowest tests and what this run left out; record `make test`."""
        total = sum(self._by_test.values())
        terminalreporter.section(f"the slowest of {len(self._by_test)} tests, {total:.0f} s in all")
        for name in sorted(self._by_test, key=self._by_test.__getitem__)[: -_SHOWN - 1 : -1]:
            terminalreporter.line(f"{self._by_test[name]:7.1f} s  {name[:120]}")
        if self._slow:
            minutes = sum(recorded("slow").values()) / 60
            took = f"they took {minutes:.0f} minutes here" if minutes else "not timed here yet"
            line = (
                f"{self._slow} slow tests are left to `make catalogues` ({took}), with its tables"
            )
            terminalreporter.line(line)
        which = {"not alone": "test", "alone": "test", "slow": "slow"}.get(config.option.markexpr)
        if which is not None and self._by_test:
            seconds = {name: recorded(name) for name in ("test", "slow")}
            seconds[which] |= self._by_file
            RECORD.parent.mkdir(exist_ok=True)
            RECORD.write_text(json.dumps(seconds, indent=1) + "\n", "utf-8")
