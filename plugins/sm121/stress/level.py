"""The stress level: loads of every shape, the checks of their answers, and checks after the loads.

Example::

    stress = Stress(run, run.server(), capabilities, bound)
    stress.sustained()
    stress.afterwards.check_memory()
    stress.close()
"""

import secrets
import statistics

from sm121.answers.oracle_tolerance import bound_for
from sm121.answers.prompts import continuations
from sm121.api.client import Api
from sm121.api.sampled import Sampler
from sm121.client.completions import Asker
from sm121.client.jobs import Job, LoadResult
from sm121.client.load import LoadClient
from sm121.client.patience import Patience
from sm121.core import level_settings
from sm121.core.server import Server, require_context
from sm121.core.verdict import Inconclusive, NotRun
from sm121.engines.capabilities import Capabilities
from sm121.machine.timeline import Timeline
from sm121.measure import counters
from sm121.performance.bench import requested_slots, slots
from sm121.run.load import Load
from sm121.run.run import Run
from sm121.stress import aftermath, cache, checks, restart, shapes, soak
from sm121.stress.afterwards import Afterwards
from sm121.stress.checks import UnderLoad
from sm121.stress.crowd import Crowd, size
from sm121.stress.crowded_samples import CrowdedSamples
from sm121.stress.joining import LONGEST, Joining
from sm121.stress.mixed_rounds import MixedRounds, SoakReport
from sm121.stress.player import LoadPlayer

#: Fraction of a load's requests that is sent even if the machine is slow.
_LEAST_SHARE = 0.5
#: Number of context tokens reserved for the short prompt of a long answer.
_SHORT_PROMPT = 32
#: Size of the load during which the server is stopped, as a multiple of the sustained load: more
#: requests than a very fast server can answer before it is stopped.
_STOPPED_TIMES = 10
#: Numbers of blocks per stream that are left free, in the order in which they are tried.
_SPARE_BLOCKS = (2, 3, 1)
#: In the suggested smaller cache, the context has at most this many chunks.
_PRESSED_CHUNKS = 4
#: Size of the crowds in a soak, as a multiple of the server's slots.
_SOAK_CROWD = 2


class Stress:
    """One server under load. The constructor measures its throughput; `close` ends the sampling.

    The sizes and limits are the profile's (``[stress]``). The method of a load returns if all
    answers are correct, and raises `UnderLoad` with all faults otherwise.

    Args:
        run: The run. Its crash bundles get the state of the load; memory.json and soak.json are
            written into its directory.
        server: The server.
        capabilities: The capabilities of its engine.
        bound: How far an answer may differ from the answer to the same prompt sent alone. None: the
            profile's bound for the server's dtype.

    Attributes:
        client: Sends the requests.
        shapes: Makes the requests.
        timeline: Samples the memory during the loads.
        afterwards: The checks after the loads.

    Raises:
        NotRun: The server lacks a capability that all loads need, or does not stream.
        UnderLoad: An answer is wrong although requests are sent one at a time.
    """

    def __init__(
        self,
        run: Run,
        server: Server,
        capabilities: Capabilities,
        bound: level_settings.AgreementBound | None = None,
    ) -> None:
        has_ids = capabilities.can("token_ids")
        capabilities.require("completions", "ignore_eos")
        if not has_ids:
            capabilities.require("logprob_ids")
        if bound is None:
            profile = run.profile
            bound = bound_for(profile.correctness.agreement, server, profile, "agreement")
        self._run = run
        self._server = server
        self._capabilities = capabilities
        self._sizes = run.profile.stress
        self.client = LoadClient(
            server.endpoint,
            Patience(self._sizes.request_within_s.value, self._sizes.stalled_after_s.value),
            stop=lambda: run.servers.aborted,
        )
        self._player = LoadPlayer(self.client, server.endpoint, self._sizes, bound)
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
            run.servers.processes,
            server.endpoint,
            completed=lambda: self.client.completed,
            floor_bytes=self._sizes.memory_floor_gib.value * 2**30,
            on_floor=run.servers.abort,
        )
        self._crowd = self._make_crowd(bound)
        # Set before the first load, which may already crash the server.
        run.servers.crashes.under_load(Load(self.client, self.timeline))
        self.timeline.start()
        try:
            before = self._read_throughput()
        except BaseException:
            self.timeline.stop()
            raise
        self.afterwards = Afterwards(
            run,
            server,
            self.timeline,
            before,
            read_throughput=self._read_throughput,
            repeat_load=lambda: self._play_sustained("sustained, repeated for the memory"),
        )

    def _make_crowd(self, bound: level_settings.AgreementBound) -> Crowd:
        sampler = Sampler(Api(self._server.endpoint, self._capabilities), secrets.randbits(30))
        return Crowd(
            self.shapes,
            self.client,
            self._capabilities,
            bound,
            int(self._sizes.answer_tokens.value),
            CrowdedSamples(sampler, self.shapes),
        )

    def close(self) -> None:
        """Stop the sampling, and write the samples."""
        self.timeline.stop()
        self.afterwards.keep_memory()

    def sequential(self) -> None:
        """Send requests one after another."""
        count = int(self._sizes.sequential_requests.value)
        jobs = self._player.take(self.shapes.short, count)
        self._player.play("sequential", jobs, concurrency=1, least_share=_LEAST_SHARE)

    def concurrent(self) -> None:
        """Send all requests at the same time."""
        count = int(self._sizes.concurrent_requests.value)
        jobs = self._player.take(self.shapes.short, count)
        self._player.play("concurrent", jobs, concurrency=count)

    def sustained(self) -> None:
        """Send many requests, several at a time. Its samples are used to judge the memory."""
        self.afterwards.begin_steady_part()
        load = self._play_sustained("sustained")
        seconds = sorted(o.seconds for o in load.outcomes if o.seconds is not None)
        self._say(
            f"sustained: {len(seconds)} requests in {load.seconds:.1f} s, "
            f"{load.tokens / load.seconds:.1f} tok/s, median {statistics.median(seconds):.2f} s, "
            f"slowest {seconds[-1]:.2f} s, 0 failed"
        )

    def _play_sustained(self, name: str) -> LoadResult:
        jobs = self._player.take(self.shapes.short, int(self._sizes.load_requests.value))
        return self._player.play(
            name, jobs, concurrency=self._player.streams, least_share=_LEAST_SHARE
        )

    def long_generation(self) -> None:
        """Request one long answer, then each part of it with everything before it as the prompt.

        The parts must have the same tokens and the same text.

        Raises:
            NotRun: The answer does not fit into the context.
        """
        tokens = int(self._sizes.long_generation_tokens.value)
        require_context(self._server.context_tokens(), _SHORT_PROMPT, tokens)
        job = self.shapes.long(tokens, aftermath.TOKENS)
        (outcome,) = self._player.play("long generation", [job], concurrency=1).outcomes
        answer = outcome.answer
        if answer is None or answer.ids is None or answer.prompt_ids is None:
            compared = f"only the first {aftermath.TOKENS} tokens are compared"
            self._run.record.remark(
                f"long generation: {compared}, since the engine returns no token ids"
            )
            return
        parts = self.shapes.parts(answer.prompt_ids, answer.ids, answer)
        name = "long generation, in parts"
        load = self._player.play(name, parts, concurrency=self._player.streams, tails=False)
        fault = checks.text_by_its_parts(answer, load.outcomes, self._asker.vocabulary)
        if fault is not None:
            raise UnderLoad(name, [fault], len(parts))

    def arriving(self, kind: shapes.Arrival) -> None:
        """Send requests of all lengths.

        Args:
            kind: The kind of arrival.
        """
        count = int(self._sizes.mixed_requests.value)
        self._player.play(
            f"mixed lengths, {kind} arrivals",
            self._player.take(self.shapes.mixed, count),
            concurrency=self._player.streams,
            arrivals=shapes.moments(kind, count, self._sizes.arrivals_per_s.value),
            tails=False,
            least_share=_LEAST_SHARE,
        )

    def crowd(self, times: int) -> None:
        """Send requests of all kinds at the same time.

        Args:
            times: The number of requests as a multiple of the server's slots: 2 or 10.

        Raises:
            NotRun: The server refuses all kinds.
        """
        jobs = self._crowd.jobs(self._crowd_size(times))
        name = f"a crowd of {len(jobs)} requests"
        faults = self._crowd.faults(self.client.run(jobs)) or self._player.kept()
        if faults:
            raise UnderLoad(name, faults, len(jobs))
        kinds = ", ".join(dict.fromkeys(job.kind for job in jobs))
        self._say(f"{name}: no answer belongs to another request ({kinds})")
        if self._crowd.refused:
            self._run.record.remark(
                f"{name}: left out, because the server refuses them: {self._crowd.refused}"
            )

    def _crowd_size(self, times: int) -> int:
        return size(times, slots(self._run, self._server) or self._player.streams)

    def joining(self) -> None:
        """Send short prompts, one at a time, that join each possible number of decoding requests.

        Raises:
            NotRun: The server's number of slots is unknown, or its context is too short.
            Inconclusive: Some number of running requests did not occur.
        """
        self._capabilities.require("token_prompts", "token_ids")
        most = slots(self._run, self._server) or self._player.streams
        lasts_s = self._sizes.joining_s.value
        longest = cache.context_tokens(self._server)
        if longest < 2 * LONGEST:
            raise NotRun(
                f"this check needs a context of {2 * LONGEST} tokens, the server has {longest}"
            )
        source = Joining(self.shapes, self._server.endpoint, most, lasts_s, longest)
        load = self.client.follow(source)
        faults = self._player.faults(load, tails=False)
        if faults:
            is_broken = any(outcome.problem for outcome in load.outcomes)
            name = "short prompts that join decoding requests"
            if is_broken:
                name = load.outcomes[-1].job.name
            raise UnderLoad(name, faults, len(load.outcomes))
        limit = requested_slots(self._run, self._server)
        if limit is None and source.counts and source.missing():
            raise NotRun(
                "the server's maximum number of concurrent requests is unknown; give --server-log"
            )
        source.require_all()
        by = ", ".join(f"{n}: {times}" for n, times in sorted(source.joined.items()))
        self._say(
            f"short prompts joined N decoding requests (N: times): {by}; all answers are correct"
        )

    def unruly(self) -> None:
        """Send requests whose clients cancel, disconnect or read slowly, and invalid requests."""
        count = int(self._sizes.mixed_requests.value)
        self._player.play(
            "clients that cancel, disconnect or read slowly",
            self._player.take(self.shapes.unruly, count),
            concurrency=self._player.streams,
            tails=False,
            least_share=_LEAST_SHARE,
        )

    def brim(self) -> None:
        """Send a prompt that fills the context with its answer, and a prompt that is too long.

        The second prompt has one token more than the context; the server must refuse it.

        Raises:
            NotRun: The length of the context is not known.
        """
        self._capabilities.require("token_prompts", "token_ids")
        tokens = int(self._sizes.answer_tokens.value)
        longest = cache.context_tokens(self._server)
        full = self.shapes.of_length(longest - tokens, tokens)
        ids = full.body["prompt"]
        body = {**full.body, "prompt": [*ids, *ids[: longest + 1 - len(ids)]]}
        beyond = Job("a prompt longer than the context", body, tokens, behaviour="bad")
        self._player.play("prompts that fill or exceed the context", [full, beyond], concurrency=1)

    def pressed(self) -> None:
        """Send more concurrent requests than the KV cache can hold, until some are preempted.

        Raises:
            NotRun: The server does not count preemptions, or its cache is too large to be filled.
            Inconclusive: No request was preempted.
        """
        self._capabilities.require("token_prompts", "token_ids")
        streams = self._player.streams
        blocks = cache.cache_blocks(self._server.endpoint)
        before = counters.fetch(self._server.endpoint)
        if before is None or "preemptions" not in before.values:
            raise NotRun("preemptions are unknown: /metrics has no counter of them")
        longest = cache.context_tokens(self._server)
        chunk = cache.chunk_tokens(self._server)
        capacity = blocks.count * blocks.tokens
        remedy = _smaller_cache(min(longest, _PRESSED_CHUNKS * chunk), streams, blocks.tokens)
        for spare in _SPARE_BLOCKS:
            load = cache.pressure(
                blocks.count, blocks.tokens, chunk=chunk, streams=streams, spare=spare
            )
            if load.prompt > longest - load.answer:
                raise NotRun(
                    f"{streams} requests of {longest} tokens do not fill a KV cache of "
                    f"{capacity} tokens: {remedy}"
                )
            self._press(load)
            after = counters.fetch(self._server.endpoint)
            preempted = after.since(before)["preemptions"] if after is not None else 0.0
            peak = max((s.cache_usage or 0.0 for s in self.timeline.samples), default=0.0)
            if preempted:
                self._say(f"{preempted:g} preemptions, KV cache {peak:.0%} full")
                return
        raise Inconclusive(
            f"{streams} requests of {load.prompt} + {load.answer} tokens in a KV cache of "
            f"{capacity}: expected a preemption, got none (usage {peak:.0%} at most); "
            f"{remedy}"
        )

    def _press(self, load: cache.Pressure) -> None:
        streams = self._player.streams
        jobs = [
            self.shapes.of_length(load.prompt, load.answer, turn=number % 2)
            for number in range(streams)
        ]
        self._player.play("KV pressure", jobs, concurrency=streams, tails=False, preempts=True)

    def soak(self, duration_s: float) -> None:
        """Send mixed load in rounds, then check memory and throughput.

        Every fourth round is a crowd of all kinds. Memory is checked if there are enough samples.

        Args:
            duration_s: The duration of the rounds, in seconds.

        Raises:
            Inconclusive: The samples of the memory or the throughput are inconclusive.
        """
        self.afterwards.begin_steady_part()
        rounds = MixedRounds(
            self._player,
            self.shapes,
            self._crowd,
            lambda: self._crowd_size(_SOAK_CROWD),
            self._sizes,
            self.timeline,
        )
        report = SoakReport(self._run, self.afterwards.keep_memory)
        soak.run(duration_s, rounds.play, report.write, self._say)
        if rounds.failure is not None:
            raise rounds.failure
        if self.afterwards.has_memory_samples():
            self.afterwards.check_memory(more=False)
        self.afterwards.check_throughput()

    def restarted_under_load(self) -> None:
        """Stop the server during a load, and start it again.

        The clients must learn of the stop without delay, no process or memory of the server may be
        left, and the restarted server must give the same answers.

        Raises:
            NotRun: The server is attached.
            Inconclusive: No request was under way when the server was stopped, or all were.
        """
        pool = self._run.servers.pool
        if pool is None or pool.current is None:
            raise NotRun("an attached server is not restarted, because the suite did not start it")
        count = _STOPPED_TIMES * int(self._sizes.load_requests.value)
        line = restart.under_load(
            self._run,
            self.client,
            self._player.take(self.shapes.short, count),
            self._player.streams,
            self._player.bound,
            self.timeline.stop,
            self._sizes.stop_learned_within_s.value,
            self._capabilities.deviation("restart-under-load", "silent"),
        )
        self._say(line)

    def _read_throughput(self) -> aftermath.ThroughputReading:
        return aftermath.read_throughput(
            self.client, self.shapes, self._player.bound, self._run.servers.processes
        )

    def _say(self, line: str) -> None:
        self._run.record.say("stress", line)


def _smaller_cache(context: int, streams: int, block: int) -> str:
    """Return vLLM arguments for a cache so small that requests of this context length fill it."""
    blocks = -(-streams * context // block)  # rounded up
    return (
        f"start it with a smaller cache (--engine-arg=--num-gpu-blocks-override={blocks} "
        f"--engine-arg=--max-model-len={context})"
    )
