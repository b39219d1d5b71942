"""What the stress tests are given: the server under load, each load checked as a whole."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from sm121.answers.agreement import Bound
from sm121.answers.log_probabilities import bound_for
from sm121.answers.prompts import continuations
from sm121.client.completions import Asker
from sm121.client.connection import Patience
from sm121.client.load import Job, LoadClient, LoadResult
from sm121.core import architecture
from sm121.core.files import write_text
from sm121.core.server import Server
from sm121.core.verdict import Inconclusive, NotRun, Verdict, worst
from sm121.engines.capabilities import Capabilities, Name
from sm121.measure import counters, growth
from sm121.measure.growth import Growth
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import LEVEL
from sm121.plugin.terminal import announce
from sm121.report import memory_file
from sm121.report.memory_file import MemoryFile
from sm121.run.verdict_file import MemoryReport
from sm121.stress import aftermath, checks, kept, shapes, soak
from sm121.stress.fault import Fault, Kind, UnderLoad, sorted_faults
from sm121.stress.shapes import Arrival, Shapes
from sm121.stress.timeline import Sample, Timeline

_NEEDED: tuple[Name, ...] = ("completions", "token_ids", "ignore_eos")
#: Requests of a reading of the throughput, and tokens of each.
_READING = (6, 48)
_READINGS = 4
_WAIT_BETWEEN_READINGS_S = 15.0
_OTHERS_OF_NOTE = 0.1
#: vLLM's --max-num-batched-tokens where it is not given.
_CHUNK_TOKENS = 2048
#: More load where the memory is undecided.
_MEMORY_ROUNDS = 3
_MEMORY_WITHIN_S = 180.0
#: During a soak the samples are written so seldom, and for at most one in so many seconds.
_KEEP_MEMORY_EVERY_S = 30.0
_KEEP_MEMORY_COST = 50.0
_CACHE_TOKENS = re.compile(r'cache_config_info\{[^}]*\bnum_gpu_blocks="(\d+)"')
_BLOCK_TOKENS = re.compile(r'cache_config_info\{[^}]*\bblock_size="(\d+)"')


class Stress:
    """One server under load."""

    def __init__(self, run: Run, server: Server, capabilities: Capabilities) -> None:
        capabilities.require(*_NEEDED)
        self._run = run
        self._server = server
        self._capabilities = capabilities
        self._sizes = run.profile.stress
        own = bound_for(run.profile.correctness.agreement, server, run.profile, "agreement")
        self._bound = Bound(own.max_abs, own.mean_abs, own.fork)
        self.client = LoadClient(
            server.endpoint,
            Patience(self._sizes.request_within_s.value, self._sizes.stalled_after_s.value),
            stop=lambda: run.aborted,
        )
        self.shapes = Shapes(
            model=server.endpoint.served_name,
            prompts=continuations().prompts,
            ask=Asker(server).ask,
            salted=capabilities.engine == "vllm",
            log_probabilities=self._bound.fork > 0,
        )
        self.timeline = Timeline(
            self._processes,
            server.endpoint,
            completed=lambda: self.client.completed,
            floor_bytes=self._sizes.memory_floor_gib.value * 2**30,
            on_floor=run.abort,
        )
        self.memory: list[Growth] = []
        self._steady_from: int | None = None
        run.observer = self  # before the first load: also that one may end in a crash
        self.timeline.start()
        try:
            self._before = self._throughput()
        except BaseException:
            self.timeline.stop()
            raise

    def under_way(self) -> list[dict[str, Any]]:
        """The requests that are under way at this moment."""
        return [outcome.record() for outcome in self.client.under_way()]

    def memory_record(self) -> dict[str, Any]:
        """The samples of memory so far."""
        return self.timeline.record()

    @property
    def metrics(self) -> str | None:
        """The server's /metrics as they were last read; None before."""
        return self.timeline.metrics

    # The loads, each as the profile says.

    def sequential(self) -> None:
        """One after the other."""
        count = int(self._sizes.sequential_requests.value)
        self._play("sequential", self._take(self.shapes.short, count), concurrency=1)

    def concurrent(self) -> None:
        """All at once."""
        count = int(self._sizes.concurrent_requests.value)
        self._play("concurrent", self._take(self.shapes.short, count), concurrency=count)

    def sustained(self) -> None:
        """So many, so many at a time; its steady part is what memory is judged by."""
        count = int(self._sizes.load_requests.value)
        self._steady_from = len(self.timeline.samples)
        load = self._play(
            "sustained",
            self._take(self.shapes.short, count),
            concurrency=int(self._sizes.load_concurrency.value),
        )
        self._show_tail("sustained", load)

    def long_generation(self) -> None:
        """One long answer."""
        tokens = int(self._sizes.long_generation_tokens.value)
        self._play("long generation", [self.shapes.long(tokens, _READING[1])])

    def arriving(self, kind: Arrival) -> None:
        """Requests of all lengths, arriving in one of the ways in which users do."""
        count = int(self._sizes.mixed_requests.value)
        self._play(
            f"mixed lengths, {kind} arrivals",
            self._take(self.shapes.mixed, count),
            concurrency=int(self._sizes.load_concurrency.value),
            arrivals=shapes.moments(kind, count, self._sizes.arrivals_per_s.value),
            tails=False,
        )

    def unruly(self) -> None:
        """Clients that cancel, disconnect and read slowly, and requests that must be refused."""
        count = int(self._sizes.mixed_requests.value)
        self._play(
            "unruly clients",
            self._take(self.shapes.unruly, count),
            concurrency=int(self._sizes.load_concurrency.value),
            tails=False,
        )

    def brim(self) -> None:
        """A prompt and its answer that fill the context to the last token; a prompt that is longer
        by one is refused."""
        self._capabilities.require("token_prompts")
        tokens = int(self._sizes.answer_tokens.value)
        longest = self._longest()
        full = self.shapes.of_length(longest - tokens, tokens)
        ids = full.body["prompt"]
        body = {**full.body, "prompt": [*ids, *ids[: longest + 1 - len(ids)]]}
        beyond = Job("a prompt longer than the context", body, tokens, behaviour="bad")
        self._play("context filled to the brim", [full, beyond], concurrency=1)

    def pressed(self) -> None:
        """More at a time than the KV cache holds: some are preempted, and nobody notices."""
        self._capabilities.require("token_prompts")
        streams = int(self._sizes.load_concurrency.value)
        blocks, block = self._cache_blocks()
        before = counters.fetch(self._server.endpoint)
        if before is None or "preemptions" not in before.values:
            raise NotRun("whether anything is preempted is not known: /metrics has no counter")
        # All must be let in, and grow by more than what is free then. The last one is let in when
        # a whole chunk of its prompt fits, twice where layers have a sliding window; what that
        # took beyond the window is free afterwards.
        chunk = self._chunk_tokens()
        tokens = chunk // streams + max(2 * min(block, 16), block // 4)
        fits = min((blocks - 1 - 2 * (chunk // block)) // (streams - 1), (blocks - 1) // streams)
        for spare in (2, 3, 1):
            length = (fits - spare) * block - block // 16
            if length > self._longest() - tokens:
                raise NotRun(
                    f"{streams} requests of {self._longest()} tokens do not fill a KV cache of "
                    f"{blocks * block} tokens; a smaller one (--num-gpu-blocks-override) would be "
                    "pressed"
                )
            jobs = [self.shapes.of_length(length, tokens, turn=n % 2) for n in range(streams)]
            self._play("KV pressure", jobs, concurrency=streams, tails=False)
            after = counters.fetch(self._server.endpoint)
            preempted = after.since(before)["preemptions"] if after is not None else 0.0
            peak = max((s.cache_usage or 0.0 for s in self.timeline.samples), default=0.0)
            if preempted:
                self._say(f"{preempted:g} preemptions, KV cache {peak:.0%} full")
                return
        raise Inconclusive(
            f"{streams} requests of {length} + {tokens} tokens in a KV cache of "
            f"{blocks * block}: required a preemption, seen none (usage {peak:.0%} at most)"
        )

    def soak(self, duration_s: float) -> None:
        """Mixed load for so long, in rounds, each checked as every load is."""
        target = self._run.directory / "soak.json"
        streams = int(self._sizes.load_concurrency.value)
        count = int(self._sizes.mixed_requests.value)
        sources = [self.shapes.short, self.shapes.mixed, self.shapes.unruly]
        self._steady_from = len(self.timeline.samples)
        failed: list[UnderLoad] = []
        next_memory = 0.0

        def play(number: int) -> soak.Round:
            jobs = self._take(sources[number % len(sources)], count)
            kind = shapes.ARRIVALS[number % len(shapes.ARRIVALS)]
            when = shapes.moments(kind, count, self._sizes.arrivals_per_s.value, seed=number)
            load = self.client.run(jobs, concurrency=streams, arrivals=when)
            found = self._faults(load, tails=False)
            if found:
                failed.append(UnderLoad(f"soak, round {number}", found, len(jobs)))
            return soak.Round(
                number,
                round(load.started - self.timeline.began, 1),
                len(jobs),
                load.tokens,
                round(load.seconds, 3),
                [str(fault) for fault in found],
            )

        def write(record: dict[str, Any]) -> None:
            nonlocal next_memory
            began = time.monotonic()
            # All samples are written each time: of a long soak seldom enough to cost nothing.
            if record["state"] != soak.GOING_ON or began >= next_memory:
                self._keep_memory()
                now = time.monotonic()
                next_memory = now + max(_KEEP_MEMORY_EVERY_S, _KEEP_MEMORY_COST * (now - began))
            text = json.dumps(record, indent=2) + "\n"
            write_text(self._run.redact(text), target)

        soak.Soak(duration_s, play, write, self._say).run()
        if failed:
            raise failed[0]
        if len(self.timeline.since(self._steady_from)) >= 4 * growth.LEAST_SAMPLES:
            self.memory_holds(more=False)
        self.throughput_holds()

    # What must hold afterwards.

    def throughput_holds(self) -> None:
        """As fast as before all load, within the profile's bound.

        On a CPU that others use meanwhile the clock says little: there the tokens for each second
        of processor time may show that it is as fast.
        """
        allowed = self._sizes.throughput_drop.value
        before = self._before
        for attempt in range(_READINGS):
            after = self._throughput()
            by_clock = after.rate >= (1.0 - allowed) * before.rate
            shared = self._run.target.arch == architecture.CPU and after.others > _OTHERS_OF_NOTE
            # Time is lost to others only where the server was ready to run and had to wait.
            lost_s = after.tokens / after.rate - after.tokens / before.rate
            waited = after.waited_s >= 0.5 * lost_s
            as_much = after.per_cpu_s >= (1.0 - allowed) * before.per_cpu_s
            by_work = shared and waited and as_much
            if by_clock or by_work:
                self._say(
                    f"throughput {before.rate:.1f} tok/s before, {after.rate:.1f} after the load"
                    + ("" if by_clock else f"; as much work for each CPU second, {_others(after)}")
                )
                return
            if attempt + 1 < _READINGS:
                time.sleep(_WAIT_BETWEEN_READINGS_S)
        text = (
            f"required at least {(1.0 - allowed) * before.rate:.1f} tok/s "
            f"({allowed:.0%} below the {before.rate:.1f} before the load), seen {after.rate:.1f}"
        )
        limit = self._run.profile.box.max_other_load if self._run.profile.box else 0.25
        unexplained = self._run.target.arch == architecture.CPU and not waited
        if after.others > limit and not unexplained:
            raise Inconclusive(f"{text}, {_others(after)}")
        raise UnderLoad("after the load", [Fault("slower_after_load", text)], 0)

    def nothing_kept(self) -> None:
        """No request, no KV block, no zombie."""
        found = [
            aftermath.not_idle(self._server.endpoint),
            aftermath.zombies(self._processes),
        ]
        faults = [fault for fault in found if fault is not None]
        if faults:
            raise UnderLoad("after the load", faults, 0)

    def memory_holds(self, *, more: bool = True) -> None:
        """Memory and handles do not grow with the requests, by the sustained load's steady part."""
        if self._steady_from is None:
            raise NotRun("the sustained load was not run: it is what memory is judged by")
        began, tries = time.monotonic(), 0
        while True:
            self.memory = self._growth()
            if not more or all(g.verdict is not Verdict.INCONCLUSIVE for g in self.memory):
                break
            # A fast server is through with the load before there are samples of it.
            tries += all(g.samples >= growth.LEAST_SAMPLES for g in self.memory)
            if tries >= _MEMORY_ROUNDS or time.monotonic() - began > _MEMORY_WITHIN_S:
                break
            count = int(self._sizes.load_requests.value)
            self._play(
                "sustained, once more for the memory",
                self._take(self.shapes.short, count),
                concurrency=int(self._sizes.load_concurrency.value),
            )
        self._keep_memory()
        for item in self.memory:
            self._say(f"{item.verdict.value}: {item.reason}")
        if not self.memory:
            raise NotRun("the attached server's memory is not known here")
        wrong = [item for item in self.memory if item.verdict is Verdict.FAIL]
        if wrong:
            raise UnderLoad("memory", [_growth_fault(item) for item in wrong], 0)
        undecided = [item for item in self.memory if item.verdict is Verdict.INCONCLUSIVE]
        if undecided:
            raise Inconclusive("; ".join(item.reason for item in undecided))

    def restarted_under_load(self) -> None:
        """Stopped in the middle of a load: clients learn of it at once, nothing is left, and the
        next start answers as the last one did."""
        run = self._run
        if run.pool is None or run.pool.current is None:
            raise NotRun("an attached server is not restarted: it is somebody else's")
        streams = int(self._sizes.load_concurrency.value)
        # More than can have ended when the stop arrives, also of a server that is very fast.
        jobs = self._take(self.shapes.short, 10 * int(self._sizes.load_requests.value))
        checked = {job.name: job for job in jobs}
        before = {outcome.number for outcome in self.client.under_way()}
        ended_before = self.client.completed
        loads: list[LoadResult] = []
        loading = threading.Thread(
            target=lambda: loads.append(self.client.run(jobs, concurrency=streams)), daemon=True
        )
        loading.start()
        while loading.is_alive():
            under_way = {outcome.number for outcome in self.client.under_way()} - before
            if self.client.completed - ended_before >= streams and under_way:
                break
            time.sleep(0.005)
        self.timeline.stop()
        stopped_at = time.monotonic()
        report = run.pool.stop()
        loading.join(timeout=30.0)
        assert not loading.is_alive(), (
            "required: every client learns of the stop within 30 s, seen: some still wait"
        )
        assert report is not None and report.clean, (
            f"required: nothing left of a server stopped under load, seen: {report}"
        )
        faults = [
            fault
            for fault in checks.faults(loads[0], self._bound, stopped_at=stopped_at)
            if fault.kind not in ("connection", "bad_stream", "http_5xx")
        ]
        if faults:
            raise UnderLoad("stopped under load", sorted_faults(faults), len(jobs))
        broken_off = sum(
            outcome.problem is not None or checks.is_aborted(outcome, stopped_at)
            for outcome in loads[0].outcomes
        )
        again = run.server()
        client = LoadClient(again.endpoint, self.client.patience, stop=self.client.stop)
        load = client.run(list(checked.values()), concurrency=streams)
        faults = checks.faults(load, self._bound)
        if faults:
            raise UnderLoad("after the restart", sorted_faults(faults), len(checked))
        if not 0 < broken_off < len(jobs):
            raise Inconclusive(
                "required a server that was stopped while requests were under way, seen: "
                f"{broken_off} of {len(jobs)} broken off"
            )

    def close(self) -> None:
        """Sample no more, and keep what was sampled."""
        self.timeline.stop()
        self._keep_memory()

    def _play(
        self,
        what: str,
        jobs: Sequence[Job],
        *,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        tails: bool = True,
    ) -> LoadResult:
        load = self.client.run(jobs, concurrency=concurrency, arrivals=arrivals)
        found = self._faults(load, tails=tails)
        if found:
            raise UnderLoad(what, found, len(jobs))
        return load

    def _faults(self, load: LoadResult, *, tails: bool) -> list[Fault]:
        found = checks.faults(load, self._bound)
        if tails:
            tail = checks.slow_tail(
                load, self._sizes.tail_factor.value, self._sizes.tail_floor_s.value
            )
            found += [tail] if tail is not None else []
        if not found:
            busy = aftermath.not_idle(self._server.endpoint)
            found += [busy] if busy is not None else []
        return sorted_faults(found)

    def _throughput(self) -> _Reading:
        """Tokens a second of single streams, the median of some."""
        count, tokens = _READING
        jobs = [job for job in itertools.islice(self.shapes.short(tokens), count) if job.streamed]
        used = _Used.now(self._processes())
        load = self.client.run(jobs, concurrency=1)
        own, waited, others = used.since(self._processes())
        wrong = checks.faults(load, self._bound)
        if wrong:
            raise UnderLoad("one request at a time", sorted_faults(wrong), len(jobs))
        rates = [
            (o.received - 1) / (o.last - o.first)
            for o in load.outcomes
            if o.first is not None and o.last is not None and o.last > o.first
        ]
        if not rates:
            raise NotRun("no rate: the answers came in one piece")
        return _Reading(
            statistics.median(rates), load.tokens, load.tokens / max(own, 1e-9), waited, others
        )

    def _growth(self) -> list[Growth]:
        assert self._steady_from is not None
        samples = self.timeline.since(self._steady_from)
        if not samples:
            return []
        limits = kept.Limits(
            fraction=self._sizes.memory_growth_fraction.value,
            most_bytes=self._sizes.memory_growth_gb.value * 1e9,
            bytes_per_request=self._sizes.memory_growth_kib_per_request.value * 1024,
            handles_per_request=self._sizes.handles_growth_per_request.value,
        )
        on_cpu = self._run.target.arch == architecture.CPU
        machine = None if on_cpu else psutil.virtual_memory().total
        return kept.judged(samples, limits, machine_bytes=machine)

    def _keep_memory(self) -> None:
        record = MemoryFile(**self.timeline.record(), growth=self.memory)
        target = self._run.directory / memory_file.NAME
        write_text(record.model_dump_json() + "\n", target)
        samples = self.timeline.since(0)
        self._run.file.memory = MemoryReport(
            file=target.name,
            device_memory=self.timeline.device.source,
            samples=len(samples),
            peak_bytes=max((s.pss_bytes or s.rss_bytes for s in samples), default=None),
            available_min_bytes=min((s.available_bytes for s in samples), default=None),
            growth=self.memory,
            curve=_curve(samples),
            verdict=worst(g.verdict for g in self.memory),
        )

    def _show_tail(self, what: str, load: LoadResult) -> None:
        seconds = sorted(o.seconds for o in load.outcomes if o.seconds is not None)
        self._say(
            f"{what}: {len(seconds)} requests in {load.seconds:.1f} s, "
            f"{load.tokens / load.seconds:.1f} tok/s, median {statistics.median(seconds):.2f} s, "
            f"slowest {seconds[-1]:.2f} s, 0 failed"
        )

    def _take(self, source: Any, count: int) -> list[Job]:
        return list(itertools.islice(source(int(self._sizes.answer_tokens.value)), count))

    def _processes(self) -> list[psutil.Process]:
        return self._run.pool.processes() if self._run.pool is not None else []

    def _longest(self) -> int:
        with self._server.endpoint.http() as http:
            models = http.get("/v1/models").json()["data"]
        for entry in models:
            if entry.get("id") == self._server.endpoint.served_name and entry.get("max_model_len"):
                return int(entry["max_model_len"])
        raise NotRun("the length of the context is not known: /v1/models has no max_model_len")

    def _cache_blocks(self) -> tuple[int, int]:
        with self._server.endpoint.http() as http:
            text = http.get("/metrics").text
        blocks, size = _CACHE_TOKENS.search(text), _BLOCK_TOKENS.search(text)
        if blocks is None or size is None:
            raise NotRun("the size of the KV cache is not known: no vllm:cache_config_info")
        return int(blocks[1]), int(size[1])

    def _chunk_tokens(self) -> int:
        """Tokens of a prompt that are worked on at once."""
        own = self._server.configuration
        arguments = own.arguments if own is not None else ()
        for name, value in itertools.pairwise(arguments):
            if name == "--max-num-batched-tokens" and value.isdecimal():
                return int(value)
        return _CHUNK_TOKENS

    def _say(self, line: str) -> None:
        announce(self._run.config, "stress", line)


def _growth_fault(item: Growth) -> Fault:
    kind: Kind = "handle_growth" if item.quantity == kept.HANDLES else "memory_growth"
    return Fault(kind, item.reason)


def _curve(
    samples: Sequence[Sample], points: int = 200
) -> list[tuple[float, int, int, float | None]]:
    """(s, bytes of the tree, bytes available, KV usage), few enough to be drawn."""
    step = max(1, -(-len(samples) // points))
    return [
        (s.at_s, s.pss_bytes or s.rss_bytes, s.available_bytes, s.cache_usage)
        for s in samples[::step]
    ]


@dataclass(frozen=True)
class _Reading:
    """A reading of the throughput."""

    rate: float
    tokens: int
    #: Tokens for each second of the processor that the server used.
    per_cpu_s: float
    #: Seconds for which threads of the server were ready to run and others had the processor.
    waited_s: float
    #: Share of the CPU that others took.
    others: float


def _others(reading: _Reading) -> str:
    return f"while others took {reading.others:.0%} of the CPU"


@dataclass(frozen=True)
class _Used:
    """Processor time used by all, by the server, and by this process, in seconds."""

    at: float
    all: float
    server: float
    suite: float
    waited: float

    @classmethod
    def now(cls, processes: Iterable[psutil.Process]) -> _Used:
        server = waited = 0.0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                server += times.user + times.system
            for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError, IndexError, ValueError):
                    waited += int(file.read_text("ascii").split()[1]) / 1e9
        busy = psutil.cpu_times()
        own = psutil.Process().cpu_times()
        return cls(
            time.monotonic(),
            float(sum(busy) - busy.idle - busy.iowait),
            server,
            own.user + own.system,
            waited,
        )

    def since(self, processes: Iterable[psutil.Process]) -> tuple[float, float, float]:
        """Seconds of the processor that the server used meanwhile, and that it waited for; the
        share of the CPU that others took."""
        now = _Used.now(processes)
        server = now.server - self.server
        others = (now.all - self.all) - server - (now.suite - self.suite)
        seconds = (now.at - self.at) * (psutil.cpu_count() or 1)
        return server, now.waited - self.waited, max(0.0, others / max(seconds, 1e-9))


_STRESS = pytest.StashKey[tuple[Server, Stress]]()


@pytest.fixture
def stress(conformance: Run, server: Server, capabilities: Capabilities) -> Stress:
    """The server under load (see `Stress`); one for as long as the server lives."""
    stash = conformance.config.stash
    known = stash.get(_STRESS, None)
    if known is not None and known[0] is server:
        return known[1]
    if known is not None:
        known[1].close()
    made = Stress(conformance, server, capabilities)
    stash[_STRESS] = (server, made)
    return made


@pytest.fixture
def soak_s(pytestconfig: pytest.Config) -> float:
    """How long ``--soak`` says."""
    return soak.parse_duration(pytestconfig.getoption("--soak"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The other levels are not sampled every second: they measure."""
    stash = item.config.stash
    if item.stash.get(LEVEL, None) == "stress":
        return
    if (known := stash.get(_STRESS, None)) is not None:
        known[1].close()
        del stash[_STRESS]
    if (run := stash.get(RUN, None)) is not None:
        run.observer = None  # what it saw is of this server under load, and of no later one


@pytest.hookimpl(tryfirst=True)  # before the server is stopped
def pytest_sessionfinish(session: pytest.Session) -> None:
    known = session.config.stash.get(_STRESS, None)
    if known is not None and session.config.stash.get(RUN, None) is not None:
        known[1].close()
