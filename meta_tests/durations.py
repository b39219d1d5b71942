"""Record the duration of the tests in each file, print the slowest tests, and order the next
run."""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from meta_tests.folders import META, ROOT

#: The last recorded seconds of each file of `make test`, and of the slow tests of `make
#: catalogues`. A new checkout has no records.
RECORD = ROOT / ".cache" / "test-durations.json"
#: The first files to start without a record, in this order. If one of them started last, one worker
#: would be busy while the others have ended.
LONGEST = (
    "faults/test_false_greens.py",
    "faults/test_fault_catalogue.py",
    "whole/test_resume.py",
    "unit/stress/test_level.py",
    "whole/test_ci_paths.py",
    "unit/performance/test_bench_chats.py",
    "whole/test_downstream_llm_server.py",
    "unit/run/test_record.py",
    "unit/kernels/test_benchmarks.py",
    "unit/kernels/test_benchmarks_compared.py",
    "whole/test_downstream_gpu_arch.py",
    "whole/test_one_line.py",
    "unit/engines/test_managed.py",
    "unit/plugin/test_comparing.py",
    "unit/run/test_timings.py",
    "unit/engines/test_nodes.py",
    "faults/test_kernel_mutants.py",
    "unit/answers/test_expected_samples.py",
    "unit/report/test_page_browser.py",
    "unit/kernels/test_flashinfer_sinks.py",
    "unit/matrix/test_level_shards.py",
    "whole/test_bad_input.py",
    "unit/performance/test_starts.py",
    "whole/test_hostile_surroundings.py",
    "whole/test_gb10.py",
    "unit/measure/test_gate.py",
    "unit/plugin/test_benchmarks.py",
    "whole/test_order_of_events.py",
    "unit/plugin/test_certificate.py",
    "whole/test_docs.py",
    "whole/test_downstream.py",
    "unit/engines/test_followed_log.py",
    "unit/matrix/test_axes.py",
    "unit/api/test_sampled_crowd.py",
    "unit/oracles/test_moe.py",
    "unit/session/test_plan_choice.py",
    "unit/kernels/test_checks_fast_build.py",
    "unit/session/test_repeated.py",
    "unit/plugin/test_workers.py",
    "unit/regression/test_regression_level.py",
    "whole/test_bad_input_server.py",
    "unit/checkpoint/test_canary.py",
    "unit/compilation/test_modules.py",
    "unit/plugin/test_progress.py",
    "unit/evidence/test_silent_errors.py",
    "unit/performance/test_box.py",
    "unit/report/test_history.py",
    "unit/engines/test_warm.py",
    "unit/answers/test_exam.py",
    "unit/machine/test_box_of_a_run.py",
    "unit/session/test_certification.py",
    "unit/report/test_ab_section_browser.py",
    "unit/report/test_headline_action.py",
    "unit/plugin/test_run_again.py",
    "unit/engines/test_capabilities.py",
    "unit/tools/test_install.py",
    "whole/test_downstream_bench_gate.py",
    "unit/evidence/test_kernel_path_gb10.py",
    "unit/oracles/test_scores.py",
    "unit/session/test_against.py",
    "faults/test_stress_faults.py",
    "unit/engines/test_attached_log.py",
    "unit/session/test_crashes.py",
    "whole/test_watching.py",
    "unit/session/test_acceptance.py",
    "unit/cli/test_cli.py",
    "unit/answers/test_oracle_file.py",
    "unit/checkpoint/test_inspection_published.py",
    "unit/kernels/test_registry.py",
    "unit/compilation/test_libraries.py",
    "unit/checkpoint/test_contradictions.py",
    "unit/api/test_compatibility.py",
    "whole/test_python_api.py",
    "unit/report/test_page_files.py",
    "whole/test_refused_by_workers.py",
    "unit/engines/test_spanning.py",
    "faults/test_rounding_faults.py",
    "unit/machine/test_box_reading.py",
    "unit/clock/test_clock.py",
    "whole/test_first_run.py",
    "whole/test_lines_of_a_whole_run.py",
    "unit/kernels/test_flashinfer_experts.py",
    "whole/test_report_whole_runs.py",
    "whole/test_site_browser.py",
    "unit/answers/test_price.py",
    "whole/test_new_check.py",
    "unit/pytest_gpu_arch/test_markers.py",
    "unit/client/test_load.py",
    "whole/test_quiet.py",
    "unit/engines/test_cuda_versions.py",
    "whole/test_version_skew.py",
    "unit/plugin/test_kernels.py",
    "unit/tools/test_choices.py",
    "unit/session/test_settings_plans.py",
    "unit/checkpoint/test_canary_tensors.py",
    "unit/api/test_rendering.py",
    "unit/core/test_architecture.py",
    "whole/test_layers.py",
    "unit/clock/test_measuring.py",
)
#: The first files to start of those that measure time. The tests of misleading servers
#: (``test_measuring_traps.py``) come last: each of them is short, so that all workers end at about
#: the same time.
LONGEST_ALONE = (
    "whole/test_measuring_gate.py",
    "whole/test_lines_of_a_whole_run.py",
    "unit/regression/test_ab_run.py",
    "whole/test_compare_whole.py",
    "faults/test_measuring_traps.py",
)
_SHOWN = 10


def recorded(which: str) -> dict[str, float]:
    """Return the recorded seconds of each file in meta_tests/, for the runs `which` ("test" or
    "slow").

    The result is empty if there is no record."""
    seconds: dict[str, dict[str, float]] = {}
    if RECORD.is_file():
        seconds = json.loads(RECORD.read_text("utf-8"))
    return seconds.get(which, {})


def longest_first(items: list[pytest.Item], alone: bool) -> None:
    """Order tests so that the longest files start first. Tests of one file stay together.

    Files outside of this folder, which are those of the levels, keep the suite's own order.

    Args:
        items: The tests, ordered in place.
        alone: Whether only tests that measure time run. Workers then divide a file, so the longest
            test has to start first and not the longest file.
    """
    first = LONGEST_ALONE if alone else LONGEST
    seconds = {name: 60.0 + number for number, name in enumerate(reversed(first))}
    if not alone:
        seconds |= recorded("test")

    def descending(item: pytest.Item) -> float:
        if META not in item.path.parents:
            return 0.0
        return -seconds.get(item.path.relative_to(META).as_posix(), 1.0)

    items.sort(key=descending)


def wanted(config: pytest.Config) -> bool:
    """Return whether a run is `make test` or one of its workers, and not a scenario or a part of a
    file."""
    whole = config.args == ["meta_tests"] or config.option.markexpr == "alone"
    return (whole and not config.option.keyword) or hasattr(config, "workerinput")


class Durations:
    """A plugin that adds up the durations of tests. It also works in xdist's controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._by_test: dict[str, float] = defaultdict(float)
        self._by_file: dict[str, float] = defaultdict(float)
        self._slow = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_file[report.location[0].removeprefix("meta_tests/")] += report.duration
        self._by_test[report.nodeid] += report.duration

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """Count the tests that only `make catalogues` runs.

        With xdist, each worker collects all tests, so they are counted once."""
        self._slow += sum(item.get_closest_marker("slow") is not None for item in items)
        if self._output is not None:
            self._output["slow"] = self._slow

    def pytest_testnodedown(self, node: Any) -> None:
        self._slow = max(self._slow, getattr(node, "workeroutput", {}).get("slow", 0))

    def pytest_terminal_summary(
        self, terminalreporter: "pytest.TerminalReporter", config: pytest.Config
    ) -> None:
        """Print the slowest tests and the number of tests that were left out, and store the
        durations of `make test`."""
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
        which = {"not alone": "test", "slow": "slow"}.get(config.option.markexpr)
        if which is not None and self._by_test:
            seconds = {name: recorded(name) for name in ("test", "slow")}
            seconds[which] |= self._by_file
            RECORD.parent.mkdir(exist_ok=True)
            RECORD.write_text(json.dumps(seconds, indent=1) + "\n", "utf-8")
