"""Tools for testing the suite: real processes, real servers with known faults, whole runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from sm121.engines.process_tree import marked, reap

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent
#: A project of its own: `test_downstream.py` runs it.
collect_ignore = ["downstream"]
#: Leaves out what needs torch or an engine, where neither can be installed.
LIGHT = "SM121_META_LIGHT" in os.environ
if LIGHT:
    _TORCH = re.compile(r"^(import|from) (torch|kernel_mutants|oss_harmony)\b", re.M)
    collect_ignore += [f.name for f in HERE.glob("test_*.py") if _TORCH.search(f.read_text())]

# OpenMP's threads spin while they wait for each other: two processes with two threads each take ten
# times as long on two cores as with one each.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

MARK = "SM121_META_TEST"
#: Files that take minutes, the longest first: begun last, each would keep one of `make test`'s two
#: workers busy while the other one has nothing left to do.
LONG = (
    "test_run_endings.py",
    "test_fault_catalogue.py",
    "test_model_faults.py",
    "test_recording.py",
    "test_managed_server.py",
    "test_false_greens.py",
    "test_bad_input.py",
    "test_order_of_events.py",
    "test_matrix_shards.py",
    "test_gb10.py",
    "test_python_api.py",
    "test_install.py",
    "test_kernel_mutants.py",
    "test_kernel_provider.py",
    "test_process_hygiene.py",
    "test_ci_examples.py",
    "test_turns.py",
    "test_architecture.py",
    "test_report_files.py",
    "test_stress_faults.py",
    "test_kernel_path_real.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors here. In a run of the levels they may be anybody's, and never are."""
    config.addinivalue_line("markers", "alone: it measures time, and has the machine for itself")
    config.addinivalue_line("filterwarnings", "error")
    # "no file to compare with", "another machine": for the user to read, no crash of pytest.
    config.addinivalue_line(
        "filterwarnings", "default::pytest_benchmark.logger.PytestBenchmarkWarning"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if LIGHT and (
        heavy := [i for i in items if {"canary_bf16", "canary_mxfp4"} & {*i.fixturenames}]
    ):
        config.hook.pytest_deselected(items=heavy)
        items[:] = [item for item in items if item not in heavy]
    rank = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONG)))


@pytest.fixture(scope="session")
def canary_bf16() -> Path:
    """The BF16 twin of the canary, as the conformance run uses it."""
    from sm121.checkpoint import canary

    return canary.build(ROOT / ".cache" / "canary" / "bf16", "bf16")


@pytest.fixture(scope="session")
def canary_mxfp4() -> Path:
    """The MXFP4 twin of the canary."""
    from sm121.checkpoint import canary

    return canary.build(ROOT / ".cache" / "canary" / "mxfp4", "mxfp4")


@dataclass
class PytestRun:
    """A run of pytest in a process of its own, with everything it starts marked."""

    process: subprocess.Popen[str]
    output_file: Path
    report: Path
    mark: str
    seen: dict[int, float] = field(default_factory=dict)
    segments_before: set[str] = field(default_factory=set)
    temporary: Path = Path()

    @property
    def output(self) -> str:
        return self.output_file.read_text("utf-8", "replace")

    @property
    def verdict(self) -> dict:
        return json.loads((self.report / "verdict.json").read_text("utf-8"))

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Wait until the output contains ``text``, remembering the processes of the tree."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_s} s:\n{self.output}"
            time.sleep(0.2)
        self.remember()

    def remember(self) -> None:
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        for process in [*self.tree(), *descendants]:
            try:
                self.seen[process.pid] = process.create_time()
            except psutil.NoSuchProcess:
                continue

    def tree(self) -> list[psutil.Process]:
        return marked(MARK, self.mark)

    def wait(self, timeout_s: float = 120.0) -> int:
        return self.process.wait(timeout_s)

    def left(self, timeout_s: float = 30.0) -> list[str]:
        """Processes of the run that are still there after ``timeout_s``, zombies included."""
        deadline = time.monotonic() + timeout_s
        while True:
            # Testing ManagedServer makes this process a subreaper: orphans of the run are ours.
            reap(pid for pid in self.seen if pid != self.process.pid)
            left = [str(process) for process in self.tree()]
            for pid, created in self.seen.items():
                try:
                    process = psutil.Process(pid)
                    if process.create_time() == created and str(process) not in left:
                        left.append(str(process))
                except psutil.NoSuchProcess:
                    continue
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)


@pytest.fixture
def start_pytest(tmp_path: Path) -> Iterator[Callable[..., PytestRun]]:
    """Start pytest on the suite, as a user does, and clean up after it whatever happens."""
    runs: list[PytestRun] = []

    def start(
        *arguments: str, environment: dict[str, str] | None = None, beside_others: bool = True
    ) -> PytestRun:
        mark = uuid.uuid4().hex
        number = len(runs)
        output = tmp_path / f"output-{number}.txt"
        report = tmp_path / f"report-{number}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        with output.open("w") as stream:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-p",
                    "no:cacheprovider",
                    "--report-dir",
                    str(report),
                    # Our own tests run in parallel, and need not wait for each other.
                    *(("--share-machine",) if beside_others else ()),
                    *arguments,
                ],
                cwd=ROOT,
                env={**inherited, MARK: mark, **(environment or {})},
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
    """Run pytest to its end; exit status and the run."""

    def run(*arguments: str, timeout_s: float = 120.0, **options) -> tuple[int, PytestRun]:
        started = start_pytest(*arguments, **options)
        return started.wait(timeout_s), started

    return run


@dataclass
class FaultServer:
    """A running fault server, and where it listens."""

    process: subprocess.Popen[str]
    base_url: str
    key: str


@pytest.fixture
def fault_server() -> Iterator[Callable[..., FaultServer]]:
    """Start ``fault_server.py`` with a fault; it is stopped after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(fault: str = "none", key: str = "meta-key") -> FaultServer:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "fault_server.py"), "--port", "0", "--fault", fault],
            env={**os.environ, "VLLM_API_KEY": key},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        line = ""
        while not line.startswith("listening on "):
            line = process.stdout.readline()
            assert line, f"the fault server ended with {process.wait()}"
        port = int(line.split()[-1])
        return FaultServer(process, f"http://127.0.0.1:{port}", key)

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@dataclass
class TimedServer:
    """A running timed server, where it listens, and its log of what it really sent."""

    process: subprocess.Popen[str]
    base_url: str
    log: Path

    def truth(self) -> list[dict]:
        """A record for each request that was answered to its end, in the order of arrival."""
        records = [json.loads(line) for line in self.log.read_text("utf-8").splitlines()]
        return sorted(records, key=lambda record: record["received_ns"])


@pytest.fixture
def timed_server(tmp_path: Path) -> Iterator[Callable[..., TimedServer]]:
    """Start ``timed_server.py`` with some arguments; it is stopped after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> TimedServer:
        log = tmp_path / f"truth-{len(started)}.jsonl"
        process = subprocess.Popen(
            [sys.executable, str(HERE / "timed_server.py"), "--log", str(log), *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), f"the timed server ended: {process.wait()}"
        return TimedServer(process, f"http://127.0.0.1:{line.split()[-1]}", log)

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def matrix_profile(tmp_path: Path) -> Path:
    """The profile of ``matrix_engine.py``, with a checkpoint that is none."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    text = (HERE / "data" / "matrix-profile.toml").read_text()
    text = text.replace('"CHECKPOINT"', f'"{checkpoint}"')
    text = text.replace('"AXES"', f'"{HERE / "data" / "matrix-axes.toml"}"')
    profile = tmp_path / "meta.toml"
    profile.write_text(text)
    return profile


@pytest.fixture
def start_matrix(start_pytest, matrix_profile: Path, tmp_path: Path) -> Callable[..., PytestRun]:
    """Start the matrix level on the engine with planted faults (``matrix_engine.py``)."""

    def start(*arguments: str, faults: str = "", report: Path | None = None) -> PytestRun:
        environment = {
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "MATRIX_FAULTS": faults,
            "MATRIX_BOOTS": str(tmp_path / "boots.txt"),
        }
        given = [] if report is None else ["--report-dir", str(report)]
        run = start_pytest(
            "-p", "matrix_engine", "--profile", str(matrix_profile), "tests/test_matrix.py",
            *arguments, *given, environment=environment,
        )  # fmt: skip
        if report is not None:
            run.report = report
        return run

    return start


@pytest.fixture
def run_matrix(start_matrix) -> Callable[..., tuple[int, PytestRun, dict]]:
    """Run the matrix level to its end; status, the run and its matrix.json."""

    def run(*arguments: str, timeout_s: float = 240.0, **options):
        started = start_matrix(*arguments, **options)
        status = started.wait(timeout_s)
        file = started.report / "matrix" / "matrix.json"
        return status, started, json.loads(file.read_text()) if file.is_file() else {}

    return run
