"""How long each file of tests takes: recorded by a run, printed, and the order of the next run."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

#: Seconds by file, as the last run of each took them. A clean checkout has none.
RECORD = Path(__file__).parent.parent / ".cache" / "test-durations.json"
#: Seconds of files that are not recorded: what takes minutes comes first without a record too.
#: Begun last, one would keep one of two workers busy while the other one has nothing left to do.
GUESSES = {
    "test_run_endings.py": 210,
    "test_fault_catalogue.py": 200,
    "test_model_faults.py": 190,
    "test_recording.py": 180,
    "test_managed_server.py": 170,
    "test_false_greens.py": 160,
    "test_bad_input.py": 150,
    "test_order_of_events.py": 140,
    "test_matrix_shards.py": 130,
    "test_gb10.py": 220,
    "test_python_api.py": 110,
    "test_install.py": 100,
    "test_kernel_mutants.py": 90,
    "test_kernel_provider.py": 80,
    "test_process_hygiene.py": 70,
    "test_turns.py": 50,
    "test_architecture.py": 40,
    "test_report_files.py": 30,
    "test_stress_faults.py": 85,
    "test_speculation.py": 165,
    "test_report_browser.py": 125,
    "test_kernel_path_real.py": 20,
}
_SHOWN = 15


def recorded() -> dict[str, float]:
    """Seconds by file's name; empty without a record."""
    return json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}


def longest_first(items: list[pytest.Item]) -> None:
    """Order tests by the seconds of their files; tests of one file stay together. A file of the
    levels may have the same name, and its order is the suite's."""
    seconds, here = {**GUESSES, **recorded()}, Path(__file__).parent
    items.sort(key=lambda item: -(seconds.get(item.path.name, 1) * (item.path.parent == here)))


def wanted(config: pytest.Config) -> bool:
    """Whether a run is one of `make test`, or a worker of one: no scenario, no part of a file."""
    whole = config.args == ["meta_tests"] and not config.option.keyword
    return whole or hasattr(config, "workerinput")


class Durations:
    """A plugin: it adds up what the tests of a run take, in xdist's controller too."""

    def __init__(self, config: pytest.Config) -> None:
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._seconds: dict[str, float] = defaultdict(float)
        self._slow = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[Path(report.location[0]).name] += report.duration

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """Count what `make catalogues` runs; each worker of xdist collects all tests."""
        self._slow += sum(item.get_closest_marker("slow") is not None for item in items)
        if self._output is not None:
            self._output["slow"] = self._slow

    def pytest_testnodedown(self, node: Any) -> None:
        self._slow = max(self._slow, getattr(node, "workeroutput", {}).get("slow", 0))

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Print the slowest files and what this run left out; record `make test`."""
        slowest = sorted(self._seconds.items(), key=lambda entry: -entry[1])
        total = sum(self._seconds.values())
        terminalreporter.section(f"the slowest of {len(slowest)} files, {total:.0f} s in all")
        for name, seconds in slowest[:_SHOWN]:
            terminalreporter.line(f"{seconds:7.1f} s  {name}")
        if self._slow:
            line = f"{self._slow} slow tests are left to `make catalogues`, with the tables of docs"
            terminalreporter.line(line)
        if config.option.markexpr in ("not alone", "alone"):
            RECORD.parent.mkdir(exist_ok=True)
            RECORD.write_text(json.dumps({**recorded(), **self._seconds}, indent=1) + "\n", "utf-8")
