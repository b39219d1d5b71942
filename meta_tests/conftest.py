"""Fixtures for testing the suite: real processes, real servers with known faults, whole runs."""

import atexit
import functools
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from meta_tests import case_ids, durations, quiet
from meta_tests.fakes import browser, servers
from meta_tests.fakes.servers import FaultServer, TimedServer
from meta_tests.fakes.stored_run_events import require_same
from meta_tests.fakes.warm_pytest import Template, WarmPytest, WarmRun, can_fork
from meta_tests.folders import ROOT
from sm121.engines.process_tree import marked, reap

#: Separate projects, which `test_downstream*.py` run.
collect_ignore = [
    "whole/downstream",
    "whole/downstream_all",
    "whole/downstream_bench_gate",
    "whole/downstream_gpu_arch",
    "whole/downstream_llm_server",
]
#: If the variable is set, the tests that need torch are left out.
LIGHT = "SM121_META_LIGHT" in os.environ


def threads_beside(workers: int) -> str:
    """Return how many OpenMP threads each of several parallel workers may have.

    OpenMP threads spin while they wait. On two cores, two processes with two threads each are ten
    times slower than two processes with one thread each.
    """
    return str(max(1, (os.cpu_count() or 1) // workers))


if count := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", threads_beside(count))

# Runs in other folders serve the canary of this checkout, as `make conformance` does.
os.environ.setdefault("SM121_CANARY", str(ROOT / ".cache" / "canary"))

MARK = "SM121_META_TEST"
#: The key under which the controller passes its workers the address of the process that forks runs.
WARM = "warm_pytest"
_TEMPLATE = pytest.StashKey[Template]()

# The suite's own tests run in parallel. A run that measures locks the machine, and would refuse the
# other runs. Therefore, this variable names another folder for the lock.
_LOCKS = tempfile.TemporaryDirectory(prefix="meta-locks-")
atexit.register(_LOCKS.cleanup)  # otherwise pytest 8.2 shows a ResourceWarning at the end
if MARK not in os.environ:
    os.environ["SM121_LOCKS"] = _LOCKS.name


def pytest_configure(config: pytest.Config) -> None:
    """Turn warnings into errors, except in runs of the levels, in which other packages may warn."""
    if durations.wanted(config):
        config.pluginmanager.register(durations.Durations(config))
    config.pluginmanager.register(quiet, "quiet")
    config.pluginmanager.register(case_ids, "case_ids")
    config.addinivalue_line("markers", "alone: it measures time on a quiet machine")
    config.addinivalue_line("filterwarnings", "error")
    # Show pytest-benchmark's warnings, for example "no file to compare with", but do not raise
    # them.
    config.addinivalue_line(
        "filterwarnings", "default::pytest_benchmark.logger.PytestBenchmarkWarning"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the workers of xdist the address of the process that forks runs.

    The workers of a scenario need no address."""
    if MARK in os.environ:
        return
    if _TEMPLATE not in node.config.stash:
        threads = threads_beside(node.workerinput["workercount"])
        variables = {"OMP_NUM_THREADS": threads} | os.environ
        node.config.stash[_TEMPLATE] = Template(ROOT, variables)
    node.workerinput[WARM] = node.config.stash[_TEMPLATE].address


def pytest_unconfigure(config: pytest.Config) -> None:
    if _TEMPLATE in config.stash:
        config.stash[_TEMPLATE].close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if LIGHT and (
        heavy := [i for i in items if {"canary_bf16", "canary_mxfp4"} & {*i.fixturenames}]
    ):
        config.hook.pytest_deselected(items=heavy)
        items[:] = [item for item in items if item not in heavy]
    durations.longest_first(items, alone=config.option.markexpr == "alone")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the collected items from garbage collection, without searching them for garbage
    first."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Skip a module that imports torch, if `LIGHT` is set."""
    report = yield
    if LIGHT and report.failed and "No module named 'torch'" in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, "it needs torch")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Skip a test that imports torch, if `LIGHT` is set."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if LIGHT and isinstance(error, ModuleNotFoundError) and error.name == "torch":
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "it needs torch")
    return report


@pytest.fixture(scope="session")
def canary_bf16() -> Path:
    """The BF16 checkpoint of the canary, which the conformance run also uses."""
    from sm121.checkpoint import canary

    return canary.build(ROOT / ".cache" / "canary" / "bf16", "bf16")


@pytest.fixture(scope="session")
def canary_mxfp4() -> Path:
    """The MXFP4 checkpoint of the canary."""
    from sm121.checkpoint import canary

    return canary.build(ROOT / ".cache" / "canary" / "mxfp4", "mxfp4")


@pytest.fixture
def a_cpu_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the processor's flags, so that the axes of the matrix do not depend on this
    machine."""
    from sm121.matrix import space

    monkeypatch.setattr(space, "cpu_flags", str)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _tool_or_skip(kind: str) -> Any:
    from sm121.compilation import toolchain
    from sm121.core.verdict import NotRun

    try:
        return getattr(toolchain, f"find_{kind}")(toolchain.site_packages())
    except NotRun as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def compiler() -> Any:
    """This machine's nvcc, as `sm121.compilation.toolchain` finds it."""
    return _tool_or_skip("compiler")


@pytest.fixture(scope="session")
def disassembler() -> Any:
    """This machine's cuobjdump."""
    return _tool_or_skip("disassembler")


@dataclass
class PytestRun:
    """A run of pytest in its own process. All processes that it starts are marked."""

    process: subprocess.Popen[str] | WarmRun
    output_file: Path
    report: Path
    mark: str
    processes: dict[int, float] = field(default_factory=dict)
    segments_before: set[str] = field(default_factory=set)
    temporary: Path = Path()

    @property
    def output(self) -> str:
        return self.output_file.read_text("utf-8", "replace")

    @property
    def verdict(self) -> dict:
        return json.loads((self.report / "verdict.json").read_text("utf-8"))

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Wait until the output contains ``text``, and record the processes of the run's tree."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_s} s:\n{self.output}"
            time.sleep(0.2)
        self.remember()

    def remember(self) -> None:
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        for process in [*self.tree(), *descendants]:
            with suppress(psutil.NoSuchProcess):
                self.processes[process.pid] = process.create_time()

    def tree(self) -> list[psutil.Process]:
        return marked(MARK, self.mark)

    def wait(self, timeout_s: float = 120.0) -> int:
        return self.process.wait(timeout_s)

    def left(self, timeout_s: float = 30.0) -> list[str]:
        """Return the run's processes, zombies included, that still exist after ``timeout_s``
        seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            # The test of ManagedServer makes this process a subreaper, so orphans of the run become
            # its children.
            reap(pid for pid in self.processes if pid != self.process.pid)
            remaining = {str(process) for process in self.tree()}
            for pid, created in self.processes.items():
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    remaining |= {str(process)} if process.create_time() == created else set()
            if not remaining or time.monotonic() > deadline:
                return sorted(remaining)
            time.sleep(0.2)


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    """The browser for the tests of a module."""
    with browser.chromium() as started:
        yield started


@pytest.fixture(scope="session")
def warm_pytest(pytestconfig: pytest.Config) -> Iterator[Callable[[], WarmPytest]]:
    """The process that forks runs.

    All workers share one process; without workers, the first run starts it."""
    of_workers = getattr(pytestconfig, "workerinput", {}).get(WARM)
    with ExitStack() as opened:

        @functools.cache
        def connected() -> WarmPytest:
            if of_workers:
                return opened.enter_context(closing(WarmPytest(of_workers)))
            template = opened.enter_context(closing(Template(ROOT)))
            return opened.enter_context(closing(WarmPytest(template.address)))

        yield connected


@pytest.fixture
def start_pytest(
    tmp_path: Path, warm_pytest: Callable[[], WarmPytest]
) -> Iterator[Callable[..., PytestRun]]:
    """Start pytest on the suite, as a user does, and clean up after it in any case.

    With ``warm``, the run is forked from a process that has already imported the suite (see
    `warm_pytest`)."""
    runs: list[PytestRun] = []

    def start(
        *arguments: str,
        environment: dict[str, str] | None = None,
        warm: bool = False,
    ) -> PytestRun:
        mark = uuid.uuid4().hex
        number = len(runs)
        output = tmp_path / f"output-{number}.txt"
        report = tmp_path / f"report-{number}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        variables = {**inherited, MARK: mark, **(environment or {})}
        options = ["-p", "no:cacheprovider", "--report-dir", str(report), *arguments]
        if not any(argument.startswith("--benchmark-storage") for argument in arguments):
            # Use another folder for recorded durations than this checkout's.
            options.insert(0, f"--benchmark-storage={tmp_path / 'benchmarks'}")
        process: subprocess.Popen[str] | WarmRun
        if warm and can_fork(arguments, environment or {}):
            process = warm_pytest().start(options, output, variables)
        else:
            with output.open("w") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *options],
                    cwd=ROOT,
                    env=variables,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
        run = PytestRun(process, output, report, mark)
        runs.append(run)
        return run

    yield start
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
        for process in run.tree():
            process.kill()


@pytest.fixture
def run_pytest(start_pytest: Callable[..., PytestRun]) -> Callable[..., tuple[int, PytestRun]]:
    """Run pytest to its end, and return the exit status and the run.

    With ``warm=False``, the run has a new interpreter."""

    def run(
        *arguments: str, timeout_s: float = 120.0, warm: bool = True, **options
    ) -> tuple[int, PytestRun]:
        started = start_pytest(*arguments, warm=warm, **options)
        status = started.wait(timeout_s)
        require_same(started.report)
        return status, started

    return run


@pytest.fixture(scope="session")
def clean_server() -> Iterator[Callable[[str], FaultServer]]:
    """Return the address of the fault server without a fault.

    The key is the argument. All tests share this server, because it has no state."""
    with ExitStack() as started:
        running: dict[str, FaultServer] = {}

        def start(key: str) -> FaultServer:
            if key not in running or running[key].process.poll() is not None:
                running[key] = started.enter_context(servers.fault_server(key=key))
            return running[key]

        yield start


@pytest.fixture
def fault_server(clean_server) -> Iterator[Callable[..., FaultServer]]:
    """Start ``fault_server.py`` with a fault; stop it after the test."""
    with ExitStack() as started:

        def start(fault: str = "none", key: str = "meta-key") -> FaultServer:
            if fault == "none":
                return clean_server(key)
            return started.enter_context(servers.fault_server(fault, key))

        yield start


@pytest.fixture
def timed_server(tmp_path: Path) -> Iterator[Callable[..., TimedServer]]:
    """Start ``timed_server.py`` with arguments; stop it after the test."""
    with ExitStack() as started:
        logs = (tmp_path / f"truth-{number}.jsonl" for number in itertools.count())
        yield lambda *arguments: started.enter_context(servers.timed_server(next(logs), *arguments))


@pytest.fixture
def matrix_profile(tmp_path: Path) -> Path:
    """The profile of ``matrix_engine.py``, with an invented checkpoint."""
    return servers.matrix_profile(tmp_path)


@pytest.fixture
def start_matrix(start_pytest, matrix_profile: Path, tmp_path: Path) -> Callable[..., PytestRun]:
    """Start the matrix level on the engine with injected faults (``matrix_engine.py``)."""

    def start(
        *arguments: str, faults: str = "", report: Path | None = None, warm: bool = False
    ) -> PytestRun:
        environment = servers.matrix_variables(faults)
        environment["MATRIX_BOOTS"] = str(tmp_path / "boots.txt")
        directory = [] if report is None else ["--report-dir", str(report)]
        run = start_pytest(
            "-p", "meta_tests.fakes.matrix_engine", "--profile", str(matrix_profile),
            "tests/test_matrix.py", *arguments, *directory, environment=environment, warm=warm,
        )  # fmt: skip
        if report is not None:
            run.report = report
        return run

    return start


@pytest.fixture
def run_matrix(start_matrix) -> Callable[..., tuple[int, PytestRun, dict]]:
    """Run the matrix level to its end; return the status, the run and its matrix.json."""

    def run(*arguments: str, timeout_s: float = 240.0, **options):
        started = start_matrix(*arguments, warm=True, **options)
        status = started.wait(timeout_s)
        file = started.report / "matrix" / "matrix.json"
        return status, started, json.loads(file.read_text()) if file.is_file() else {}

    return run
