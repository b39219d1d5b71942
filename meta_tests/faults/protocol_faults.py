"""Inject every fault of the proxy, and run the test that must fail because of it.

Many faults run in one process.

The process runs pytest on the levels once for each fault, which takes one second; a new process for
each fault would take five.

    python -m meta_tests.faults.protocol_faults --output docs/tables/protocol-faults.md
"""

import argparse
import contextlib
import functools
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meta_tests.fakes.fault_proxy import FAULTS, Fault, FaultProxy
from meta_tests.faults import catalogue_rows
from meta_tests.folders import ROOT
from sm121.checkpoint import canary
from sm121.core import profile
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.engines.managed import ManagedServer
from sm121.engines.starting import StartLimits
from sm121.engines.vllm import Vllm
from sm121.evidence import environment

PROFILE = profile.load("cpu-tiny-gpt-oss")
NO_FAULT = Fault("none", "")


@dataclass(frozen=True)
class Outcome:
    """The results of the tests with one fault."""

    fault: str
    status: int
    #: The name, the verdict and the message of each test.
    tests: tuple[tuple[str, str, str], ...]
    seconds: float
    output: str = ""
    #: The duration of each test, in seconds.
    each_s: tuple[float, ...] = ()
    #: The first exception of the proxy itself, which would explain a failure without the fault.
    proxy_error: str = ""

    @property
    def killed(self) -> bool:
        """Whether the named test failed with its requirement.

        With a fault of severity `courtesy`, the run stays green."""
        if self.proxy_error:
            return False
        failed = [message for _, verdict, message in self.tests if verdict == "FAIL"]
        return self.status in (0, 1) and bool(failed) and all(", got " in m for m in failed)


def vllm_serving(
    model: Path,
    directory: Path,
    name: str = PROFILE.under_test,
    *more: str,
    python: str = sys.executable,
    **variables: str,
) -> ManagedServer:
    """Start the real vLLM as the profile does, on a given checkpoint, with additional arguments."""
    settings = PROFILE.configurations[name]
    arguments = (*PROFILE.engine.arguments, *settings.arguments, *more)
    environment_ = environment_items(PROFILE.engine.environment, variables)
    fields = (name, "vllm", python, str(model), PROFILE.model.served_name, arguments)
    configuration = ServerConfiguration(*fields, environment_, speaking_worker=True)
    limits = StartLimits(ready_s=600, stalled_s=180, stop_s=20)
    return ManagedServer(configuration, Vllm(), limits, directory, "meta-catalogue")


def node_id(test: str) -> str:
    """Return the node id of a test of the levels, found by its name."""
    function = test.partition("[")[0]
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        if f"def {function}(" in file.read_text("utf-8"):
            return f"{file.relative_to(ROOT)}::{test}"
    raise LookupError(f"no test of the levels is called {function}")


def outcomes(
    base_url: str, key: str, names: Sequence[str], *, clean: Sequence[str] = ()
) -> Iterator[Outcome]:
    """Run the named faults in a separate process, and yield their outcomes.

    The tests `clean` run first, behind the proxy without a fault."""
    command = [sys.executable, "-m", "meta_tests.faults.protocol_faults"]
    command += ["--base-url", base_url, "--key", key]
    command += [*(f"--clean={test}" for test in clean), *names]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            fields = json.loads(line)
            yield Outcome(**{**fields, "tests": tuple(map(tuple, fields["tests"]))})
    assert process.returncode == 0, f"the process of the faults ended with {process.returncode}"


def run(
    proxy: FaultProxy, fault: Fault, nodes: Sequence[str], key: str, report: Path, *options: str
) -> Outcome:
    """Run tests with one fault in this process."""
    import pytest

    proxy.switch(fault)
    started = time.monotonic()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = pytest.main(
            [
                "-p", "no:cacheprovider", "--assert=plain", "-q", "--tb=short",
                "--rootdir", str(ROOT), "--arch", "cpu", f"--report-dir={report}",
                "--base-url", proxy.base_url, "--api-key", key,
                *(f"{ROOT}/{node}" for node in nodes), *options,
            ]
        )  # fmt: skip
    file = report / "verdict.json"  # empty if the run did not open
    tests_of = json.loads(file.read_text("utf-8"))["tests"] if file.is_file() else []
    results = tuple((test["id"], test["verdict"], test["message"]) for test in tests_of)
    tail = output.getvalue()[-1500:] if status != 1 else ""
    seconds = round(time.monotonic() - started, 1)
    each_s = tuple(test["seconds"] or 0.0 for test in tests_of)
    proxy_error = proxy.errors[0] if proxy.errors else ""
    return Outcome(fault.name, int(status), results, seconds, tail, each_s, proxy_error)


def record_environment_once() -> None:
    """Record the environment only once, because it is the same for every fault.

    This halves the time of a run."""
    once = functools.cache(
        functools.partial(
            environment.record, sys.executable, arguments=(), environment={}, workload={}
        )
    )
    environment.record = lambda *_arguments, **_options: once()


def _run_here(base_url: str, key: str, clean: Sequence[str], names: Sequence[str]) -> None:
    record_environment_once()
    plan = [(NO_FAULT, sorted(set(clean)))] if clean else []
    plan += [(FAULTS[name], [FAULTS[name].caught_by]) for name in names]
    with (
        tempfile.TemporaryDirectory() as folder,
        FaultProxy.listening(base_url, NO_FAULT, key) as proxy,
    ):
        for number, (fault, tests) in enumerate(plan):
            outcome = run(proxy, fault, [*map(node_id, tests)], key, Path(folder) / str(number))
            print(json.dumps(asdict(outcome)), flush=True)


def table(outcomes_of_faults: Sequence[Outcome], clean: Outcome, seconds: float) -> str:
    """Return the table of all faults in Markdown."""
    return catalogue_rows.page(
        "protocol-faults", found=outcomes_of_faults, clean=clean, seconds=seconds, faults=FAULTS
    )


def _catalogue(output: Path) -> int:
    model = canary.build(ROOT / ".cache" / "canary" / "bf16", "bf16")
    with tempfile.TemporaryDirectory() as folder:
        managed = vllm_serving(model, Path(folder))
        server = managed.start()
        started = time.monotonic()
        try:
            endpoint = server.endpoint
            every_outcome = []
            every = [fault.caught_by for fault in FAULTS.values()]
            for outcome in outcomes(endpoint.base_url, endpoint.api_key, [*FAULTS], clean=every):
                every_outcome.append(outcome)
                print(f"{'killed' if outcome.killed else outcome.status}: {outcome.fault}")
        finally:
            managed.stop()
    clean, *broken = every_outcome
    output.write_text(table(broken, clean, time.monotonic() - started), "utf-8")
    survivors = [outcome for outcome in broken if not outcome.killed]
    for outcome in survivors:
        print(f"NOT KILLED: {outcome}")
    if clean.status != 0:
        print(f"THE CLEAN SERVER FAILED: {clean}")
    return 1 if survivors or clean.status != 0 else 0


def main() -> int:
    """Run all faults, or some of them on a running server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="run all of it, and write the table there")
    parser.add_argument("--base-url")
    parser.add_argument("--key", default="")
    parser.add_argument("--clean", action="append", default=[], metavar="TEST")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.output:
        return _catalogue(options.output)
    _run_here(options.base_url, options.key, options.clean, options.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
