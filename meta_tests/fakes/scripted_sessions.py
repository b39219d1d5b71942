"""Script sessions on the scripted engine, which is started by the suite or by a test."""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from meta_tests.faults.false_greens import Kit, Outcome
from meta_tests.folders import FAKES, ROOT
from meta_tests.two_steps import in_two_steps
from sm121.core import profile
from sm121.core.verdict import Verdict
from sm121.engines.options import GivenEngine
from sm121.measure.measurement import Measurement
from sm121.run.events import Decided
from sm121.run.verdict_file import TestReport
from sm121.session import opening
from sm121.session.given_attached import GivenServer
from sm121.session.options import GivenTarget
from sm121.session.session import Session
from sm121.session.settings import Settings

ENGINE = FAKES / "scripted_engine.py"
SCENARIO = "meta_tests/whole/scenarios/engine_events.py"
VARIABLES = {"SM121_META_PYTHON": sys.executable, "SM121_META_SERVER": ENGINE.name}
Doing = Callable[[Session], None]
_NUMBERS = itertools.count()


def script(
    kit: Kit,
    name: str,
    doing: Doing,
    *,
    attached: GivenServer | None = None,
    model: str | None = None,
) -> Outcome:
    """Open a script session on the scripted engine, in which all checks have passed so far."""
    chosen = Settings(
        target=GivenTarget(profile=profile.load("cpu-tiny-gpt-oss"), model=model),
        attached=attached,
        engine=GivenEngine(python=str(FAKES / "fake_python.py")),
        report_dir=kit.tmp_path / name,
        root=ROOT,
    )
    with opening.open_session(chosen) as session:
        check = TestReport(id="script::check", level="smoke", verdict=Verdict.PASS)
        session.run.record.emit(Decided(check))
        doing(session)
    file = session.run.record.file
    return Outcome(file.verdict.value, file.reason, file.exit_status, bool(file.certified))


@in_two_steps
def scripted(kit: Kit, doing: Doing, arguments: str = "") -> Outcome:
    variables = {**VARIABLES, "SM121_META_ARGUMENTS": arguments}
    with mock.patch.dict(os.environ, variables):
        return script(kit, f"script-{next(_NUMBERS)}", doing)


def tell(session: Session, do: str, configuration: str | None = None) -> None:
    """Send a command to the server of a configuration, and wait until it is executed."""
    with session.run.server(configuration).endpoint.http() as http:
        http.get(f"/meta?{do}")
    time.sleep(1.0)


@in_two_steps
def run_of_pytest(kit: Kit, do: str, *tests: str) -> Outcome:
    status, ran = kit.run_pytest(
        "--arch", "cpu", "--engine-python", str(FAKES / "fake_python.py"),
        "--kernel-trace", "off", *tests, SCENARIO,
        environment={**VARIABLES, "SM121_META_DO": do},
    )  # fmt: skip
    verdict = ran.verdict
    return Outcome(verdict["verdict"], verdict["reason"], status, bool(verdict["certified"]))


@contextlib.contextmanager
def attached_engine(log: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the scripted engine without the suite, and yield its address and its process."""
    port = log.with_suffix(".port")
    port.unlink(missing_ok=True)
    with log.open("a") as stream:
        process = subprocess.Popen(
            [sys.executable, str(ENGINE), "--port-file", str(port), *arguments],
            stdout=stream, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while not (port.is_file() and port.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port.read_text()}", process
    finally:
        process.terminate()
        process.wait(10)


def rate(name: str) -> Measurement:
    return Measurement(name=name, unit="tok/s", samples=[50.0, 50.1], higher_is_better=True)


FALLBACK = "INFO 11-20 10:00:00 [mxfp4.py:499] Using 'EMULATION' Mxfp4 MoE backend."

#: vLLM 0.32 on a CPU logs this at each start; the profile accepts it.
ACCEPTED = (
    "WARNING 11-20 10:00:00 [vllm.py:725] Model Runner V2 requires Triton; "
    "using the V1 model runner instead."
)
