"""The shapes of load: which requests, when, what their clients do, and how much a server holds."""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from sm121.answers.prompts import Prompt
from sm121.client.completion_json import Completion
from sm121.client.completions import Request
from sm121.client.jobs import Behaviour, Job
from sm121.core import engine_arguments
from sm121.core.server import Endpoint, Server
from sm121.core.verdict import NotRun

Arrival = Literal["closed", "poisson", "burst"]
ARRIVALS: tuple[Arrival, ...] = ("closed", "poisson", "burst")

#: Requests that a server must refuse, alone and under load, with their case of ``fixtures/api``.
BAD_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "negative max_tokens": ("negative-max-tokens", {"max_tokens": -1}),
    "prompt of numbers that are no tokens": ("negative-id", {"prompt": [-5, 10**9]}),
    "temperature of -1": ("negative-temperature", {"temperature": -1.0}),
    "no such model": ("wrong-model", {"model": "no-such-model"}),
    "messages in place of a prompt": ("prompt-is-an-object", {"prompt": {"role": "user"}}),
}
_BURST = 8
#: Tokens of a part of a long answer.
_PART = 64
#: vLLM's --max-num-batched-tokens where it is neither given nor logged.
_CHUNK_TOKENS = 2048
_LOGGED_CHUNK = re.compile(r"max_num_batched_tokens=(\d+)")
_LOG_BEGINS = 1 << 20
#: What a stream holds in layers with a sliding window: gpt-oss has 128 tokens, and a block or two.
_WINDOW_TOKENS = 256
_CACHE_BLOCKS = re.compile(r'cache_config_info\{[^}]*\bnum_gpu_blocks="(\d+)"')
_BLOCK_TOKENS = re.compile(r'cache_config_info\{[^}]*\bblock_size="(\d+)"')


class Shapes:
    """Makes jobs for one server. `model`: the served name; `prompts`: with one right continuation
    each; `ask`: asks a prompt alone, in a cold part of the cache; `salted`: salts keep apart what
    is cached; `log_probabilities`: the answers can only be compared by them; `refuses`: whether the
    server is to refuse a case of ``fixtures/api``, by its id."""

    def __init__(
        self,
        *,
        model: str,
        prompts: Sequence[Prompt],
        ask: Callable[[Request], Completion],
        salted: bool,
        log_probabilities: bool,
        refuses: Callable[[str], bool] = lambda _case: True,
    ) -> None:
        self._model = model
        self.prompts = prompts
        self._ask = ask
        self._salted = salted
        self._top = 5 if log_probabilities else 0
        self._bad = [(name, body) for name, (case, body) in BAD_REQUESTS.items() if refuses(case)]
        self._random = random.Random(121)
        self._alone: dict[tuple[str | tuple[int, ...], int], Completion] = {}
        self._salts = itertools.count(1)

    def alone(self, prompt: str | tuple[int, ...], tokens: int) -> Completion:
        """The answer to a prompt when nothing else is asked."""
        key = (prompt, tokens)
        if key not in self._alone:
            request = Request(prompt, tokens, top=self._top, salt=self._fresh_salt())
            self._alone[key] = self._ask(request)
        return self._alone[key]

    def short(self, tokens: int) -> Iterator[Job]:
        """Short requests without end: the prompts in turn, streamed and not."""
        for number in itertools.count():
            prompt = self.prompts[number % len(self.prompts)]
            yield self.job(prompt.text, tokens, name=prompt.name, stream=number % 4 != 3)

    def mixed(self, tokens: int) -> Iterator[Job]:
        """Prompts of all lengths with answers of all lengths, as users send them."""
        for number in itertools.count():
            prompt = self.prompts[self._random.randrange(len(self.prompts))]
            length = self._random.choice((1, 2, max(tokens // 2, 1), tokens, 2 * tokens))
            yield self.job(prompt.text, length, name=prompt.name, stream=number % 4 != 3)

    def unruly(self, tokens: int) -> Iterator[Job]:
        """Between others: clients that cancel, disconnect, read slowly, or must be refused."""
        clients: dict[int, tuple[str, Behaviour, int]] = {
            1: ("cancels", "cancel", 8 * tokens),
            3: ("disconnects", "disconnect", 8 * tokens),
            4: ("reads slowly", "slow", tokens),
        }
        for number in itertools.count():
            prompt, turn = self.prompts[number % len(self.prompts)], number % 6
            name, behaviour, length = clients.get(turn, (prompt.name, "complete", tokens))
            change = None
            if turn == 2:
                (name, change), behaviour = self._bad[(number // 6) % len(self._bad)], "bad"
            yield self.job(prompt.text, length, name=name, behaviour=behaviour, change=change)

    def long(self, tokens: int, compared: int) -> Job:
        """One answer of many tokens, of which the first are compared."""
        job = self.job(self.prompts[0].text, compared, name=f"{tokens} tokens")
        return replace(job, tokens=tokens, body={**job.body, "max_tokens": tokens})

    def parts(self, prompt: Sequence[int], ids: Sequence[int], answer: Completion) -> list[Job]:
        """Each part of a long answer, asked for after all that is before it: the same must come.
        `prompt`: ids of the prompt, and ``ids`` those of its answer."""
        jobs = []
        for begin in range(0, len(ids), _PART):
            part = tuple(ids[begin : begin + _PART])
            positions = answer.positions[begin : begin + _PART] if answer.positions else None
            same = replace(answer, text="", ids=part, positions=positions, prompt_tokens=None)
            request = Request(
                (*prompt, *ids[:begin]), len(part), self._top, salt=self._fresh_salt()
            )
            name = f"tokens {begin} to {begin + len(part)} again"
            jobs.append(Job(name, request.body(self._model), len(part), same))
        return jobs

    def of_length(self, prompt_tokens: int, tokens: int, *, turn: int = 0) -> Job:
        """A prompt of exactly so many token ids, which repeats a text (so that it goes on in one
        way), beginning at another place for each ``turn``."""
        prompt = self.prompts[turn % len(self.prompts)]
        if (ids := self.alone(prompt.text, 1).prompt_ids) is None:
            raise ValueError("the engine returns no token ids of prompts")
        start = (turn * 7) % len(ids)
        repeated = tuple(ids[(start + n) % len(ids)] for n in range(prompt_tokens))
        name = f"{prompt_tokens} + {tokens} tokens, {prompt.name}"
        return self.job(repeated, tokens, name=name)

    def job(
        self,
        prompt: str | tuple[int, ...],
        tokens: int,
        *,
        name: str,
        stream: bool = True,
        behaviour: Behaviour = "complete",
        change: dict[str, Any] | None = None,
    ) -> Job:
        """One job; the answer that the prompt has alone is asked for first, where it counts."""
        body = Request(prompt, tokens, top=self._top, salt=self._fresh_salt()).body(self._model)
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        body |= change or {}
        compared = behaviour in ("complete", "slow")
        alone = self.alone(prompt, tokens) if compared else None
        return Job(name, body, tokens, alone, behaviour)

    def other(self, path: str, body: dict[str, Any], tokens: int) -> Job:
        """A request of another kind than a completion. Its answer may end by itself."""
        body = {"model": self._model, **body}
        return self.salted(Job("", body, tokens, path=path, may_end=True))

    def salted(self, job: Job) -> Job:
        """The same request, in a cold part of the cache."""
        salt = self._fresh_salt()
        return job if salt is None else replace(job, body={**job.body, "cache_salt": salt})

    def _fresh_salt(self) -> str | None:
        return f"sm121-stress-{id(self)}-{next(self._salts)}" if self._salted else None


def moments(kind: Arrival, count: int, per_s: float, seed: int = 7) -> list[float] | None:
    """When each of ``count`` requests comes, in seconds; None for a closed loop."""
    source = random.Random(seed)
    if kind == "closed":
        return None
    if kind == "burst":
        return [(number // _BURST) * (_BURST / per_s) for number in range(count)]
    gaps = (source.expovariate(per_s) for _ in range(count - 1))
    return [*itertools.accumulate(gaps, initial=0.0)]


def context_tokens(server: Server) -> int:
    """Most tokens of a prompt and its answer; `NotRun` where nothing says."""
    if (length := server.context_tokens()) is None:
        raise NotRun("the length of the context is not known: /v1/models has no max_model_len")
    return length


def cache_blocks(endpoint: Endpoint) -> tuple[int, int]:
    """Blocks of the KV cache, and tokens of each. Raises NotRun: the server does not say."""
    text = endpoint.page("/metrics") or ""
    blocks, size = _CACHE_BLOCKS.search(text), _BLOCK_TOKENS.search(text)
    if blocks is None or size is None:
        raise NotRun("the size of the KV cache is not known: no vllm:cache_config_info")
    return int(blocks[1]), int(size[1])


class Pressure(NamedTuple):
    """A load that fills a KV cache: all requests are let in, and grow by more than is free then.
    Tokens of each prompt, and of each answer."""

    prompt: int
    answer: int


def pressure(blocks: int, block: int, *, chunk: int, streams: int, spare: int) -> Pressure:
    """The load of so many streams for a KV cache of `blocks`, each of ``block`` tokens. The last
    one is let in when a whole `chunk` of its prompt fits, twice where layers have a sliding window;
    what that took beyond the window is free afterwards. A cache that is large against a chunk, or
    whose blocks are small against the window, must be left that room on purpose. Each step in which
    a chunk is read makes the answers before it longer by a token, so that they take the last one's
    place, or end before it is let in. `spare`: blocks of each stream left free."""
    margin = max(2 * min(block, 16), block // 4)
    short = (blocks - 1) // (streams + 1)
    if chunk // block > short:  # a prompt is read at once, and takes twice its room meanwhile
        length = (short - spare - _WINDOW_TOKENS // block) * block
        return Pressure(length, blocks * block // streams - length + margin)
    tokens = chunk // streams + margin
    beside = (blocks - 1 - 2 * (chunk // block)) // (streams - 1)
    whole = (blocks - 1) // streams
    length = (min(beside, whole) - spare) * block - block // 16
    if beside > whole or block < _WINDOW_TOKENS // 2:
        steps = -(-blocks * block // chunk)
        room = 2 * chunk // streams + _WINDOW_TOKENS
        length -= steps + room
        tokens += 2 * steps + room
    return Pressure(length, tokens)


def chunk_tokens(server: Server) -> int:
    """Tokens of a prompt that are worked on at once."""
    arguments = server.configuration.arguments if server.configuration is not None else ()
    value = engine_arguments.read(arguments).get("max_num_batched_tokens", "")
    if value.isdecimal():
        return int(value)
    if server.log is not None:
        with server.log.open("rb") as log:
            match = _LOGGED_CHUNK.search(log.read(_LOG_BEGINS).decode("utf-8", "replace"))
        if match is not None:
            return int(match[1])
    return _CHUNK_TOKENS
