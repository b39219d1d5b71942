"""An OpenAI-compatible streaming server with known timing (``timed_server.py --port N --rate 52``).

``--log FILE`` records when chunks were sent (CLOCK_MONOTONIC, ns); ``POST /admin`` changes `Pace`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from aiohttp import web

sys.path.append(str(Path(__file__).parents[2]))  # for its imports, as it runs as a script

from meta_tests.fakes import timed_events
from meta_tests.fakes.timed_events import VOCABULARY, Event, Place, bundled, ids_of, late, usage_of
from meta_tests.fakes.vllm_pages import VllmPages
from meta_tests.folders import DATA

#: The timers of the event loop have a resolution of 1 ms, so the rest of a wait is a busy loop.
SPIN_NS = 1_500_000
STALL_S = 3600.0
COMPILED = (
    "(EngineCore pid=7) WARNING 11-20 10:00:00 [jit_monitor.py:147] Triton kernel JIT compilation "
    "during inference: _fwd_kernel. This causes a latency spike; consider extending warmup to "
    "cover this shape/config.\n"
)

DEFAULTS = tomllib.loads((DATA / "pace.toml").read_text("utf-8"))
TRAPS: dict[str, dict[str, Any]] = tomllib.loads((DATA / "traps.toml").read_text("utf-8"))

#: Requests that arrived together: the arrival of the first one, their numbers, and their results.
Share = tuple[float, list[int], str]


class Pace(SimpleNamespace):
    """The server's behaviour. ``data/pace.toml`` contains and explains the fields."""

    def __init__(self, **changes: Any) -> None:
        unknown = changes.keys() - DEFAULTS.keys()
        if unknown:
            raise TypeError(f"expected fields of data/pace.toml, got {sorted(unknown)}")
        super().__init__(**DEFAULTS | changes)

    def but(self, **changes: Any) -> Pace:
        """Return a copy in which some fields have other values."""
        return Pace(**vars(self) | changes)


_BEGAN = time.time()


class TimedServer(VllmPages):
    """The state of a timed server: its pace and its counters."""

    release, owner = "0.0-timed", "meta"
    #: Generated ids are below this number.
    vocabulary = timed_events.VOCABULARY

    def __init__(self, pace: Pace, model: str, log: IO[str] | None) -> None:
        self.pace = pace
        self.model = model
        self.log = log
        self.requests = self.longer = self.running = 0
        self.first: float | None = None
        self.generated = self.prompted = self.hits = self.preempted = self.drafts = 0
        self.decode_s = 0.0
        self.used: set[Any] = set()
        self.slots = asyncio.Semaphore(pace.slots or 1_000_000)
        self.group: Share = (0.0, [], "")
        self.random = random.Random(pace.seed)

    @property
    def context(self) -> int:
        return self.pace.context

    def application(self) -> web.Application:
        app = super().application()
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_get("/book.txt", self.book)
        app.router.add_post("/admin", self.admin)
        return app

    async def book(self, _request: web.Request) -> web.Response:
        """Return the text from which some clients create their prompts."""
        words = (f"w{self.random.randrange(VOCABULARY)}" for _ in range(20_000))
        return web.Response(text=" ".join(words))

    async def admin(self, request: web.Request) -> web.Response:
        changes = await request.json()
        if changes.pop("reset", False):
            self.requests, self.first = 0, None
        self.pace = self.pace.but(**changes)
        return web.json_response(vars(self.pace))

    def text_of(self, ids: list[int]) -> str:
        return "".join(f" w{i}" for i in ids)

    def _chunk_text(self, ids: list[int], size: int, pace: Pace) -> str | None:
        text = self.text_of(ids[len(ids) - size :])
        return timed_events.chunk_text(text, ids, pace.withheld_one_in)

    async def of_tokens(self, request: web.Request) -> dict[str, Any]:
        if not self.pace.tokenize:
            raise web.HTTPNotFound
        return await request.json()

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the tokens of a text, in which each word is a token."""
        body = await self.of_tokens(request)
        text = body.get(self.pace.text_field)
        text = text or " ".join(message["content"] for message in body.get("messages", []))
        ids = ids_of(text)
        return web.json_response({"count": len(ids), "tokens": ids, "max_model_len": self.context})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self.of_tokens(request)
        return web.json_response({self.pace.text_field: self.text_of(body["tokens"])})

    async def metrics(self, _request: web.Request) -> web.Response:
        pace = self.pace
        if not pace.metrics or 0 < pace.metrics_until < self.requests:
            raise web.HTTPNotFound
        tenant = 0.0
        if self.first is not None:
            tenant = pace.tenant_rate * (time.monotonic() - self.first)
        generated = self.generated * pace.counter_factor + int(tenant)
        values = {
            "num_requests_running": self.running + pace.tenant_running, "num_requests_waiting": 0,
            "prompt_tokens_total": self.prompted + (100 if tenant else 0),
            "generation_tokens_total": generated, "prefix_cache_queries_total": self.prompted,
            "prefix_cache_hits_total": self.hits, "num_preemptions_total": self.preempted,
        }  # fmt: skip
        if pace.decode_time_factor:
            values["request_decode_time_seconds_sum"] = self.decode_s * pace.decode_time_factor
        if pace.accepted_length and (self.drafts or not pace.drafts_show_late):
            accepted = self.drafts * (pace.accepted_length - 1)
            values |= {
                "spec_decode_num_drafts_total": self.drafts,
                "spec_decode_num_draft_tokens_total": self.drafts * pace.drafted,
                "spec_decode_num_accepted_tokens_total": accepted,
            }
        lines = []
        for name, value in values.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# TYPE vllm:{name.removesuffix('_total')} {kind}")
            lines.append(f'vllm:{name}{{engine="0",model_name="{self.model}"}} {float(value)}')
        # Like the prometheus client that vLLM uses.
        lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {_BEGAN}"]
        return web.Response(text="\n".join(lines) + "\n")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        received = time.monotonic_ns()
        pace = self.pace
        self.requests += 1
        number = self.requests
        if self.first is None:
            self.first = time.monotonic()
        if number == pace.compiles_at:
            with Path(pace.engine_log).open("a", encoding="utf-8") as log:
                log.write(COMPILED)
        peer = request.transport.get_extra_info("peername")
        used = peer in self.used
        self.used.add(peer)
        if pace.drop_every and number % pace.drop_every == 0 and (used or pace.drop_fresh):
            await asyncio.sleep(pace.drop_after_ms / 1e3)
            request.transport.abort()
            return web.Response()
        if pace.redirect_every and number % pace.redirect_every == 0:
            await asyncio.sleep(pace.redirect_after_ms / 1e3)
            raise web.HTTPTemporaryRedirect(request.path)
        self.running += 1
        try:
            async with self.slots:
                received = time.monotonic_ns() if pace.slots else received
                share = self._join(number)
                # Requests that arrive at the same time do not wait for each other.
                await asyncio.sleep(0.03 if pace.prompts else 0.005)
                return await self._answer(request, raw, received, pace, number, share)
        finally:
            self.running -= 1

    def _join(self, number: int) -> Share:
        """Return the requests that arrived together with this one."""
        now, how = time.monotonic(), self.pace.prompts
        if now - self.group[0] > 0.02:
            how = self.random.choice(("batch", "turns")) if how == "either" else how
            self.group = (now, [], how)
        self.group[1].append(number)
        return self.group

    async def _answer(
        self, request: web.Request, raw: bytes, received: int, pace: Pace, number: int,
        share: Share,
    ) -> web.StreamResponse:  # fmt: skip
        body = json.loads(raw)
        chat = "messages" in body
        prompt = body.get("prompt") or " ".join(str(m["content"]) for m in body["messages"])
        if isinstance(prompt, list) and not pace.accepts_ids:
            return web.json_response({"error": {"message": "prompt must be a string"}}, status=400)
        if isinstance(prompt, list) and max(prompt) >= pace.known_ids:
            if pace.text_field == "content":
                error = {"message": "Prompt contains invalid tokens", "code": 400}
                return web.json_response({"error": error}, status=400)
            return await timed_events.out_of_vocabulary(request, max(prompt))
        failing = number == pace.fail_number
        if failing or (pace.fail_every and number % pace.fail_every == 0):
            return web.json_response({"error": {"message": "engine is busy"}}, status=500)
        prompt_tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        limit = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        if chat:
            limit = min(limit, pace.chat_tokens)
            rate, factor = pace.rate / pace.chat_slower, pace.usage_factor * pace.chat_counts
            pace = pace.but(rate=rate, usage_factor=factor)
        if body.get("temperature") != 0.0:
            more = pace.usage_more + pace.sampled_more
            pace = pace.but(rate=pace.rate / pace.sampled_slower, usage_more=more)
        if not body.get("stream"):
            pace = pace.but(rate=pace.rate / pace.whole_slower)
        pace = _for_text(pace, prompt)
        plan = self._plan(pace, number, prompt_tokens, max(1, limit - pace.short_by), share)
        lie = pace.lie if prompt_tokens >= pace.lies_from else ""
        steps = timed_events.answer(lie, ids_of(prompt), body, plan.tokens, self.vocabulary)
        self.prompted += prompt_tokens
        self.hits += int(prompt_tokens * pace.cache_hits)
        if not body.get("stream"):
            await _until(received + plan.at[-1])
            self._count(pace, plan.tokens, plan)
            return web.json_response(self._whole(body, steps, prompt_tokens, pace))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if not pace.keep_alive:
            response.force_close()
        await response.prepare(request)
        events = self._events(body, plan, steps, prompt_tokens, chat, pace)
        sent: list[int] = []
        for due, payload, tokens in events:
            if due is None:  # the stream stalls here
                self._count(pace, sum(1 for _ in sent))
                await asyncio.sleep(STALL_S)
            await _until(received + due)
            stamp = time.monotonic_ns()
            try:
                await response.write(payload)
            except (ConnectionResetError, ConnectionError):
                return response
            if tokens:
                sent.extend([stamp] * tokens)
        self._count(pace, plan.tokens, plan)
        await response.write_eof()
        self._note(received, plan, sent, prompt_tokens, [step[0] for step in steps])
        return response

    def _count(self, pace: Pace, tokens: int, plan: Plan | None = None) -> None:
        self.generated += tokens
        if plan is not None and not pace.decode_time_stands:
            self.decode_s += (plan.at[-1] - plan.at[0]) / 1e9
        self.preempted += pace.preemptions
        if pace.accepted_length:
            self.drafts += int(tokens / pace.accepted_length)

    def _plan(self, pace: Pace, number: int, prompt_tokens: int, tokens: int, share: Share) -> Plan:
        slow = pace.slow_factor if number <= pace.slow_first else 1.0
        rate = pace.rate / slow
        if pace.slow_every and tokens >= 32:
            self.longer += 1
            rate /= 1.0 if self.longer % pace.slow_every else pace.slow_factor
        if pace.jitter:
            rate *= 1.0 + self.random.gauss(0.0, pace.jitter)
        fresh = prompt_tokens * (1.0 - pace.cache_hits)
        first_s = slow * (pace.fixed_ms / 1e3 + fresh / pace.prefill_rate)
        if pace.one_slow_in and number % pace.one_slow_in == 0:
            first_s += pace.slow_extra_ms / 1e3
        if pace.drift_after_s and self.first is not None:
            late = time.monotonic() - self.first > pace.drift_after_s
            rate *= pace.drift_factor if late else 1.0
        prefill_s, everybody_s = fresh / pace.prefill_rate, 0.0
        if share[2]:
            everybody_s = pace.fixed_ms / 1e3 + prefill_s * len(share[1])
            turn = share[1].index(number) + 1 if share[2] == "turns" else len(share[1])
            first_s = pace.fixed_ms / 1e3 + prefill_s * turn
        at = [first_s]
        for made in range(tokens - 1):
            step = 1.0 / rate
            if at[-1] < everybody_s - 1e-6:  # one token for each prompt that is prefilled meanwhile
                step = prefill_s
            if pace.lost_in_no_time and 32 <= made + 1 < 32 + pace.lost_tokens:
                step = 0.0
            if made == 0:
                step += pace.pause_ms / 1e3
            if made >= 128:
                step *= pace.later_slower
            if pace.interval_jitter:
                step *= max(0.1, 1.0 + self.random.gauss(0.0, pace.interval_jitter))
            at.append(at[-1] + step)
        if pace.steps:
            at = _stepped(pace, rate, first_s, tokens)
        return Plan(tokens, [int(second * 1e9) for second in at[:tokens]])

    def _events(
        self, body: dict[str, Any], plan: Plan, steps: list[Place], prompt_tokens: int, chat: bool,
        pace: Pace,
    ) -> list[Event]:  # fmt: skip
        """Prepare all events of an answer before the first one is due."""
        ids = [step[0] for step in steps]
        options = body.get("stream_options") or {}
        usage = options.get("include_usage") and pace.final_usage
        continuous = options.get("continuous_usage_stats") and pace.continuous_usage
        with_ids = body.get("return_token_ids") and pace.token_ids
        events: list[Event] = []
        kind = "chat.completion.chunk" if chat else "text_completion"
        base = {"id": "cmpl-timed", "model": self.model, "object": kind}

        def event(choice: dict[str, Any] | None, at: int, extra: dict[str, Any]) -> bytes:
            created = 1_790_000_000 + (pace.clock_step_s if at > plan.at[-1] // 2 else 0)
            whole = {**base, "created": int(created), "choices": [choice] if choice else []}
            return b"data: " + json.dumps({**whole, **extra}).encode() + b"\n\n"

        def counted(done: int) -> dict[str, Any]:
            completion = round(done * pace.usage_factor) + pace.usage_more
            return {"usage": usage_of(prompt_tokens, completion)}

        if pace.early_event or chat:
            first = 0 if pace.early_event else plan.at[0]
            events.append((first, event(timed_events.choice_of(chat, "", role=True), 0, {}), 0))
        done, chunk = 0, 0
        while done < plan.tokens:
            if pace.stall_after and done >= pace.stall_after:
                return [*events, (None, b"", 0)]
            size = _size(pace, plan, done, chunk)
            done, chunk = done + size, chunk + 1
            bare = done <= pace.content_free
            text = self._chunk_text(ids[:done], 0 if bare else size, pace)
            if text is None or (bare and chat and not with_ids):
                continue  # the server sends no empty delta
            ends = done == plan.tokens and not pace.empty_finish
            made = timed_events.choice_of(chat, text, "length" if ends else None)
            if with_ids and not (pace.hide_some_ids and not bare):
                made["token_ids"] = ids[done - size : done]
            if chunk == 1 and (pace.echo == "always" or (with_ids and pace.echo == "asked")):
                prompt = body.get("prompt")
                made["prompt_token_ids"] = prompt if isinstance(prompt, list) else []
            if 32 < done <= 32 + pace.lost_tokens:
                continue
            at = 0 if pace.early_token and chunk == 1 else plan.at[done - 1]
            events.append((at, event(made, at, counted(done) if continuous else {}), size))
        if pace.empty_finish:
            final = event(timed_events.choice_of(chat, "", "length"), plan.at[-1], {})
            events.append((plan.at[-1], final, 0))
        events = _held(bundled(events, pace.burst), plan, pace.held_tokens)
        late_ns = int(1e6 * (pace.late_ms + pace.late_ms_per_1k * prompt_tokens / 1e3))
        if late_ns and (with_ids or pace.echo != "asked"):
            if pace.echo == "apart":
                echo = event(None, 0, {"prompt_token_ids": body.get("prompt")})
                events.insert(0, (plan.at[0], echo, 0))
            events = late(events, plan.at[0] + late_ns, pace.leak)
        end = max(plan.at[-1], events[-1][0] or 0)
        tail = event(None, end, counted(plan.tokens)) if usage else b""
        return [*events, (end, tail + b"data: [DONE]\n\n", 0)]

    def _whole(
        self, body: dict[str, Any], steps: list[Place], prompt_tokens: int, pace: Pace
    ) -> dict[str, Any]:
        ids, chat = [step[0] for step in steps], "messages" in body
        text = self.text_of(ids[pace.content_free :])
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice["logprobs"] = timed_events.log_probabilities(steps, body)
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if pace.token_ids:
            choice["token_ids"] = ids
            choice["prompt_token_ids"] = ids_of(body.get("prompt", ""))
        return {
            "id": "cmpl-timed", "object": "chat.completion" if chat else "text_completion",
            "created": 1_790_000_000, "model": self.model, "choices": [choice],
            "usage": usage_of(prompt_tokens, round(len(ids) * pace.usage_factor)),
        }  # fmt: skip

    def _note(
        self, received: int, plan: Plan, sent: list[int], prompt_tokens: int, ids: list[int]
    ) -> None:
        if self.log is None:
            return
        record = {
            "received_ns": received, "prompt_tokens": prompt_tokens, "tokens": plan.tokens,
            "ids": ids, "sent_ns": sent, "planned_ns": [received + at for at in plan.at],
        }  # fmt: skip
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()


@dataclass
class Plan:
    """The time at which each token is due, in nanoseconds after the request was received."""

    tokens: int
    at: list[int]


def _size(pace: Pace, plan: Plan, done: int, chunk: int) -> int:
    """Return the number of tokens of the next chunk."""
    size = pace.tokens_per_chunk if chunk else pace.first_chunk_tokens
    if done < pace.content_free:
        size = 1
    if pace.steps and chunk:
        size = plan.at.count(plan.at[done])
    return min(size, plan.tokens - done)


def _held(events: list[Event], plan: Plan, tokens: int) -> list[Event]:
    """Hold events back until this many tokens exist."""
    until = plan.at[min(tokens, plan.tokens) - 1] if tokens else 0
    return [(max(due or 0, until), payload, count) for due, payload, count in events]


def _for_text(pace: Pace, prompt: list[int] | str) -> Pace:
    """Adapt the plan to the continuation, which is random tokens or a text with drafts."""
    last = ids_of(prompt)[-50:]
    turn = sum(last) % max(len(pace.steps), 1)
    rate = pace.rate * (pace.random_faster if max(last) > 10_000 else 1.0)
    return pace.but(rate=rate, steps=pace.steps[turn:] + pace.steps[:turn])


def _stepped(pace: Pace, rate: float, first_s: float, tokens: int) -> list[float]:
    """Return when each token exists, if each step generates several tokens."""
    sizes = [int(digit) for digit in pace.steps]
    each_s, at = sum(sizes) / len(sizes) / rate, [first_s]
    for size in itertools.islice(itertools.cycle(sizes), tokens):
        at += [at[-1] + each_s * (pace.undrafted if size == 1 else 1.0)] * size
    late = at[pace.hurried - 1] if 1 < pace.hurried <= tokens else 0.0
    for i in range(pace.hurried if late else 0):
        at[i] = max(at[i], late - 0.3 / rate * (pace.hurried - 1 - i))
    return at[:tokens]


async def _until(deadline: int) -> None:
    """Wait until a time of CLOCK_MONOTONIC: sleep first, and spin at the end."""
    remaining = deadline - time.monotonic_ns()
    if remaining > SPIN_NS:
        await asyncio.sleep((remaining - SPIN_NS) / 1e9)
    while time.monotonic_ns() < deadline:
        await asyncio.sleep(0)


async def serve(server: TimedServer, port: int) -> None:
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    assert runner.addresses
    print(f"listening on {runner.addresses[0][1]}", flush=True)
    gc.collect()
    gc.freeze()
    gc.disable()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--log")
    parser.add_argument("--trap", action="append", default=[], choices=sorted(TRAPS))
    for name, default in DEFAULTS.items():
        if not isinstance(default, bool):
            parser.add_argument("--" + name.replace("_", "-"), type=type(default))
    options = parser.parse_args()
    changes: dict[str, Any] = {}
    for trap in options.trap:
        changes |= TRAPS[trap]["pace"]
    for name in DEFAULTS:  # an option for one field overrides the value of --trap
        if (value := getattr(options, name, None)) is not None:
            changes[name] = value
    with contextlib.suppress(OSError):  # other busy processes must not change the timing
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    with contextlib.ExitStack() as stack:
        log = None
        if options.log:
            log = stack.enter_context(Path(options.log).open("w", encoding="utf-8"))
        server = TimedServer(Pace(**changes), options.model, log)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(server, options.port))


if __name__ == "__main__":
    main()
