"""A server with known faults that the stress level takes for vLLM.

Each answer is a function of its prompt.

``fake_python.py`` starts it in place of the engine. SM121_META_FAULT names the fault, which begins
at the generating request number FAULT_AT.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.append(str(Path(__file__).parents[2]))  # for its imports, as it runs as a script

from meta_tests.fakes.loopback import say
from meta_tests.fakes.vllm_pages import VllmPages
from meta_tests.folders import DATA

_DATA = tomllib.loads((DATA / "stress-server.toml").read_text("utf-8"))
MAX_LENGTH = 4608
BLOCKS = 192
BLOCK = 128
PLACES = 8
STEP_S = float(os.environ.get("SM121_META_STEP_S", "0.002"))
VOCABULARY = 50_000
#: The texts of the first ids of o200k. Answers contain only these texts.
SIGNS = [chr(sign) for sign in range(ord("!"), ord("~") + 1)]


#: For each fault: with how many decoding requests, and with which prompt lengths, a joining prompt
#: damages the decoding requests.
JOINED = _DATA["joined"]
#: For each kind of request, the number of concurrent requests from which on they get the answer of
#: the preceding request.
NEIGHBOURS = _DATA["neighbours"]
#: The change of the text of a chat or a response, if at least 16 requests run at the same time.
SPOILT: dict[str, Callable[[str], str]] = {
    "no-text": lambda _text: "",
    "junk-text": lambda text: "!" * len(text),
    "loop-text": lambda _text: "the " * 20,
}
#: The change of an answer that has more than 1,000 tokens.
LONG: dict[str, Callable[[list[int]], list[int]]] = {
    "noise": lambda ids: [*ids[:300], *((n * 7 + 1) % len(SIGNS) for n in ids[300:])],
    "drifts": lambda ids: [*ids[:900], (ids[900] + 1) % len(SIGNS), *ids[901:]],
    "loops": lambda ids: [*ids[:600], *ids[200 : len(ids) - 400]],
}
#: The change of one answer that has more than three tokens.
ONCE: dict[str, Callable[[list[int]], list[int]]] = {
    "corrupted": lambda ids: [*ids[:2], (ids[2] + 1) % len(SIGNS), *ids[3:]],
    "lost": lambda ids: [*ids[:2], *ids[3:]],
    "doubled": lambda ids: [*ids[:2], ids[1], *ids[2:]],
}
#: The text of token n in a long answer that has this fault.
TEXTS: dict[str, Callable[[int, str], str]] = {
    "noisy-text": lambda n, sign: f"{sign} noise " if n > 900 else sign,
    "lost-text": lambda n, sign: "" if n == 500 else sign,
    "cut-text": lambda n, sign: "" if n > 1000 else sign,
}
#: The change of /metrics, and the number of the request from which on it happens.
PAGES = _DATA["pages"]
GONE_AT = dict.fromkeys(PAGES, 15) | {"no-metrics": 0}
#: The parameters that change an answer, and the number of the request from which on the server
#: ignores them.
CHANGES = _DATA["changes"]
FORGETS_AT = 110
#: For the request with this number, how many requests must have ended before it gets its fourth
#: token.
PREEMPTED = {"preempts": {3: 1, 4: 2}, "preempts-and-loses": {3: 1, 4: 99}}
SIGNALS = {"killed": signal.SIGKILL, "segfault": signal.SIGSEGV, "stopped": signal.SIGSTOP}
#: The number of the first generating request with a fault. It is in the middle of the sustained
#: load.
FAULT_AT = 150


@dataclass
class State:
    fault: str
    model: str
    key: str
    requests: int = 0
    running: int = 0
    waiting: int = 0
    tokens_reserved: int = 0
    generated: int = 0
    #: The last request of each kind.
    before: dict[str, dict[str, Any]] = field(default_factory=dict)
    prompted: int = 0
    preemptions: int = 0
    stale_requests: int = 0
    hoard: list[Any] = field(default_factory=list)
    hung: bool = False
    ended: int = 0
    #: The decoding requests, and those of them that a joining prompt has damaged.
    decoding: set[int] = field(default_factory=set)
    harmed: set[int] = field(default_factory=set)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PLACES))


ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def die(last_words: str) -> None:
    say("ERROR 11-20 10:00:01 [core.py:1] EngineCore encountered a fatal error.")
    say(last_words)
    os._exit(1)


def refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def ids_of(prompt: Any) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    return [zlib.crc32(word.encode()) % VOCABULARY for word in prompt.split()]


def answer_of(ids: list[int], tokens: int) -> list[int]:
    """Return the answer to a prompt.

    If the prompt contains the beginning of an answer, the rest of that answer follows."""
    state = zlib.crc32(bytes(json.dumps(ids)[1:-1] + ", ", "ascii"))
    answer: list[int] = []
    for _ in range(tokens):
        answer.append(zlib.crc32(b"x", state) % len(SIGNS))
        state = zlib.crc32(b"%d, " % answer[-1], state)
    return answer


def choice_of(
    body: dict[str, Any], answered: dict[str, Any], ids: list[int], finish: str | None, index: int
) -> dict[str, Any]:
    text = body.get("spoilt", str)("".join(SIGNS[n] for n in ids))
    if "structured_outputs" in body:
        return {"text": answered["structured_outputs"]["choice"][1], "finish_reason": "stop"}
    if "messages" in body:
        name = "delta" if body.get("stream") else "message"
        return {"index": index, "finish_reason": finish, name: {"content": text}}
    return {"index": index, "text": text, "token_ids": ids, "finish_reason": finish}


class Server(VllmPages):
    generates = ("completions", "chat/completions", "responses")
    context = MAX_LENGTH

    def __init__(self, state: State) -> None:
        self.state = state
        self.model = state.model

    async def metrics(self, _request: web.Request) -> web.Response:
        state = self.state
        if state.requests >= GONE_AT.get(state.fault, 10**9):
            return web.Response(**PAGES[state.fault])
        labels = f'{{engine="0",model_name="{state.model}"}}'
        values = {
            "num_requests_running": state.running + state.stale_requests,
            "num_requests_waiting": state.waiting,
            "kv_cache_usage_perc": min(1.0, state.tokens_reserved / (BLOCKS * BLOCK)),
            "generation_tokens_total": state.generated,
            "prompt_tokens_total": state.prompted,
            "num_preemptions_total": state.preemptions,
        }
        if state.fault == "uncounted":
            del values["num_requests_running"]
        lines = [f"vllm:{name}{labels} {float(value)}" for name, value in values.items()]
        blocks = f'block_size="{BLOCK}",engine="0",num_gpu_blocks="{BLOCKS}"'
        lines.append(f"vllm:cache_config_info{{{blocks}}} 1")
        return web.Response(text="\n".join(lines) + "\n")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.state.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body: dict[str, Any] = await request.json()
        if "messages" in body:
            body["prompt"] = body["messages"][-1]["content"]
        if "input" in body:
            body |= {"prompt": body["input"], "max_tokens": body["max_output_tokens"]}
        if self.harm(0) == "refuses":
            return refused(429, "busy")
        if (wrong := self.refusal(body)) is not None:
            return refused(*wrong)
        state = self.state
        state.requests += 1
        number = state.requests
        self.misbehave(number)
        if state.fault == "5xx" and number % FAULT_AT == 0:
            return refused(500, "EngineDeadError")
        state.waiting += 1
        async with state.slots:
            state.waiting -= 1
            state.running += 1
            answered = self.neighbour(request.path, body)
            if state.running + state.waiting >= 16 and {"messages", "input"} & {*body}:
                body["spoilt"] = SPOILT.get(state.fault, str)
            tokens = len(ids_of(body["prompt"])) + int(body.get("max_tokens", 16))
            reserved = (-(-tokens // BLOCK) + 2) * BLOCK
            try:
                self.hold(reserved)
                return await self.generate(request, body, number, answered)
            finally:
                state.running -= 1
                state.decoding.discard(number)
                state.tokens_reserved -= reserved
                if state.fault == "kept" and number == FAULT_AT:
                    state.stale_requests += 1

    def neighbour(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the other request whose answer the faulty server sends in reply to this request.

        With two choices, it is the second request.
        """
        state = self.state
        kind = path.removeprefix("/v1/")
        kind = "two" if body.get("n") == 2 else "choice" if "structured_outputs" in body else kind
        salt = str(body.get("cache_salt"))
        # Keep only the newest entries, because storing each salt would be a leak.
        state.before = dict([*state.before.items()][-500:])
        if state.before.setdefault(f"salt {salt}", body)["prompt"] != body["prompt"]:
            kind = f"prefix {salt}" if salt != "None" else kind
        before = state.before.get(kind, body)
        state.before[kind] = body
        least, of_kind = NEIGHBOURS.get(state.fault, (0, ""))
        is_hit = kind.split()[0] == of_kind and state.running + state.waiting >= least
        return before if is_hit else body

    def hold(self, tokens: int) -> None:
        state = self.state
        state.tokens_reserved += tokens
        if state.tokens_reserved > BLOCKS * BLOCK and state.running > 1:
            state.preemptions += 1

    def refusal(self, body: dict[str, Any]) -> tuple[int, str] | None:
        prompt = body.get("prompt")
        if body.get("model") != self.state.model:
            return 404, "no such model"
        if not isinstance(prompt, str | list) or body.get("max_tokens", 1) < 1:
            return 400, "bad prompt or max_tokens"
        if body.get("temperature", 0) < 0:
            return 400, "temperature"
        ids = prompt if isinstance(prompt, list) else []
        if not all(isinstance(n, int) and 0 <= n < VOCABULARY for n in ids):
            return 400, "token out of vocabulary"
        if len(ids_of(prompt)) + body.get("max_tokens", 1) > MAX_LENGTH:
            return 400, "longer than the context"
        return None

    async def generate(
        self, request: web.Request, body: dict[str, Any], number: int, answered: dict[str, Any]
    ) -> web.StreamResponse:
        state = self.state
        prompt = ids_of(body["prompt"])
        tokens = int(body.get("max_tokens", 16))
        answer = self.spoiled(answer_of([*prompt, *self.changes(body, number)], tokens), number)
        other = answer_of(ids_of(answered["prompt"]), tokens) if answered is not body else answer
        answer = answer if body.get("n") == 2 else other
        self.join(len(prompt))
        step_s = STEP_S * (4.0 if state.fault == "slower" and number > FAULT_AT else 1.0)
        state.prompted += len(prompt)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens * body.get("n", 1)}
        usage["total_tokens"] = sum(usage.values())

        def choice(ids: list[int], finish: str | None, index: int = 0) -> dict[str, Any]:
            return choice_of(body, answered, ids, finish, index)

        base = {"id": f"cmpl-{number}", "object": "text_completion", "model": state.model}
        if not body.get("stream"):
            await asyncio.sleep(step_s * tokens)
            while state.hung:
                await asyncio.sleep(1)
            state.generated += len(answer)
            if "input" in body:
                content = [{"type": "output_text", "text": choice(answer, "")["text"]}]
                counts = {"input_tokens": len(prompt), "output_tokens": tokens}
                output = [{"type": "message", "content": content}]
                return web.json_response({"output": output, "status": "completed", "usage": counts})
            pair = [choice(answer, "length"), choice(other, "length", 1)]
            whole = [{**each, "prompt_token_ids": prompt} for each in pair[: body.get("n", 1)]]
            return web.json_response({**base, "choices": whole, "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(content: Any) -> None:
            text = content if isinstance(content, str) else json.dumps(content)
            await response.write(f"data: {text}\n\n".encode())

        for n, token in enumerate(answer):
            await asyncio.sleep(step_s)
            while state.hung or (state.fault == "stuck" and FAULT_AT <= number < FAULT_AT + 4):
                await asyncio.sleep(1)
            while n == 3 and state.ended < PREEMPTED.get(state.fault, {}).get(number, 0):
                await asyncio.sleep(0.02)
            while number in state.harmed and JOINED[state.fault]["harm"] == "stalls":
                await asyncio.sleep(1)
            state.decoding.add(number)
            token = (token + (number in state.harmed)) % len(SIGNS)
            first = {"prompt_token_ids": prompt} if n == 0 else {}
            last = "length" if n + 1 == len(answer) else None
            piece = {**choice([token], last), **first}
            if len(answer) > 1000 and state.fault in TEXTS:
                piece["text"] = TEXTS[state.fault](n, piece["text"])
            await send({**base, "choices": [piece]})
            state.generated += 1
        await send({**base, "choices": [], "usage": usage})
        await send("[DONE]")
        state.ended += 1
        return response

    def changes(self, body: dict[str, Any], number: int) -> list[int]:
        """Return the tokens that a request's parameters add to the input from which its answer
        follows."""
        fault = self.state.fault
        forgotten = fault.removeprefix("forgets-") if number > FORGETS_AT else ""
        changes = {k: body[k] for k in CHANGES if k in body and k != forgotten}
        cuts = {"top_p", "top_k", "min_p"} & body.keys() - {forgotten}
        hot = body.get("temperature") and not cuts
        return ids_of(f"{changes} {number if hot else ''}") if changes or hot else []

    def spoiled(self, answer: list[int], number: int) -> list[int]:
        state = self.state
        if len(answer) > 1000 and state.fault in LONG:
            return LONG[state.fault](answer)
        hit = number >= FAULT_AT and number % 200 >= FAULT_AT and len(answer) > 3
        in_a_crowd = state.running > 4 or state.fault != "corrupted"
        if state.fault in ONCE and hit and in_a_crowd and not state.hoard:
            state.hoard.append(number)
            return ONCE[state.fault](answer)
        return answer

    def join(self, prompt: int) -> None:
        """Count a prompt that arrives while other requests decode."""
        if (harm := self.harm(prompt)) == "dies":
            die(f"    entry.cudagraph.replay()\n{ILLEGAL}")
        if harm:
            self.state.harmed |= self.state.decoding

    def harm(self, prompt: int) -> str:
        """Return the fault that a prompt of this length causes in decoding requests.

        The result is empty if it causes none."""
        row = JOINED.get(self.state.fault, {"decoding": [], "harm": ""})
        least, most = row.get("prompt", (0, MAX_LENGTH))
        joins = len(self.state.decoding) in row["decoding"] and least <= prompt <= most
        return str(row["harm"]) if joins else ""

    def misbehave(self, number: int) -> None:
        state = self.state
        match state.fault:
            case "leak":
                state.hoard.append(bytearray(os.urandom(1 << 10) * 1024))
            case "handles":
                state.hoard.append(Path("/dev/null").open())  # noqa: SIM115
            case "threads":
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        if number != FAULT_AT:
            return
        match state.fault:
            case "killed" | "segfault" | "stopped":
                os.kill(os.getpid(), SIGNALS[state.fault])
            case "exit-0":
                os._exit(0)
            case "rlimit":
                self.run_out_of_memory()
            case "cgroup":
                enter_cgroup()
                state.hoard.append(bytearray(os.urandom(1 << 20) * 1024))
            case "zombie":
                # Popen would collect the exit status, so it is not used.
                os.posix_spawn("/bin/true", ["true"], {})
            case "log":
                line = "INFO 11-20 10:00:00 [loggers.py:1] " + "noise " * 160 + "\n"
                block = line * 4096
                with contextlib.suppress(OSError):
                    for _ in range((1 << 30) // len(block) + 1):
                        sys.stdout.write(block)
                die(ILLEGAL)
            case "silent":
                state.hung = True
            case "full-disk":
                filler = Path(os.environ["SM121_META_FILL"]) / "filler"
                with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
                    while True:
                        stream.write(bytes(4096))

    def run_out_of_memory(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
        try:
            self.state.hoard.append(bytearray(1 << 30))
        except MemoryError:
            die("MemoryError")


def cgroup_folder() -> Path | None:
    """Return a new memory control group; None if none can be created."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/memory") / path.lstrip("/") / f"sm121-{os.getpid()}"
        elif controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").is_file():
            folder = Path("/sys/fs/cgroup") / path.lstrip("/") / f"sm121-{os.getpid()}"
        else:
            continue
        with contextlib.suppress(OSError):
            folder.mkdir()
            return folder
    return None


def enter_cgroup() -> None:
    folder = cgroup_folder()
    if folder is None:
        say("no control group can be made here")
        return
    name = "memory.limit_in_bytes" if "memory/" in f"{folder}/" else "memory.max"
    limit = folder / name
    (limit if limit.exists() else folder / "memory.max").write_text(str(256 << 20))
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    # This script removes the group when the group is empty.
    remover = (DATA / "texts" / "remover-of-a-group.txt").read_text("utf-8")
    subprocess.Popen(
        [sys.executable, "-c", remover, str(folder)],
        preexec_fn=lambda: (folder.parent / "cgroup.procs").write_text(str(os.getpid())),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="canary")
    parser.add_argument("--max-num-seqs", type=int, default=PLACES)
    options, _ = parser.parse_known_args()
    fault = os.environ.get("SM121_META_FAULT", "none")
    say("INFO 11-20 10:00:00 [api_utils.py:347] version 0.32.0")
    if fault == "port":
        address = f"address ('127.0.0.1', {options.port}): address already in use"
        say(f"[Errno 98] error while attempting to bind on {address}")
        sys.exit(1)
    state = State(fault, options.served_model_name, os.environ.get("VLLM_API_KEY", ""))
    state.hung = fault == "never"
    state.slots = asyncio.Semaphore(5 if fault == "fewer" else options.max_num_seqs)
    say("INFO:     Application startup complete.")
    web.run_app(
        Server(state).application(), host="127.0.0.1", port=options.port, print=None,
        access_log=None, shutdown_timeout=0.5,
    )  # fmt: skip


if __name__ == "__main__":
    main()
