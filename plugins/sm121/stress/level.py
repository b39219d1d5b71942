"""The stress level: loads of every shape, each checked as a whole, and what must hold afterwards::

stress = Stress(harness, harness.server(), capabilities, bound) stress.sustained()
stress.memory_holds() stress.close()."""

import itertools
import json
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from sm121.answers.oracle_tolerance import bound_for
from sm121.answers.prompts import continuations
from sm121.api.client import Api
from sm121.api.sampled import Sampler
from sm121.client.completions import Asker
from sm121.client.connection import Patience
from sm121.client.jobs import Job, LoadResult
from sm121.client.load import LoadClient
from sm121.core import architecture, files, level_settings
from sm121.core.server import Server, require_context
from sm121.core.verdict import Inconclusive, NotRun, Verdict
from sm121.engines.capabilities import Capabilities
from sm121.measure import counters, growth
from sm121.measure.timeline import Timeline
from sm121.performance.bench import requested_slots, slots
from sm121.run.harness import Harness, Load
from sm121.stress import aftermath, checks, memory, restart, shapes, soak
from sm121.stress.checks import Fault, UnderLoad
from sm121.stress.crowd import Crowd, CrowdedSamples, size
from sm121.stress.joining import LONGEST, Joining

#: The share of a load's counted requests that is sent however slow the machine is.
_LEAST_SHARE = 0.5
#: More load where the memory is undecided.
_MEMORY_ROUNDS = 3
_MEMORY_WITHIN_S = 180.0
#: During a soak the samples are written so seldom, and for at most one in so many seconds.
_KEEP_MEMORY_EVERY_S = 30.0
_KEEP_MEMORY_COST = 50.0


class Stress:
    """One server under load, from the reading of its throughput before any load until `close`. The
    sizes and limits are the profile's (``[stress]``). A load returns when every answer of it is
    right; else it raises `UnderLoad`, with all that is wrong. `harness`: told of the server's state
    by `Harness.load`; memory.json and soak.json go to its directory. `bound`: how far an answer
    may be from the one that its prompt has alone (default: the profile's for the server's dtype).
    Raises NotRun: the server cannot do what all loads need, or does not stream; UnderLoad: it does
    not even answer one request at a time."""

    def __init__(
        self,
        harness: Harness,
        server: Server,
        capabilities: Capabilities,
        bound: level_settings.AgreementBound | None = None,
    ) -> None:
        has_ids = capabilities.can("token_ids")
        capabilities.require("completions", "ignore_eos", *(() if has_ids else ("logprob_ids",)))
        if bound is None:
            profile = harness.profile
            bound = bound_for(profile.correctness.agreement, server, profile, "agreement")
        self._harness = harness
        self._server = server
        self._capabilities = capabilities
        self._bound = bound
        self._sizes = sizes = harness.profile.stress
        self._streams = int(sizes.load_concurrency.value)
        self.client = LoadClient(
            server.endpoint,
            Patience(sizes.request_within_s.value, sizes.stalled_after_s.value),
            stop=lambda: harness.aborted,
        )
        self._asker = Asker(server)
        self.shapes = shapes.Shapes(
            model=server.endpoint.served_name,
            prompts=continuations().prompts,
            ask=self._asker.ask,
            salted=capabilities.engine == "vllm",
            log_probabilities=bound.fork > 0 or not has_ids,
            refuses=lambda case: capabilities.deviation(case, "served") is None,
        )
        self.timeline = Timeline(
            harness.processes,
            server.endpoint,
            completed=lambda: self.client.completed,
            floor_bytes=sizes.memory_floor_gib.value * 2**30,
            on_floor=harness.abort,
        )
        tokens = int(sizes.answer_tokens.value)
        sampler = Sampler(Api(server.endpoint, capabilities), secrets.randbits(30))
        samples = CrowdedSamples(sampler, self.shapes)
        self._crowd = Crowd(self.shapes, self.client, capabilities, bound, tokens, samples)
        self._growths: list[growth.Growth] = []
        #: Index of the first sample that memory is judged by.
        self._steady_from: int | None = None
        # Before the first load: also that one may end in a crash.
        harness.load = Load(self.client, self.timeline)
        self.timeline.start()
        try:
            self._before = self._read_throughput()
        except BaseException:
            self.timeline.stop()
            raise

    def close(self) -> None:
        """Sample no more, and keep what was sampled."""
        self.timeline.stop()
        self._keep_memory()

    def sequential(self) -> None:
        """One after the other."""
        count = int(self._sizes.sequential_requests.value)
        jobs = self._take(self.shapes.short, count)
        self._play("sequential", jobs, concurrency=1, least_share=_LEAST_SHARE)

    def concurrent(self) -> None:
        """All at once."""
        count = int(self._sizes.concurrent_requests.value)
        self._play("concurrent", self._take(self.shapes.short, count), concurrency=count)

    def sustained(self) -> None:
        """So many, so many at a time; its steady part is what memory is judged by."""
        self._steady_from = len(self.timeline.samples)
        load = self._play_sustained("sustained")
        seconds = sorted(o.seconds for o in load.outcomes if o.seconds is not None)
        self._say(
            f"sustained: {len(seconds)} requests in {load.seconds:.1f} s, "
            f"{load.tokens / load.seconds:.1f} tok/s, median {statistics.median(seconds):.2f} s, "
            f"slowest {seconds[-1]:.2f} s, 0 failed"
        )

    def long_generation(self) -> None:
        """One long answer. Each part of it is asked for again, after all that is before it: the
        same tokens must come, and the same text."""
        tokens = int(self._sizes.long_generation_tokens.value)
        require_context(self._server.context_tokens(), 32, tokens)  # its prompt is a short one
        job = self.shapes.long(tokens, aftermath.TOKENS)
        (outcome,) = self._play("long generation", [job], concurrency=1).outcomes
        answer = outcome.answer
        if answer is not None and answer.ids is not None and answer.prompt_ids is not None:
            parts = self.shapes.parts(answer.prompt_ids, answer.ids, answer)
            name = "long generation, in parts"
            load = self._play(name, parts, concurrency=self._streams, tails=False)
            texts = checks.text_by_its_parts(answer, load.outcomes, self._asker.vocabulary)
            if texts is not None:
                raise UnderLoad(name, [texts], len(parts))
            return
        compared = f"only the first {aftermath.TOKENS} tokens are compared"
        self._harness.remark(f"long generation: {compared}, since the engine gives no token ids")

    def arriving(self, kind: shapes.Arrival) -> None:
        """Requests of all lengths, arriving in one of the ways in which users do."""
        count = int(self._sizes.mixed_requests.value)
        self._play(
            f"mixed lengths, {kind} arrivals",
            self._take(self.shapes.mixed, count),
            concurrency=self._streams,
            arrivals=shapes.moments(kind, count, self._sizes.arrivals_per_s.value),
            tails=False,
            least_share=_LEAST_SHARE,
        )

    def crowd(self, times: int) -> None:
        """Requests of all kinds at once, so many times as many as the server has places."""
        jobs = self._crowd.jobs(self._crowded(times))
        faults = self._crowd.faults(self.client.run(jobs))
        name = f"a crowd of {len(jobs)} requests"
        if faults := faults or self._kept():
            raise UnderLoad(name, faults, len(jobs))
        kinds = ", ".join(dict.fromkeys(job.kind for job in jobs))
        self._say(f"{name}: each answer is its own ({kinds})")
        if self._crowd.refused:
            self._harness.remark(f"{name}: the server refuses alone: {self._crowd.refused}")

    def joining(self) -> None:
        """One short prompt at a time joins n that decode, for each n that the server runs."""
        self._capabilities.require("token_prompts", "token_ids")
        most = slots(self._harness, self._server) or self._streams
        lasts_s = self._sizes.joining_s.value
        longest = shapes.context_tokens(self._server)
        if longest < 2 * LONGEST:
            raise NotRun(f"prompts of {LONGEST} tokens do not fit well into a context of {longest}")
        source = Joining(self.shapes, self._server.endpoint, most, lasts_s, longest)
        load = self.client.follow(source)
        if faults := self._faults(load, tails=False):
            broken = any(outcome.problem for outcome in load.outcomes)
            name = load.outcomes[-1].job.name if broken else "short prompts join those that decode"
            raise UnderLoad(name, faults, len(load.outcomes))
        limit = requested_slots(self._harness, self._server)
        if limit is None and source.counts and source.missing():
            raise NotRun("how many requests this server runs at once is not known (--server-log)")
        source.require_all()
        by = ", ".join(f"{n}: {times}" for n, times in sorted(source.joined.items()))
        self._say(f"short prompts joined so many that decode, so often: {by}; all answers right")

    def unruly(self) -> None:
        """Clients that cancel, disconnect and read slowly, and requests that must be refused."""
        jobs = self._take(self.shapes.unruly, int(self._sizes.mixed_requests.value))
        self._play(
            "unruly clients",
            jobs,
            concurrency=self._streams,
            tails=False,
            least_share=_LEAST_SHARE,
        )

    def brim(self) -> None:
        """A prompt and its answer that fill the context; one longer by a token is refused."""
        self._capabilities.require("token_prompts", "token_ids")
        tokens = int(self._sizes.answer_tokens.value)
        longest = shapes.context_tokens(self._server)
        full = self.shapes.of_length(longest - tokens, tokens)
        ids = full.body["prompt"]
        body = {**full.body, "prompt": [*ids, *ids[: longest + 1 - len(ids)]]}
        beyond = Job("a prompt longer than the context", body, tokens, behaviour="bad")
        self._play("context filled to the brim", [full, beyond], concurrency=1)

    def pressed(self) -> None:
        """More at a time than the KV cache holds: some are preempted, and nobody notices."""
        self._capabilities.require("token_prompts", "token_ids")
        streams = self._streams
        blocks, block = shapes.cache_blocks(self._server.endpoint)
        before = counters.fetch(self._server.endpoint)
        if before is None or "preemptions" not in before.values:
            raise NotRun("whether anything is preempted is not known: /metrics has no counter")
        longest = shapes.context_tokens(self._server)
        chunk = shapes.chunk_tokens(self._server)
        fewer = -(-streams * min(longest, 4 * chunk) // block)
        needed = (
            f"start it with a smaller cache (--engine-arg=--num-gpu-blocks-override={fewer} "
            f"--engine-arg=--max-model-len={min(longest, 4 * chunk)})"
        )
        for spare in (2, 3, 1):
            load = shapes.pressure(blocks, block, chunk=chunk, streams=streams, spare=spare)
            length, tokens = load.prompt, load.answer
            if length > longest - tokens:
                raise NotRun(
                    f"{streams} requests of {longest} tokens do not fill a KV cache of "
                    f"{blocks * block} tokens: {needed}"
                )
            jobs = [self.shapes.of_length(length, tokens, turn=n % 2) for n in range(streams)]
            self._play("KV pressure", jobs, concurrency=streams, tails=False, preempts=True)
            after = counters.fetch(self._server.endpoint)
            preempted = after.since(before)["preemptions"] if after is not None else 0.0
            peak = max((s.cache_usage or 0.0 for s in self.timeline.samples), default=0.0)
            if preempted:
                self._say(f"{preempted:g} preemptions, KV cache {peak:.0%} full")
                return
        raise Inconclusive(
            f"{streams} requests of {length} + {tokens} tokens in a KV cache of "
            f"{blocks * block}: required a preemption, seen none (usage {peak:.0%} at most); "
            f"{needed}"
        )

    def soak(self, duration_s: float) -> None:
        """Mixed load for so long, in rounds, each checked as every load is, every fourth a crowd of
        all kinds; then memory, where there are samples enough, and throughput."""
        count = int(self._sizes.mixed_requests.value)
        sources = [self.shapes.short, self.shapes.mixed, self.shapes.unruly]
        self._steady_from = len(self.timeline.samples)
        failed: list[UnderLoad] = []
        next_memory = 0.0

        def play(number: int) -> soak.Round:
            if number % 4 == 0:
                jobs = self._crowd.jobs(self._crowded(2), often=True)
                load = self.client.run(jobs)
                faults = self._crowd.faults(load) or self._kept()
            else:
                jobs = self._take(sources[number % len(sources)], count)
                kind = shapes.ARRIVALS[number % len(shapes.ARRIVALS)]
                when = shapes.moments(kind, count, self._sizes.arrivals_per_s.value, seed=number)
                load = self.client.run(jobs, concurrency=self._streams, arrivals=when)
                faults = self._faults(load, tails=False)
            if faults:
                failed.append(error := UnderLoad(f"soak, round {number}", faults, len(jobs)))
                faults = error.faults
            return soak.Round(
                number,
                round(load.started - self.timeline.began, 1),
                len(jobs),
                load.tokens,
                round(load.seconds, 3),
                [str(fault) for fault in faults],
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
            files.write_text(self._harness.redact(text), self._harness.directory / "soak.json")

        soak.run(duration_s, play, write, self._say)
        if failed:
            raise failed[0]
        if len(self.timeline.since(self._steady_from)) >= 4 * growth.LEAST_SAMPLES:
            self.memory_holds(more=False)
        self.throughput_holds()

    def restarted_under_load(self) -> None:
        """Stopped in the middle of a load: clients learn of it at once, nothing is left, and the
        next start answers as the last one did."""
        pool = self._harness.pool
        if pool is None or pool.current is None:
            raise NotRun("an attached server is not restarted: it is somebody else's")
        # More than can have ended when the stop arrives, also of a server that is very fast.
        jobs = self._take(self.shapes.short, 10 * int(self._sizes.load_requests.value))
        line = restart.under_load(
            self._harness,
            self.client,
            jobs,
            self._streams,
            self._bound,
            self.timeline.stop,
            self._sizes.stop_learned_within_s.value,
            self._capabilities.deviation("restart-under-load", "silent"),
        )
        self._say(line)

    # What must hold afterwards.

    def throughput_holds(self) -> None:
        """As fast as before all load, within the profile's bound."""
        box = self._harness.profile.box
        line = aftermath.compare_throughput(
            self._before,
            self._read_throughput,
            allowed=self._sizes.throughput_drop.value,
            on_cpu=self._harness.arch == architecture.CPU,
            max_other_load=box.max_other_load if box else 0.25,
        )
        self._say(line)

    def nothing_kept(self) -> None:
        """No request, no KV block, no zombie."""
        endpoint, counted = self._server.endpoint, counters.read(self.timeline.metrics or "").values
        checked = [aftermath.not_idle(endpoint), aftermath.zombies(self._harness.processes)]
        if counted and not any(counters.fetch(endpoint) for _ in range(3)):
            checked.append(Fault("not_idle", "required /metrics as before the load, seen none"))
        if faults := [fault for fault in checked if fault is not None]:
            raise UnderLoad("after the load", faults, 0)

    def memory_holds(self, *, more: bool = True) -> None:
        """Memory and handles do not grow with the requests, by the sustained load's steady part.
        `more`: the load is repeated while the samples do not decide."""
        if self._steady_from is None:
            raise NotRun("the sustained load was not run: it is what memory is judged by")
        on_cpu = self._harness.arch == architecture.CPU
        machine = None if on_cpu else psutil.virtual_memory().total
        began, tries = time.monotonic(), 0
        while True:
            samples, self._growths = self.timeline.since(self._steady_from), []
            if samples:
                self._growths = memory.judged(samples, self._sizes, machine_bytes=machine)
            if not more or all(g.verdict is not Verdict.INCONCLUSIVE for g in self._growths):
                break
            # A fast server is through with the load before there are samples of it.
            tries += all(g.samples >= growth.LEAST_EVEN_SAMPLES for g in self._growths)
            if tries >= _MEMORY_ROUNDS or time.monotonic() - began > _MEMORY_WITHIN_S:
                break
            self._play_sustained("sustained, once more for the memory")
        self._keep_memory()
        for item in self._growths:
            self._say(f"{item.verdict.value}: {item.reason}")
        if not self._growths:
            raise NotRun(self._harness.no_memory())
        kinds = {memory.HANDLES: "handle_growth"}
        faults = [
            Fault(kinds.get(item.quantity, "memory_growth"), item.reason)
            for item in self._growths
            if item.verdict is Verdict.FAIL
        ]
        if faults:
            raise UnderLoad("memory", faults, 0)
        if undecided := [g.reason for g in self._growths if g.verdict is Verdict.INCONCLUSIVE]:
            raise Inconclusive("; ".join(undecided))

    def _play_sustained(self, name: str) -> LoadResult:
        jobs = self._take(self.shapes.short, int(self._sizes.load_requests.value))
        return self._play(name, jobs, concurrency=self._streams, least_share=_LEAST_SHARE)

    def _play(
        self,
        name: str,
        jobs: Sequence[Job],
        *,
        concurrency: int,
        arrivals: Sequence[float] | None = None,
        tails: bool = True,
        preempts: bool = False,
        least_share: float = 1.0,
    ) -> LoadResult:
        """Send the jobs and check the answers.

        Args:
            least_share: The share of the jobs that is sent however long it takes; the rest is sent
                within the profile's `load_s`.

        Raises:
            UnderLoad: An answer is wrong, or the server is not idle afterwards.
        """
        lasts_s = self._sizes.load_s
        load = self.client.run(
            jobs,
            concurrency=concurrency,
            arrivals=arrivals,
            preempts=preempts,
            lasts_s=lasts_s.value if lasts_s is not None else None,
            at_least=math.ceil(least_share * len(jobs)),
        )
        if faults := self._faults(load, tails=tails):
            raise UnderLoad(name, faults, len(load.outcomes))
        return load

    def _faults(self, load: LoadResult, *, tails: bool) -> list[Fault]:
        faults = checks.faults(load, self._bound)
        if tails:
            tail = checks.slow_tail(
                load, self._sizes.tail_factor.value, self._sizes.tail_floor_s.value
            )
            faults += [tail] if tail is not None else []
        return faults or self._kept()

    def _crowded(self, times: int) -> int:
        return size(times, slots(self._harness, self._server) or self._streams)

    def _kept(self) -> list[Fault]:
        busy = aftermath.not_idle(self._server.endpoint)
        return [busy] if busy is not None else []

    def _take(self, source: Callable[[int], Iterator[Job]], count: int) -> list[Job]:
        return list(itertools.islice(source(int(self._sizes.answer_tokens.value)), count))

    def _read_throughput(self) -> aftermath.ThroughputReading:
        return aftermath.read_throughput(
            self.client, self.shapes, self._bound, self._harness.processes
        )

    def _keep_memory(self) -> None:
        memory.keep(self._harness, self.timeline, self._growths)

    def _say(self, line: str) -> None:
        self._harness.say("stress", line)
