"""Item 10: ``--ab`` checks that both sides ran as requested."""

import contextlib
import itertools
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from meta_tests.fakes import servers
from meta_tests.fakes.ab_visits import REVIEW
from meta_tests.fakes.loopback import serving
from meta_tests.fakes.run_events import new_file, stand_in, with_events
from meta_tests.texts import text_file
from meta_tests.two_steps import in_two_steps
from sm121.core import profile
from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_settings import KernelPathRequirement
from sm121.core.level_settings import Regression
from sm121.core.server import Endpoint, Server
from sm121.core.verdict import Undecided
from sm121.engines import requested
from sm121.evidence.kernel_path import KernelPath, read_log
from sm121.regression import ab
from sm121.regression.ab import MetricOfStart, Visit
from sm121.regression.ab_run import AbRun
from sm121.regression.hypothesis import Criterion, Hypothesis
from sm121.regression.side_watch import SideWatch
from sm121.run.machine_report import BoxReport

from . import Case, Kit, Outcome

_CONFIG = (
    "INFO 11-20 10:00:00 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='canary', speculative_config=None, dtype=torch.{dtype}, load_format=auto, "
    "enforce_eager={eager}, enable_prefix_caching=True\n"
    "INFO 11-20 10:00:01 [mxfp4.py:1] Using '{moe}' Mxfp4 MoE backend.\n"
)
_NUMBERS = itertools.count()
#: B is expected to improve by more than the difference between two starts.
_PROMISE = Hypothesis(
    feature="a faster backend",
    hypothesis="This should improve tg32 by 10 % because the experts run on another kernel.",
    criteria=(Criterion(metric="tg32@d0", change_at_least=0.10),),
    review=REVIEW,
)


#: The logs of the starts of each side: the experts, the dtype, and whether graphs are off. The last
#: entry is repeated.
Logs = dict[str, list[dict[str, Any]]]
_USUAL = {"moe": "MARLIN", "dtype": "bfloat16", "eager": False}


class _Deaf(SideWatch):
    def forgotten(self, name: str, server: Server) -> str | None:
        return None  # no server listens after such a start


@dataclass
class _Starts(AbRun):
    """Both sides of an A/B comparison, whose starts are simulated by their logs.

    B is 20 % faster.
    """

    logs: Logs = field(default_factory=dict)
    folder: Path = Path()
    visited: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = _Deaf(self.run, self.sides)

    def _server(self, name: str, side: ab.Side) -> tuple[Server, None]:
        self.visited.append(name)
        log = self.folder / f"server-{len(self.visited)}-{name}.log"
        logs = self.logs[name]
        visit = self.visited.count(name)
        log.write_text(_CONFIG.format(**_USUAL | logs[min(visit, len(logs)) - 1]))
        made = ServerConfiguration(
            name, _OWN.engine, _OWN.python, _OWN.model, _OWN.served_name,
            (*_OWN.arguments, *side.arguments), tuple(side.environment),
        )  # fmt: skip
        endpoint = Endpoint("http://127.0.0.1:9", "x", "canary")
        return Server(endpoint, True, "vllm", None, log, made, None), None

    def _measure(self, name: str, server: Server) -> dict[str, MetricOfStart]:
        value = (1.2 if name == "B" else 1.0) * (100 + 0.1 * len(self.visited))
        return {"tg32@d0": MetricOfStart(value, "tok/s", True)}


_OWN = ServerConfiguration("base", "vllm", "python", "canary", "canary")


def _kernel_path(server: Server) -> KernelPath:
    path = read_log(server.log)
    rows = requested.compare(server.configuration, path, dict(server.configuration.environment))
    return path.model_copy(update={"requested": rows, "differences": requested.different(rows)})


@in_two_steps
def _compared(kit: Kit, sides: Sequence[str], logs: Logs) -> Outcome:
    """Judge one run of an A/B comparison as the two tests of the level do.

    The outcome has the verdicts on the comparison and on the hypothesis."""
    folder = kit.tmp_path / f"compared-{next(_NUMBERS)}"
    folder.mkdir()
    file = new_file(profile="meta", box=BoxReport(state="QUALIFIED", reason=""))
    file.engine.version = "0.32.0"
    parts = stand_in(
        say=lambda *_line: None, redact=str, pool=None, directory=folder,
        of=_kernel_path, managed=lambda _name: _OWN, target=SimpleNamespace(arch="sm121"),
        check_alive=lambda: None,
        file=file,
        profile=SimpleNamespace(
            under_test="base",
            path_of=lambda *_: KernelPathRequirement(moe=("MARLIN", "TRITON"), source="meta"),
            regression=Regression(),
        ),
    )  # fmt: skip
    with_events(parts)
    parsed = ab.parse_sides(sides)
    run = _Starts(
        parts, parsed, None, lambda _side: None, hypothesis=_PROMISE, logs=logs, folder=folder
    )  # fmt: skip
    verdicts = []
    reasons = []
    for judge in (run.judge, run.review):
        try:
            judge()
            verdicts.append("PASS")
        except AssertionError as error:
            verdicts.append("FAIL")
            reasons.append(str(error))
        except Undecided as error:
            verdicts.append(error.verdict.value)
            reasons.append(str(error))
    once = len(run.visited) <= 2 * run.pairs * 2 and len(run.visited) == len(run.visits)
    again = "" if once else f"; started again: {run.visited}"
    both = "PASS" if verdicts == ["PASS", "PASS"] else next(v for v in verdicts if v != "PASS")
    if "PASS" in verdicts and both != "PASS":
        both = f"PASS of one: {verdicts}"
    return Outcome(both, f"{'; '.join(reasons)}{again}{'; '.join(parts.record.file.unproven)}")


@in_two_steps
def _whole_run(kit: Kit, sides: Sequence[str], faults: str = "") -> Outcome:
    """Run ``pytest --ab`` on two URLs, or on an engine whose side B may use a fallback."""
    profile_file = servers.matrix_profile(kit.tmp_path, text_file("lenient.toml"))
    status, run = kit.run_pytest(
        "-p", "meta_tests.fakes.matrix_engine", "--profile", str(profile_file),
        "tests/test_regression.py", "--ab", *sides, "-k", "b_is_not_worse",
        f"--benchmark-storage={kit.tmp_path}/s", timeout_s=240.0,
        environment=servers.matrix_variables(faults),
    )  # fmt: skip
    verdict = run.verdict
    messages = "; ".join(test["message"] for test in verdict["tests"])
    return Outcome(verdict["verdict"], messages, status, bool(verdict.get("certified")))


class _Door(socketserver.ThreadingTCPServer):
    """Another port that forwards to the server which listens on the port ``inside``."""

    daemon_threads = True
    inside = 0


class _Visitor(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.inside)) as server:
            back = threading.Thread(target=_copy, args=(server, self.request), daemon=True)
            back.start()
            _copy(self.request, server)
            back.join(5.0)


def _copy(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _second_door(port: int) -> Iterator[str]:
    door = type("Door", (_Door,), {"inside": port})
    with serving(_Visitor, door) as url:
        yield url


@in_two_steps
def _urls(kit: Kit, same: bool) -> Outcome:
    """Compare two URLs: both of one server behind two ports, or of two servers."""
    first = kit.timed_server("--rate", "500", "--model", "canary").base_url
    if same:
        with _second_door(int(first.rpartition(":")[2])) as other:
            return _whole_run((first, other))(kit)
    other = kit.timed_server("--rate", "500", "--model", "canary").base_url
    return _whole_run((first, other))(kit)


@in_two_steps
def _answers(kit: Kit, sensible: bool) -> Outcome:
    """Compare side A, which answers right, with a side B that answers noise or the same as A."""
    run = AbRun(
        stand_in(redact=str, profile=profile.load("cpu-tiny-gpt-oss")),
        ab.parse_sides(["", "--x"]), None, lambda _side: None,
    )  # fmt: skip
    knows = kit.fault_server()
    noise = kit.timed_server("--rate", "5000", "--model", "canary").base_url
    reason = None
    for name, url in (("A", knows.base_url), ("B", knows.base_url if sensible else noise)):
        endpoint = Endpoint(url, knows.key, "canary")
        reason = run.watch.forgotten(name, Server(endpoint, False, "x", None, None, None, None))
    return Outcome("FAIL" if reason else "PASS", reason or "")


class _Seen(SideWatch):
    def check_process(self, *_visit: object) -> None: ...


@in_two_steps
def _logs(kit: Kit, lines: str) -> Outcome:
    """Compare two sides; between two readings of side B's log, append these lines to the log."""
    log = kit.tmp_path / f"b-{len(lines)}.log"
    decided = []
    log.write_text(f"{_ILLEGAL}\n")  # a line from an earlier time
    parts = stand_in(
        profile=SimpleNamespace(under_test="base", path_of=lambda *_: _NOTHING),
        of=lambda _server: KernelPath(), phase=("regression", "in the run"), redact=str,
        emit=lambda event: decided.append(event.test),
    )  # fmt: skip
    sides = ab.parse_sides(["http://a:1", f"http://b:1 --server-log {log}"])
    run = AbRun(parts, sides, None, lambda _side: None)
    run.watch = _Seen(parts, sides)
    server = Server(Endpoint("http://b:1", "x", "canary"), False, "vllm", None, log, None, None)
    for text in (lines, ""):
        run._check(Visit("B"), server, sides[1])
        log.write_text(log.read_text() + text + "\n")
    message = "; ".join(each.message for each in decided)
    return Outcome("not passed" if decided else "PASS", message)


_ILLEGAL = "ERROR 11-20 10:00:01 [core.py:1] CUDA error: an illegal memory access was encountered"
_NOTHING = KernelPathRequirement(source="meta")
CASES = [
    Case(
        item="10 B that ran something else",
        name="B's log at its URL reports an illegal memory access",
        fault=_logs(_ILLEGAL),
        clean=_logs("INFO 11-20 10:00:01 [a.py:1] fine"),
        expected="log of B",
    ),
    Case(
        item="10 B that ran something else",
        name="B's log at its URL reports NaN",
        fault=_logs("WARNING: NaN in logits"),
        clean=_logs("INFO 11-20 10:00:01 [a.py:1] fine"),
        expected="log of B",
    ),
    Case(
        item="10 B that ran something else",
        name="B's log at its URL reports an ERROR that nobody knows",
        fault=_logs("ERROR: odd"),
        clean=_logs("INFO 11-20 10:00:01 [a.py:1] fine"),
        expected="log of B",
    ),
    Case(
        item="10 B that ran something else",
        name="a fast B answers noise",
        fault=_answers(False),
        clean=_answers(True),
        expected="which A answered correctly at its first turn",
    ),
    Case(
        item="10 B that ran something else",
        name="B fell back to A's kernels",
        fault=_compared(["", "--moe-backend triton"], {"A": [{}], "B": [{}]}),
        clean=_compared(["", "--moe-backend triton"], {"A": [{}], "B": [{"moe": "TRITON"}]}),
        expected="moe resolved to MARLIN",
    ),
    Case(
        item="10 B that ran something else",
        name="B falls back at its second visit only",
        fault=_compared(["", "--moe-backend triton"], {"A": [{}], "B": [{"moe": "TRITON"}, {}]}),
        clean=_compared(["", "--moe-backend triton"], {"A": [{}], "B": [{"moe": "TRITON"}]}),
        expected="B, turn 2",
    ),
    Case(
        item="10 B that ran something else",
        name="A is not on the profile's path",
        fault=_compared(
            ["", "--moe-backend triton"], {"A": [{"moe": "EMULATION"}], "B": [{"moe": "TRITON"}]}
        ),
        clean=_compared(["", "--moe-backend triton"], {"A": [{}], "B": [{"moe": "TRITON"}]}),
        expected="moe: expected MARLIN or TRITON, got EMULATION",
    ),
    Case(
        item="10 B that ran something else",
        name="two spellings of one thing",
        fault=_compared(["--moe-backend marlin", "--moe-backend=marlin"], {"A": [{}], "B": [{}]}),
        clean=_compared(
            ["--moe-backend marlin", "--moe-backend=triton"], {"A": [{}], "B": [{"moe": "TRITON"}]}
        ),
        expected="B ran the same configuration as A",
    ),
    Case(
        item="10 B that ran something else",
        name="B asks for what A has by default",
        fault=_compared(["", "--moe-backend marlin"], {"A": [{}], "B": [{}]}),
        clean=_compared(["", "--moe-backend marlin"], {"A": [{"moe": "TRITON"}], "B": [{}]}),
        expected="B ran the same configuration as A (moe MARLIN)",
    ),
    Case(
        item="10 B that ran something else",
        name="both ask for another dtype, and B does not get it",
        fault=_compared(
            ["--dtype float16", "--dtype float16 --moe-backend triton"],
            {"A": [{"dtype": "float16"}], "B": [{"moe": "TRITON"}]},
        ),
        clean=_compared(
            ["--dtype float16", "--dtype float16 --moe-backend triton"],
            {"A": [{"dtype": "float16"}], "B": [{"moe": "TRITON", "dtype": "float16"}]},
        ),
        expected="--dtype float16",
    ),
    Case(
        item="10 B that ran something else",
        name="B fell back, in a whole run",
        fault=_whole_run(["", "--moe-backend triton"], "fallback:moe-backend+triton"),
        clean=_whole_run(["", "--moe-backend triton"]),
        expected="moe resolved to MARLIN",
        slow=True,
    ),
    Case(
        item="10 B that ran something else",
        name="two ports of one server",
        fault=_urls(True),
        clean=_urls(False),
        expected="are the same server",
        slow=True,
    ),
]
