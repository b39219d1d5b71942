"""The engine: it ends between tests, its path changes, its log is another's (7, 8, 9)."""

import contextlib
import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import quote

from scripted_engine import lines_of_a_start
from two_steps import in_two_steps

from false_greens import Case, Kit, Outcome
from sm121.core import profile
from sm121.core.verdict import Invalid, Verdict
from sm121.evidence import requirement
from sm121.evidence.kernel_path import read_log
from sm121.measure.measurement import Invalidity, Measurement
from sm121.performance.bench import Bench, PerformanceChecks
from sm121.run.verdict_file import TestReport, VerdictFile
from sm121.session import opening, target
from sm121.session.session import Session
from sm121.session.settings import Settings

HERE = Path(__file__).parent.parent
ROOT = HERE.parent
ENGINE = HERE / "scripted_engine.py"
SCENARIO = "meta_tests/scenarios/engine_events.py"
VARIABLES = {"SM121_META_PYTHON": sys.executable, "SM121_META_SERVER": ENGINE.name}

Doing = Callable[[Session], None]
_NUMBERS = itertools.count()


def script(kit: Kit, name: str, doing: Doing, **settings: object) -> Outcome:
    """A script's session, in which all that was asked held, on the scripted engine."""
    chosen = Settings(
        profile=profile.load("cpu-tiny-gpt-oss"), engine_python=str(HERE / "fake_python.py"),
        report_dir=kit.tmp_path / name, root=ROOT,
    )  # fmt: skip
    with opening.open_session(dataclasses.replace(chosen, **settings)) as session:
        session.ledger.decide(TestReport(id="script::check", level="smoke", verdict=Verdict.PASS))
        doing(session)
    file = session.file
    return Outcome(file.verdict.value, file.reason, file.exit_status, bool(file.certified))


@in_two_steps
def scripted(kit: Kit, doing: Doing, arguments: str = "") -> Outcome:
    variables = {**VARIABLES, "SM121_META_ARGUMENTS": arguments}
    with mock.patch.dict(os.environ, variables):
        return script(kit, f"script-{next(_NUMBERS)}", doing)


def tell(session: Session, do: str, configuration: str | None = None) -> None:
    """Tell the server of a configuration what to do, and wait until it was done."""
    with session.server(configuration).endpoint.http() as http:
        http.get(f"/meta?{do}")
    time.sleep(1.0)


# 7: a server that ended though nobody asked it to.


@in_two_steps
def ends(session: Session, do: str, *then: str) -> None:
    """It is told to do this; then servers of these configurations are wanted."""
    tell(session, f"do={do}")
    for configuration in then:
        session.server(configuration)


def is_restarted_by_us(session: Session) -> None:
    session.server()
    session.stop()
    session.server("bfloat16")
    session.server()


def lives(session: Session) -> None:
    session.server()
    time.sleep(0.3)
    session.server()


@in_two_steps
def run_of_pytest(kit: Kit, do: str, *tests: str) -> Outcome:
    status, ran = kit.run_pytest(
        "--arch", "cpu", "--engine-python", str(HERE / "fake_python.py"),
        "--kernel-trace", "off", *tests, SCENARIO,
        environment={**VARIABLES, "SM121_META_DO": do},
    )  # fmt: skip
    verdict = ran.verdict
    return Outcome(verdict["verdict"], verdict["reason"], status, bool(verdict["certified"]))


@contextlib.contextmanager
def attached_engine(log: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The scripted engine started by hand: its address, and its process."""
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


@dataclasses.dataclass(frozen=True)
class Replaced:
    """Another process takes the place of an attached server, after a rate of it was recorded.
    `start`: arguments of the server. `then`: of the one after it; None: it stays. `proxy`:
    arguments of a proxy in front of both; None: both listen at the URL. `measuring`: it happens
    between two rounds of a second rate, and not between two tests. `with_log`: the log of the first
    is given. `core`: its engine core alone ends, and it starts another."""

    start: Sequence[str] = ()
    then: Sequence[str] | None = ()
    proxy: Sequence[str] | None = None
    measuring: bool = False
    with_log: bool = False
    core: bool = False

    @property
    def stays(self) -> "Replaced":
        """Its twin: nothing happens to the server."""
        return dataclasses.replace(self, then=None)

    def __call__(self, kit: Kit) -> Outcome:
        folder = kit.tmp_path / f"attached-{time.monotonic_ns()}"
        folder.mkdir()
        log, url_file = folder / "server.log", folder / "url"
        files: list[VerdictFile] = []
        with contextlib.ExitStack() as servers:
            url, process = servers.enter_context(attached_engine(log, *self.start))
            address = url
            if self.proxy is not None:
                url_file.write_text(url)
                forward = ("--forward", str(url_file), *self.proxy)
                address, _ = servers.enter_context(attached_engine(folder / "proxy.log", *forward))

            def doing(session: Session) -> None:
                files.append(session.file)
                with session.server().endpoint.http() as http:
                    for _ in range(3):
                        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9})
                session.recorder.record(rate("tg32@d0"))
                session.look_at_the_server()  # as between two tests
                if self.core and self.then is not None:
                    tell(session, "do=core&number=9")
                elif self.then is not None:
                    process.terminate()
                    process.wait(10)
                    time.sleep(2.1)  # a start of the same second is not told apart
                    port = ("--port", url.rpartition(":")[2]) if self.proxy is None else ()
                    other = attached_engine(folder / "other.log", *port, *self.start, *self.then)
                    url_file.write_text(servers.enter_context(other)[0])
                if self.measuring:
                    with contextlib.suppress(Invalid):
                        session.recorder.record(rate("tg128@d0"))

            settings = {"base_url": address, "server_log": log if self.with_log else None}
            outcome = script(kit, f"{folder.name}-report", doing, **settings)
        numbers = {metric.verdict.value for metric in files[0].metrics.values()}
        assert numbers == {"PASS" if self.then is None else "INVALID"}, outcome
        is_hidden = "/metrics" in (self.proxy or ())
        doubt = "not proven that one process served to the end"
        summary = (kit.tmp_path / f"{folder.name}-report" / "summary.md").read_text()
        if self.then is None:  # what a PASS may not be taken for
            assert (doubt in summary) == is_hidden, summary
        assert (files[0].engine.unwatched in files[0].unproven) == is_hidden, files[0].unproven
        return outcome


def replacements() -> Iterator[Case]:
    """The rows of ``meta_tests/data/replaced-servers.toml``."""
    rows = tomllib.loads((HERE / "data" / "replaced-servers.toml").read_text("utf-8"))
    for name, row in rows.items():
        expected, slow = row.pop("expected"), row.pop("slow", True)
        fault = Replaced(**row)
        item = "17 An attached server is replaced behind its URL"
        yield Case(item, name, fault, fault.stays, expected, slow)


def rate(name: str) -> Measurement:
    return Measurement(name=name, unit="tok/s", samples=[50.0, 50.1], higher_is_better=True)


# 8: what the path is later, and of which start.

FALLBACK = "INFO 11-20 10:00:00 [mxfp4.py:499] Using 'EMULATION' Mxfp4 MoE backend."


@in_two_steps
def says_later(session: Session, line: str) -> None:
    server = session.server()
    assert not session.contradictions(server)  # as the kernel level does
    tell(session, f"do=print&text={quote(line)}")


@in_two_steps
def says_before_a_restart(session: Session, line: str) -> None:
    says_later(line)(session)
    session.stop()
    session.server("bfloat16")


@in_two_steps
def on_a_gb10(kit: Kit, *lines: str) -> Outcome:
    """What a GB10's log of these lines is, against the profile's path."""
    log = kit.tmp_path / f"gb10-{len(lines)}.log"
    log.write_text("\n".join(lines) + "\n", "utf-8")
    required = profile.load("sm121-gpt-oss-120b").judging("marlin", "0.33.0").path_of("marlin")
    wrong = requirement.contradictions(required, read_log(log), log, "marlin")
    return Outcome("FAIL" if wrong else "PASS", "; ".join(map(str, wrong)))


@in_two_steps
def measured(_kit: Kit, *, leaves_the_path: bool) -> Outcome:
    """A rate that is read while the log says that the path was left."""
    invalid: list[Invalidity] = []
    off_path = [Invalidity(reason="kernel_path", evidence=FALLBACK)] if leaves_the_path else []
    metric = SimpleNamespace(
        of=lambda _: rate("tg32@d0"), unit="tok/s", first_visit=False, is_tail=False,
        parts=lambda _: (), settle=lambda _: None,
    )  # fmt: skip
    plan = SimpleNamespace(depths=(0,), measuring=SimpleNamespace(maximum_rounds=2))
    bench = Bench(SimpleNamespace(), plan, off_path=lambda: off_path)
    bench.cell = lambda *_, **__: None
    PerformanceChecks(bench, lambda item, *_, **__: invalid.extend(item.invalid)).judge(metric)
    return Outcome("INVALID" if invalid else "PASS", "; ".join(str(item) for item in invalid))


def path_in_a_run_of_pytest(line: str) -> Callable[[Kit], Outcome]:
    test = "tests/test_kernel.py::test_kernel_path_is_the_required_one"
    return run_of_pytest(f"do=print&text={quote(line)}", test)


# 9: whose log it is.


def file_of(kit: Kit, url: str, log: Path) -> VerdictFile:
    """The verdict file of a script's session at a URL, with a log."""
    file: list[VerdictFile] = []

    def doing(session: Session) -> None:
        session.server()
        file.append(session.file)

    script(kit, f"{log.stem}-report", doing, base_url=url, server_log=log)
    return file[0]


def two_logs(kit: Kit) -> tuple[Path, Path]:
    """Files for the log of a server, and for the one that is given for it."""
    number = next(_NUMBERS)
    return kit.tmp_path / f"own-{number}.log", kit.tmp_path / f"given-{number}.log"


@in_two_steps
def given_log(kit: Kit, write: Callable[[Path, Path], None], *server: str) -> Outcome:
    """The kernel path of an attached server, from a log that `write` makes of the server's own.
    Whether it is proven is what is asked: FAIL where it is not."""
    log, copy = two_logs(kit)
    with attached_engine(log, *server) as (url, _), writing(write, log, copy):
        file = file_of(kit, url, copy)
    unproven = "; ".join(file.unproven)
    proven = file.engine.path.attention == "CPU_ATTN" and not unproven
    return Outcome("PASS" if proven else "INVALID", unproven)


@contextlib.contextmanager
def writing(write: Callable[[Path, Path], None], log: Path, copy: Path) -> Iterator[None]:
    """`write` over and over, as somebody would who keeps a log going."""
    write(log, copy)
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.05):
            write(log, copy)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def its_own(log: Path, copy: Path) -> None:
    if not copy.exists():
        copy.symlink_to(log)


def a_copy(log: Path, copy: Path) -> None:
    if not copy.exists():
        copy.write_text(log.read_text("utf-8"), "utf-8")


@in_two_steps
def with_a_start(log: Path, copy: Path, *, in_days: float = 0.0, **start: Any) -> None:
    """The start of another server, then what this one says of its requests."""
    access = [line for line in log.read_text("utf-8").splitlines() if "HTTP/1.1" in line]
    if in_days:
        start["at"] = time.time() + in_days * 86400
    put(copy, lines_of_a_start(**start) + "\n".join([*access, ""]))


@in_two_steps
def a_copy_that_goes_on(log: Path, copy: Path, line: str) -> None:
    """Another process appends a line to it, over and over."""
    a_copy(log, copy)
    with copy.open("a") as stream:
        stream.write(line + "\n")


def beginning_cut_off(log: Path, copy: Path) -> None:
    lines = log.read_text("utf-8").splitlines(keepends=True)
    put(copy, "".join(lines[9:]))


def put(file: Path, text: str) -> None:
    """All of it at once: nobody reads half a file."""
    new = file.with_suffix(".new")
    new.write_text(text, "utf-8")
    new.replace(file)


@in_two_steps
def its_log_has_another_start(kit: Kit, *, share: bool) -> Outcome:
    """Two servers write into one file; the second one's path is not the first one's."""
    log = kit.tmp_path / f"shared-{share}.log"
    other = log.with_name(f"other-{share}.log")
    with attached_engine(log) as (url, _):
        if share:
            other.hardlink_to(log)
        with attached_engine(other, "--attention", "TRITON_ATTN"):
            unproven = "; ".join(file_of(kit, url, log).unproven)
    return Outcome("INVALID" if unproven else "PASS", unproven)


@in_two_steps
def log_is_moved(kit: Kit, move: Callable[[Path], object], line: str) -> Outcome:
    """An attached server's log is cut, renamed or removed after its path was judged."""
    log, _ = two_logs(kit)

    def doing(session: Session) -> None:
        session.contradictions(session.server())
        move(log)
        tell(session, f"do=print&text={quote(line)}")

    with attached_engine(log) as (url, _):
        return script(kit, f"{log.stem}-report", doing, base_url=url, server_log=log)


@in_two_steps
def dies_behind_a_proxy(kit: Kit, *, dies: bool) -> Outcome:
    def doing(session: Session) -> None:
        session.server()
        session.look_at_the_server()
        if dies:
            process.kill()
            process.wait()

    url_file = kit.tmp_path / f"url-{dies}"
    with attached_engine(kit.tmp_path / f"proxied-{dies}.log") as (behind, process):
        url_file.write_text(behind)
        log = kit.tmp_path / f"proxy-{dies}.log"
        with attached_engine(log, "--forward", str(url_file)) as (url, _):
            return script(kit, f"proxied-{dies}-report", doing, base_url=url)


@in_two_steps
def log_of_an_ab_side(kit: Kit, write: Callable[[Path, Path], None]) -> Outcome:
    log, copy = two_logs(kit)
    with attached_engine(log) as (url, _):
        write(log, copy)
        chosen = profile.load("cpu-tiny-gpt-oss")
        server = target.attach_to(url, copy, Settings(), chosen)
    reason = server.why_no_log if server.log is None else ""
    return Outcome("INVALID" if reason else "PASS", reason)


#: What becomes of a log.
cut, removed = functools.partial(os.truncate, length=0), Path.unlink


def renamed(log: Path) -> None:
    log.rename(log.with_suffix(".1"))


#: vLLM 0.32 on a CPU says this at each start; the profile accepts it.
ACCEPTED = (
    "WARNING 11-20 10:00:00 [vllm.py:725] Model Runner V2 requires Triton; "
    "using the V1 model runner instead."
)
BANNER = "(APIServer pid=1) INFO 11-20 10:00:00 [api_utils.py:286] vLLM API server version 0.32.0"
FLASHINFER = (
    "(EngineCore pid=2) INFO 11-20 10:00:00 [cuda.py:507] Using FLASHINFER "
    "attention backend out of potential backends: x"
)
TRITON = (
    "(EngineCore pid=2) INFO 11-20 10:00:00 [cuda.py:446] Using "
    "AttentionBackendEnum.TRITON_ATTN backend."
)
MARLIN = "(EngineCore pid=2) INFO 11-20 10:00:00 [mxfp4.py:499] Using 'MARLIN' Mxfp4 MoE backend."
OTHER_MOE = (
    "(EngineCore pid=2) INFO 11-20 10:00:00 [mxfp4.py:499] Using 'TRITON' Mxfp4 MoE backend."
)
LAYOUT = "(EngineCore pid=2) INFO 11-20 10:00:00 [utils.py:347] Using LBHNC KV cache layout."
REQUEST = (
    "(EngineCore pid=2) INFO 11-20 10:00:00 [logger.py:40] Received request "
    "cmpl-1: prompt: \"Using 'MARLIN' Mxfp4 MoE backend.\""
)
RATES = (
    "(EngineCore pid=2) INFO 11-20 10:00:00 [loggers.py:335] Avg prompt "
    "throughput: 12.0 tokens/s, x"
)
ACCESS = 'INFO:     10.0.0.7:1234 - "POST /v1/completions HTTP/1.1" 200 OK'

CASES = [
    Case(
        item="7 A crash between tests",
        name="SIGSEGV after a test of the smoke level; a later test gets a fresh server",
        fault=run_of_pytest("do=signal&number=11"),
        clean=run_of_pytest(""),
        expected="the server ended with status -11",
    ),
    Case(
        item="7 A crash between tests",
        name="SIGSEGV after the last look of a script",
        fault=scripted(ends("signal&number=11")),
        clean=scripted(lives),
        expected="seen: in the run: the server ended with status -11",
    ),
    Case(
        item="7 A crash between tests",
        name="it ends by itself with status 0",
        fault=scripted(ends("exit&status=0", "float32")),
        clean=scripted(is_restarted_by_us),
        expected="the server ended with status 0",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="dead when another configuration is asked for",
        fault=scripted(ends("signal&number=9", "bfloat16")),
        clean=scripted(is_restarted_by_us),
        expected="the server ended with status -9",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="its engine core is dead, its API process lives",
        fault=scripted(ends("core&number=9", "float32")),
        clean=scripted(lives),
        expected="the server answers /health with 503",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="its engine core crashes, and it starts another by itself",
        fault=scripted(ends("core&number=9", "float32"), "--heals"),
        clean=scripted(lives, "--heals"),
        expected="ended by SIGKILL",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="it crashes while it is stopped",
        fault=scripted(lives, "--crashes-at-the-end"),
        clean=scripted(lives),
        expected="it died of SIGSEGV",
    ),
    Case(
        item="7 A crash between tests",
        name="an attached server dies, and the proxy before it answers 502",
        fault=dies_behind_a_proxy(dies=True),
        clean=dies_behind_a_proxy(dies=False),
        expected="its model is named no more (/v1/models: HTTP 502)",
        slow=True,
    ),
    Case(
        item="8 The path is judged once",
        name="a fallback is logged after the path was judged",
        fault=scripted(says_later(FALLBACK)),
        clean=scripted(says_later(ACCEPTED)),
        expected="the server stays on the path of the profile until it is closed",
    ),
    Case(
        item="8 The path is judged once",
        name="a fallback is logged, and another configuration is started before the end",
        fault=scripted(says_before_a_restart(FALLBACK)),
        clean=scripted(says_before_a_restart(ACCEPTED)),
        expected="the server stays on the path of the profile until it is closed",
        slow=True,
    ),
    Case(
        item="8 The path is judged once",
        name="a fallback in a run of pytest, after the kernel level",
        fault=path_in_a_run_of_pytest(FALLBACK),
        clean=path_in_a_run_of_pytest(ACCEPTED),
        expected="fallback moe_emulation",
        slow=True,
    ),
    Case(
        item="8 The path is judged once",
        name="a fallback is logged during a measurement",
        fault=measured(leaves_the_path=True),
        clean=measured(leaves_the_path=False),
        expected="kernel_path",
    ),
    Case(
        item="8 The path is judged once",
        name="FLASHINFER for some layers and TRITON_ATTN for others",
        fault=on_a_gb10(BANNER, FLASHINFER, MARLIN, LAYOUT, TRITON),
        clean=on_a_gb10(BANNER, FLASHINFER, MARLIN, LAYOUT, FLASHINFER),
        expected="attention: required one value, seen FLASHINFER and TRITON_ATTN",
    ),
    Case(
        item="8 The path is judged once",
        name="MARLIN for some layers and TRITON for others",
        fault=on_a_gb10(BANNER, FLASHINFER, MARLIN, LAYOUT, OTHER_MOE),
        clean=on_a_gb10(BANNER, FLASHINFER, MARLIN, LAYOUT, MARLIN),
        expected="moe: required one value, seen MARLIN and TRITON",
    ),
    Case(
        item="8 The path is judged once",
        name="an old start in the log has what the new one has not",
        fault=on_a_gb10(BANNER, FLASHINFER, MARLIN, LAYOUT, BANNER, FLASHINFER, LAYOUT),
        clean=on_a_gb10(BANNER, TRITON, OTHER_MOE, BANNER, FLASHINFER, MARLIN, LAYOUT),
        expected="no line of the log matches",
    ),
    Case(
        item="9 Any log proves an attached server",
        name="the server logs no request",
        fault=given_log(its_own, "--no-access-log"),
        clean=given_log(its_own),
        expected="no line of it follows requests",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="two servers write into one log",
        fault=its_log_has_another_start(share=True),
        clean=its_log_has_another_start(share=False),
        expected="several servers write it",
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a copy of the right log, to which a server with a steady load appends",
        fault=given_log(a_copy_that_goes_on(RATES)),
        clean=given_log(its_own),
        expected="no line of it follows requests",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a log whose beginning was rotated away",
        fault=given_log(beginning_cut_off),
        clean=given_log(its_own),
        expected="it has no start of vllm",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="its engine core ends by signal 1, and it starts another by itself",
        fault=scripted(ends("core&number=1", "float32"), "--heals"),
        clean=scripted(lives, "--heals"),
        expected="of the engine ended with status -1",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="its engine core ends by signal 10, and it starts another by itself",
        fault=scripted(ends("core&number=10", "float32"), "--heals"),
        clean=scripted(lives, "--heals"),
        expected="of the engine ended with status -10",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="its engine core ends by signal 15, and it starts another by itself",
        fault=scripted(ends("core&number=15", "float32"), "--heals"),
        clean=scripted(lives, "--heals"),
        expected="of the engine ended with status -15",
        slow=True,
    ),
    Case(
        item="8 The path is judged once",
        name="a user's request has the words that must be seen",
        fault=on_a_gb10(BANNER, FLASHINFER, LAYOUT, REQUEST),
        clean=on_a_gb10(BANNER, FLASHINFER, LAYOUT, MARLIN),
        expected="no line of the log matches",
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a log of another version, which grows with our requests",
        fault=given_log(with_a_start(version="0.24.0")),
        clean=given_log(its_own),
        expected="the log is of vllm 0.24.0, the server is 0.32.0",
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a log of another model, which grows with our requests",
        fault=given_log(with_a_start(model="other", path="/models/other")),
        clean=given_log(its_own),
        expected="the log is of the model other",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a log whose start is a year old",
        fault=given_log(with_a_start(in_days=-363)),
        clean=given_log(its_own),
        expected="the log's last start is of",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a log whose start is of tomorrow",
        fault=given_log(with_a_start(in_days=1)),
        clean=given_log(its_own),
        expected="the log's last start is of",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a copy of the right log, which does not grow",
        fault=given_log(a_copy),
        clean=given_log(its_own),
        expected="no line of it follows requests",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a copy of the right log, to which another process appends",
        fault=given_log(a_copy_that_goes_on(ACCESS)),
        clean=given_log(its_own),
        expected="no line of it follows requests",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a copy of the right log, given to a side of --ab",
        fault=log_of_an_ab_side(a_copy),
        clean=log_of_an_ab_side(its_own),
        expected="no line of it follows requests",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a fallback after the log was cut",
        fault=log_is_moved(cut, FALLBACK),
        clean=log_is_moved(cut, ACCEPTED),
        expected="the server stays on the path of the profile until it is closed",
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a fallback after the log was renamed",
        fault=log_is_moved(renamed, FALLBACK),
        clean=log_is_moved(renamed, ACCEPTED),
        expected="the server stays on the path of the profile until it is closed",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a fallback after the log was removed",
        fault=log_is_moved(removed, FALLBACK),
        clean=log_is_moved(removed, ACCEPTED),
        expected="the server stays on the path of the profile until it is closed",
        slow=True,
    ),
    *replacements(),
]
