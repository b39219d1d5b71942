"""A simulated vLLM server on a GB10, with its command line, its log and its rates.

The interpreter that `machine.py` creates starts it as ``python -m
vllm.entrypoints.openai.api_server``. It accepts and refuses the same options, chooses the same
kernels and logs the same lines as the release did when ``tools/choices`` executed it. As the MXFP4
build it accepts the options of that build's parser (``mxfp4-options.txt``), and logs what the build
logged on a real GB10 (``mxfp4.toml``). The log follows a time line (``start.toml``) on a faster
clock. A real vLLM on the CPU generates the answers; timed requests are answered at the rates of a
GB10.

GB10_SETTINGS names a JSON file with `Settings`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from meta_tests.fakes.gb10.drafts import Drafts
from meta_tests.fakes.gb10.profiler import Profiler
from meta_tests.fakes.gb10.start_log import BUILD, Log, Settings, compiling, data
from meta_tests.fakes.timed_server import COMPILED, Pace, Plan, TimedServer
from sm121.core.engine_arguments import one_line, options
from tools.choices import data as choices

_BEGAN = time.time()
#: Settings for requests to the real vLLM: no time limit, and long lines for the log-probabilities
#: of a whole answer.
_BEHIND: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=None), "read_bufsize": 64 << 20}
_COUNTED = {
    "vllm:generation_tokens_total": "generated", "vllm:prompt_tokens_total": "prompted",
    "vllm:prefix_cache_queries_total": "prompted", "vllm:prefix_cache_hits_total": "hits",
    "vllm:request_decode_time_seconds_sum": "decode_s", "vllm:num_requests_running": "running",
}  # fmt: skip


class Refused(Exception):
    """A refusal of arguments, with the release's message."""


class Release:
    """The reaction of a vLLM release to a command line: it accepts, changes or refuses it."""

    def __init__(self, version: str, arguments: list[str]) -> None:
        recorded = choices.at(choices.load(), version)
        assert recorded is not None, f"{choices.FILE.name} has no {version}"
        self.version = version
        for refusal in choices.refusals(recorded, arguments, os.environ):
            raise Refused(refusal.words)
        answers = [a for a in recorded.answers if a.machine == "cubins" and a.attention]
        typed = _deciding(arguments)
        same = [a for a in answers if _deciding(a.arguments) == typed]

        def choice_of(field: str) -> str:
            # If this combination of options was not executed, look up each option alone.
            alike = [a for a in answers if _part(a.arguments, typed, field)]
            return _only([getattr(answer, field) for answer in same or alike])

        self.attention, self.experts = choice_of("attention"), choice_of("experts")
        chosen = next(a for a in answers if a.attention == self.attention)
        lines = set()
        for a in same or [chosen]:
            lines.update(a.lines)
        apart = ("Mxfp4 MoE backend", "KV cache layout")
        self.lines = sorted(line for line in lines if not any(part in line for part in apart))
        every = []
        for a in answers:
            every.extend(a.lines)
        self.shows_layout = any("KV cache layout." in line for line in every)
        asked_layout = os.environ.get("VLLM_KV_CACHE_LAYOUT")
        self.layout = _only(
            [chosen.layouts.get(asked_layout, asked_layout)] if asked_layout else [chosen.layout]
        )
        self.layout_line = f"[utils.py:347] Using {self.layout} KV cache layout."
        if not self.shows_layout:  # before 0.29, only given options are logged
            self.layout_line = asked_layout and (
                "[utils.py:62] `VLLM_KV_CACHE_LAYOUT` environment variable detected. Setting KV "
                f"cache layout to {asked_layout}."
            )


class Build:
    """The reaction of the MXFP4 build to a command line."""

    def __init__(self, arguments: list[str], instead: dict[str, str]) -> None:
        from vllm.entrypoints.openai.cli_args import make_arg_parser

        make_arg_parser(argparse.ArgumentParser(prog="api_server.py")).parse_args(arguments)
        typed = {each.name: " ".join(each.values) for each in options(arguments)}
        words = []
        for name, value in (typed | instead).items():
            words += [name, str(value)] if value else [name]
        self.does = one_line(words)
        self.options = typed | instead
        words = data("mxfp4.toml")
        self.experts = next(row["rates"] for row in words["runs"] if self.fits(row))
        self.lines = [line for line in words["lines"] if self.fits(line)]
        self.streams = int(typed["--max-num-seqs"])
        self.values = {
            "arguments": {name[2:].replace("-", "_"): value for name, value in typed.items()},
            "kv_cache_dtype": self.options.get("--kv-cache-dtype", "auto"),
            "eager": "--enforce-eager" in typed, "context": typed["--max-model-len"],
            "backend": self.options.get("--mxfp4-backend"), "variant": "unfused", "capture_s": 6,
        }  # fmt: skip

    def fits(self, row: dict[str, Any]) -> bool:
        """Return whether a row of the data applies to this server."""
        match = re.search(row.get("when", ""), self.does)
        return match is not None and not re.search(row.get("unless", "(?!)"), self.does)


def _deciding(arguments: Any) -> dict[str, Any]:
    given = choices.values(arguments)
    deciding: dict[str, Any] = {}
    for kind in choices.DECIDING:
        deciding |= choices.deciding(kind, given)
    return deciding


def _part(arguments: Any, typed: dict[str, Any], kind: str) -> bool:
    return choices.deciding(kind, _deciding(arguments)) == choices.deciding(kind, typed)


def _only(values: list[Any]) -> str:
    assert values and values[0], "the release was never asked for this"
    return str(values[0])


class Gb10(TimedServer):
    """Answers timed requests at the rates of a GB10, and forwards all other requests to the real
    vLLM.

    In timed answers, the token ids stand for single ASCII characters of the checkpoint's tokenizer.
    """

    vocabulary = 94

    def __init__(
        self,
        settings: Settings,
        release: Release | Build,
        args: Any,
        core: subprocess.Popen,
        drafter: Drafts | None,
    ) -> None:
        self.streams = release.streams if isinstance(release, Build) else 0
        steps = "1" if drafter else ""  # `_plan` decides how many tokens a step has
        pace = Pace(echo="asked", prompts="turns", slots=self.streams, steps=steps)
        super().__init__(pace, args.served_model_name, None)
        self.drafter = drafter
        #: The number of tokens that were generated in timed requests, without the first token of
        #: each.
        self.drafted = 0
        self.root = args.model
        self.settings = settings
        self.release = release
        self.core = core
        self.curve = settings.rates[release.experts]
        #: The profiler; None without the option for it.
        self.profiler: Profiler | None = None
        self.key = os.environ.get("VLLM_API_KEY")
        self.session: aiohttp.ClientSession | None = None
        self.before: dict[str, float] = {}
        self.serving_since: float | None = None
        self.is_lost = False

    def text_of(self, ids: list[int]) -> str:
        return "".join(chr(ord("!") + i) for i in ids)

    def application(self) -> web.Application:
        app = web.Application(
            client_max_size=64 << 20, middlewares=[self._logged, self._only_with_key]
        )
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        if self.streams:
            app.router.add_get("/v1/models/{model}", self.not_there)
        if self.profiler is not None:
            self.profiler.add_to(app)
        app.router.add_route("*", "/{path:.*}", self.hand_on)
        app.cleanup_ctx.append(self._connected)
        return app

    async def _connected(self, _app: web.Application) -> Any:
        one = aiohttp.ClientSession(self.settings.behind, auto_decompress=False, **_BEHIND)
        async with one as self.session:
            self.before = _values(await self._behind())
            yield

    @web.middleware
    async def _logged(self, request: web.Request, handler: Any) -> web.StreamResponse:
        while self.is_lost and request.path.startswith("/v1") and self.core.poll() is None:
            await asyncio.sleep(0.1)
        if self.is_lost and request.path.startswith("/v1"):
            return web.json_response({"error": "EngineCore encountered an issue"}, status=500)
        answer = await handler(request)
        print(
            f"{self.settings.prefix}(APIServer pid={os.getpid()}) INFO:     127.0.0.1:40000 - "
            f'"{request.method} {request.rel_url} HTTP/1.1" {answer.status}',
            flush=True,
        )
        return answer

    async def models(self, request: web.Request) -> web.Response:
        """Return the list of models of the real vLLM, with the checkpoint of this start."""
        async with self._asked(request) as answer:
            listed = await answer.json()
        for model in listed["data"]:
            model["root"] = self.root
        return web.json_response(listed)

    async def not_there(self, _request: web.Request) -> web.Response:
        """Return 404 for a route that vLLM 0.14 does not have."""
        return web.json_response({"detail": "Not Found"}, status=404)

    @web.middleware
    async def _only_with_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = request.headers.get("Authorization", "")
        if self.key and request.path.startswith("/v1") and key != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.core.poll() is None else 503)

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self.settings.version})

    async def _behind(self) -> str:
        async with self.session.get("/metrics") as answer:
            return await answer.text() if answer.ok else ""

    async def metrics(self, _request: web.Request) -> web.Response:
        """Return the metrics that the real vLLM has counted since this start, plus those of timed
        requests."""
        lines = []
        untimed = {"vllm:generation_tokens_total": 0.0, "vllm:request_success_total": 0.0}
        for line in (await self._behind()).splitlines():
            name, _, value = line.rpartition(" ")
            bare = name.partition("{")[0]
            if line.startswith("#") or not name:
                lines.append(line)
            elif bare == "process_start_time_seconds":
                lines.append(f"{name} {_BEGAN}")
            else:
                gauge = not bare.endswith(("_total", "_sum", "_count", "_bucket"))
                counted = float(getattr(self, _COUNTED[bare])) if bare in _COUNTED else 0.0
                if self.settings.tenant_rate:
                    counted += self._of_the_other(bare)
                since = float(value) - (0.0 if gauge else self.before.get(name, 0.0))
                if bare in untimed:
                    untimed[bare] += since
                lines.append(f"{name} {since + counted}")
        if self.drafter is not None:
            generated, requests = untimed.values()
            drafted = max(0, round(generated - requests))  # a request's first token is not drafted
            steps = self.drafts + round(drafted / self.drafter.step_tokens)
            counted = self.drafter.counters(steps, self.drafted + drafted)
            lines += [f"{name} {value}" for name, value in counted.items()]
        return web.Response(text="\n".join(lines) + "\n")

    def _count(self, pace: Pace, tokens: int, plan: Plan | None = None) -> None:
        super()._count(pace, tokens, plan)
        if plan is not None and self.drafter is not None:
            self.drafts += len({*plan.at}) - 1
            self.drafted += plan.tokens - 1

    def _of_the_other(self, counter: str) -> float:
        seconds = time.time() - _BEGAN
        rates = {"vllm:generation_tokens_total": self.settings.tenant_rate}
        return float(counter == "vllm:num_requests_running") + rates.get(counter, 0.0) * seconds

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer a timed request at the rates of a GB10, with the text of the real vLLM."""
        try:
            body = json.loads(await request.read())
        except ValueError:  # the real vLLM reports the error
            body = None
        if not isinstance(body, dict):
            return await self.hand_on(request)
        options = body.get("stream_options") or {}
        ids = body.get("prompt")
        again = str(body.get("cache_salt")).startswith("sm121-timed")
        timed = body.get("ignore_eos") and options.get("continuous_usage_stats")
        if isinstance(ids, list) and (timed or again or len(ids) > 4600):
            if self.requests + 1 == self.settings.compiles_at:
                print(self.settings.prefix + COMPILED, end="", flush=True)
            return await self.complete(request)
        return await self.hand_on(request)

    @contextlib.asynccontextmanager
    async def _asked(self, request: web.Request) -> Any:
        """Return the real vLLM's answer to a request."""
        headers = {"Authorization": f"Bearer {self.settings.key}"}
        if kind := request.headers.get("Content-Type"):
            headers["Content-Type"] = kind
        async with self.session.request(
            request.method, request.rel_url, data=await request.read(), headers=headers
        ) as answer:
            yield answer

    async def hand_on(self, request: web.Request) -> web.StreamResponse:
        async with self._asked(request) as answer:
            kind_alone = {k: answer.headers[k] for k in ("Content-Type",) if k in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kind_alone)
            await response.prepare(request)
            parts = answer.content if self.streams else answer.content.iter_any()
            async for part in parts:
                await response.write(_with_both_names(part) if self.streams else part)
            await response.write_eof()
            return response

    def _plan(self, pace: Pace, number: int, prompt_tokens: int, tokens: int, share: Any) -> Plan:
        """Return when each token is sent.

        Prompt tokens and generated tokens take longer at a greater depth."""
        del pace
        if self.serving_since is None:
            self.serving_since = time.monotonic()
            if self.settings.dies_after_s:
                asyncio.get_running_loop().call_later(self.settings.dies_after_s, self._die)
        turn = share[1].index(number) + 1
        at = [0.02 + turn * self._prefill_s(prompt_tokens)]
        busy = min(self.running, self.streams or self.running)
        crowd = 1.0 + (busy - 1) * (8 / 3 - 1) / 7 if busy > 1 else 1.0
        drift = self.settings.drift if self._late() else 1.0
        mean = 1.0 if self.drafter is None else self.drafter.step_tokens
        sizes = [1] * (tokens - 1) if self.drafter is None else self.drafter.sizes(tokens - 1)
        for size in sizes:
            step = mean * crowd / (self._rate(prompt_tokens + len(at) - 1, 1) * drift)
            at += [at[-1] + step] * size
        return Plan(tokens, [int(second * 1e9) for second in at])

    def _die(self) -> None:
        """Log the last lines and end the process.

        After the loss of a node, first send no answers for some time."""
        if self.settings.hangs_s and not self.is_lost:
            self.is_lost = True
            asyncio.get_running_loop().call_later(self.settings.hangs_s, self._die)
            return
        for line in data("faults.toml")["deaths"][self.settings.death]:
            print(f"{self.settings.prefix}(EngineCore pid={self.core.pid}) {line}", flush=True)
        self.core.kill()
        if not self.is_lost:
            os._exit(1)

    def _late(self) -> bool:
        return self.serving_since is not None and time.monotonic() - self.serving_since > 30

    def _rate(self, depth: int, which: int) -> float:
        """Return the rate at a depth.

        The seconds per token are interpolated between the depths of the table."""
        rows = self.curve
        at = max(1, min(len(rows) - 1, sum(row[0] < depth for row in rows)))
        (low, *first), (high, *second) = rows[at - 1 : at + 1]
        a = 1 / first[which - 1]
        b = 1 / second[which - 1]
        return 1 / (a + (depth - low) / (high - low) * (b - a))

    def _prefill_s(self, tokens: int) -> float:
        return tokens / self._rate(tokens // 2, 2)


def _with_both_names(line: bytes) -> bytes:
    """Add both `reasoning` and `reasoning_content` to a message, as vLLM 0.14 does."""
    line = line.replace(b"<|endoftext|>", b"")
    start = 6 if line.startswith(b"data: ") else 0
    if b'"reasoning"' not in line or line[start : start + 1] != b"{":
        return line
    answered = json.loads(line[start:])
    for choice in answered.get("choices", []):
        message = choice.get("message") or choice.get("delta") or {}
        if "reasoning" in message:
            message["reasoning_content"] = message["reasoning"]
    return line[:start] + json.dumps(answered).encode() + (b"\n" if line.endswith(b"\n") else b"")


def _values(text: str) -> dict[str, float]:
    values = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            values[name] = float(value)
    return values


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model")
    parser.add_argument("--served-model-name")
    args, others = parser.parse_known_args()
    settings = Settings.load()
    core = subprocess.Popen([sys.executable, "-c", _CORE], stdin=subprocess.PIPE)
    try:
        _serve(settings, args, others, core)
    finally:
        core.kill()
        core.wait()


#: The engine's process, which ends when its parent ends.
_CORE = "import sys; sys.stdin.read()"
_UNKNOWN = "WARNING [envs.py:2114] Unknown vLLM environment variable detected: {unknown}"


def _unknown_variables() -> set[str]:
    """Return the unknown variables, as vLLM finds them (``vllm/envs.py``, validate_environ)."""
    from vllm import envs

    return {name for name in os.environ if name.startswith("VLLM_")} - {*envs.environment_variables}


def _release(
    settings: Settings, arguments: list[str], values: dict[str, Any], log: Log
) -> tuple[Release, list[dict[str, Any]]]:
    """Return how a release reacts to its command line, and the remaining log lines."""
    lines = data("start.toml")["line"]
    log.write(lines.pop(0))
    for name in sorted(_unknown_variables()):
        values["unknown"] = name
        log.write({"at": 0.5, "api": _UNKNOWN})
    log.write(lines.pop(0))
    try:
        release = Release(settings.release, arguments)
    except Refused as refusal:
        print(f"(APIServer pid={os.getpid()}) {refusal}", flush=True)
        sys.exit(1)
    values["lines"] = "\n".join(line.replace(".py]", ".py:1]") for line in release.lines)
    values["chosen"] = f"[mxfp4.py:433] Using '{release.experts}' Mxfp4 MoE backend."
    values["layout"] = release.layout_line or ""
    return release, lines


def _serve(settings: Settings, args: Any, others: list[str], core: subprocess.Popen) -> None:
    drafter = Drafts.of(others, settings.accepted)
    values = {
        "version": settings.version, "model": args.model, "served": args.served_model_name,
        "port": args.port, "pid": os.getpid(), "speculation": drafter,
        "eager": "--enforce-eager" in others,
        "load_format": "fastsafetensors",
        "arguments": {"model_tag": args.model, "host": args.host, "port": args.port},
    }  # fmt: skip
    faults = {fault["name"]: fault for fault in data("faults.toml")["fault"]}
    wrong = [faults[name] for name in settings.faults]
    log = Log(settings, values, core.pid)
    if settings.release == BUILD:
        instead = {}
        for fault in wrong:
            instead.update(fault.get("as", {}))
        release: Release | Build = Build(others, instead)
        values |= release.values
        at = "at" if settings.cold else "warm"
        lines = [line | {"at": line[at]} for line in release.lines if at in line]
    else:
        release, lines = _release(settings, others, values, log)
        lines = [line for line in lines if line.get("unless") not in others]
    if log.two:
        lines += [line for line in log.two["line"] if line.get("unless") != settings.release]
    with Path(settings.state).open("a", encoding="utf-8") as state:
        state.write(f"process {core.pid}\n")
    for fault in wrong:
        values |= fault.get("says", {})
        release.experts = fault.get("experts", release.experts)
        lines += fault.get("line", [])
    lines += [compiling(*module, at) for at, module in enumerate(settings.compiles.items(), 81)]
    for entry in sorted(lines, key=lambda line: line["at"]):
        log.write(entry)
        if "status" in entry:
            sys.exit(entry["status"])
    if "drafter-ignored" in settings.faults:
        drafter = None
    server = Gb10(settings, release, args, core, drafter)
    token_s = 1.0 / server._rate(2048, 1)
    server.profiler = Profiler.of(others, release.experts, token_s, drafter)
    with contextlib.suppress(KeyboardInterrupt):
        web.run_app(server.application(), host=args.host, port=args.port, print=None,
                    access_log=None, shutdown_timeout=1.0)  # fmt: skip


if __name__ == "__main__":
    main()
