"""The shapes of loads: the requests, their start times and the behaviour of their clients.

`sm121.stress.cache` has the load that fills a KV cache.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sm121.answers.prompts import Prompt
from sm121.client.completion_json import Completion
from sm121.client.completions import Request
from sm121.client.jobs import Behaviour, Job

Arrival = Literal["closed", "poisson", "burst"]
ARRIVALS: tuple[Arrival, ...] = ("closed", "poisson", "burst")


@dataclass(frozen=True)
class BadRequest:
    """A request that a server must refuse, alone and under load."""

    name: str
    #: The case in ``fixtures/api`` that documents the refusal.
    case: str
    #: The fields that turn a valid request into this one.
    change: dict[str, Any]


BAD_REQUESTS = (
    BadRequest("negative max_tokens", "negative-max-tokens", {"max_tokens": -1}),
    BadRequest("prompt of numbers that are no tokens", "negative-id", {"prompt": [-5, 10**9]}),
    BadRequest("temperature of -1", "negative-temperature", {"temperature": -1.0}),
    BadRequest("no such model", "wrong-model", {"model": "no-such-model"}),
    BadRequest(
        "messages in place of a prompt", "prompt-is-an-object", {"prompt": {"role": "user"}}
    ),
)
#: Number of requests in a burst.
_BURST = 8
#: Number of tokens of a part of a long answer.
_PART = 64
#: Number of likeliest tokens requested per position, if answers are compared by log-probabilities.
_TOP = 5
#: One request in this many is not streamed.
_UNSTREAMED = 4
#: Number of requests after which the behaviours of unruly clients repeat.
_UNRULY_TURNS = 6
#: Length of an answer that the client abandons, as a multiple of the length of other answers.
_CANCELLED_TIMES = 8


@dataclass(frozen=True)
class _Client:
    """The behaviour of an unruly client."""

    name: str
    behaviour: Behaviour
    #: The length of the requested answer, as a multiple of the length of other answers.
    times: int


_CLIENTS = {
    1: _Client("cancels", "cancel", _CANCELLED_TIMES),
    3: _Client("disconnects", "disconnect", _CANCELLED_TIMES),
    4: _Client("reads slowly", "slow", 1),
}
#: The turn in which a client sends a request that must be refused.
_BAD_TURN = 2


class Shapes:
    """Makes jobs for one server.

    Args:
        model: The served name.
        prompts: Prompts with one correct continuation each.
        ask: Sends a request alone, and returns its answer.
        salted: Whether requests get different cache salts, so that they share no prefix cache.
        log_probabilities: Whether answers can only be compared by log-probabilities.
        refuses: Returns whether the server should refuse a case of ``fixtures/api``.

    Attributes:
        prompts: The prompts.
    """

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
        self._top = _TOP if log_probabilities else 0
        self._bad = [request for request in BAD_REQUESTS if refuses(request.case)]
        self._random = random.Random(121)
        self._alone: dict[tuple[str | tuple[int, ...], int], Completion] = {}
        self._salts = itertools.count(1)

    def alone(self, prompt: str | tuple[int, ...], tokens: int) -> Completion:
        """Return the answer to a prompt that is sent alone. Each answer is requested only once.

        Args:
            prompt: The prompt, as a text or as token ids.
            tokens: The number of tokens of the answer.
        """
        key = (prompt, tokens)
        if key not in self._alone:
            request = Request(prompt, tokens, top=self._top, salt=self._fresh_salt())
            self._alone[key] = self._ask(request)
        return self._alone[key]

    def short(self, tokens: int) -> Iterator[Job]:
        """Yield short requests endlessly: the prompts alternate, and three of four are streamed.

        Args:
            tokens: The tokens of each answer.
        """
        for number in itertools.count():
            prompt = self.prompts[number % len(self.prompts)]
            yield self.job(prompt.text, tokens, name=prompt.name, stream=_is_streamed(number))

    def mixed(self, tokens: int) -> Iterator[Job]:
        """Yield requests endlessly; their answers have various lengths, like those of users.

        Args:
            tokens: The average number of tokens of an answer.
        """
        lengths = (1, 2, max(tokens // 2, 1), tokens, 2 * tokens)
        for number in itertools.count():
            prompt = self.prompts[self._random.randrange(len(self.prompts))]
            length = self._random.choice(lengths)
            yield self.job(prompt.text, length, name=prompt.name, stream=_is_streamed(number))

    def unruly(self, tokens: int) -> Iterator[Job]:
        """Yield requests endlessly; two of three are from clients that misbehave.

        These clients cancel, disconnect, read slowly, or send a request that must be refused.

        Args:
            tokens: The tokens of each answer that is read.
        """
        for number in itertools.count():
            prompt = self.prompts[number % len(self.prompts)]
            turn = number % _UNRULY_TURNS
            if turn == _BAD_TURN:
                bad = self._bad[(number // _UNRULY_TURNS) % len(self._bad)]
                yield self.job(
                    prompt.text, tokens, name=bad.name, behaviour="bad", change=bad.change
                )
                continue
            client = _CLIENTS.get(turn) or _Client(prompt.name, "complete", 1)
            yield self.job(
                prompt.text,
                client.times * tokens,
                name=client.name,
                behaviour=client.behaviour,
            )

    def long(self, tokens: int, compared: int) -> Job:
        """Return a job with a long answer.

        Args:
            tokens: The tokens of the answer.
            compared: How many of the first tokens are compared with the answer to the prompt sent
                alone.
        """
        job = self.job(self.prompts[0].text, compared, name=f"{tokens} tokens")
        return replace(job, tokens=tokens, body={**job.body, "max_tokens": tokens})

    def parts(self, prompt: Sequence[int], ids: Sequence[int], answer: Completion) -> list[Job]:
        """Return a job for each part of a long answer, with everything before it as the prompt.

        Args:
            prompt: The token ids of the prompt.
            ids: The token ids of the answer.
            answer: The answer, whose tokens must be generated again.
        """
        jobs: list[Job] = []
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
        """Return a job whose prompt repeats a text up to an exact length.

        The repetition makes the continuation of the prompt certain.

        Args:
            prompt_tokens: The tokens of the prompt.
            tokens: The tokens of the answer.
            turn: Selects the text, and where in the text the prompt begins.

        Raises:
            ValueError: The engine returns no token ids of prompts.
        """
        prompt = self.prompts[turn % len(self.prompts)]
        ids = self.alone(prompt.text, 1).prompt_ids
        if ids is None:
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
        """Return a job. If its answer will be compared, request the same answer alone first.

        Args:
            prompt: The prompt, as a text or as token ids.
            tokens: The tokens of the answer.
            name: The name for messages.
            stream: Whether the answer is streamed.
            behaviour: What the client does with the answer.
            change: Fields that replace those of the request.
        """
        body = Request(prompt, tokens, top=self._top, salt=self._fresh_salt()).body(self._model)
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        body |= change or {}
        is_compared = behaviour in ("complete", "slow")
        alone = self.alone(prompt, tokens) if is_compared else None
        return Job(name, body, tokens, alone, behaviour)

    def other(self, path: str, body: dict[str, Any], tokens: int) -> Job:
        """Return a job for another API than completions. Its answer may end before the limit.

        Args:
            path: The path of the API.
            body: The request without its model.
            tokens: The maximum number of tokens of the answer.
        """
        body = {"model": self._model, **body}
        return self.salted(Job("", body, tokens, path=path, may_end=True))

    def salted(self, job: Job) -> Job:
        """Return the same job with a fresh cache salt, so that no cached prefix is used.

        Args:
            job: The job.
        """
        salt = self._fresh_salt()
        if salt is None:
            return job
        return replace(job, body={**job.body, "cache_salt": salt})

    def _fresh_salt(self) -> str | None:
        return f"sm121-stress-{id(self)}-{next(self._salts)}" if self._salted else None


def _is_streamed(number: int) -> bool:
    return number % _UNSTREAMED != _UNSTREAMED - 1


def moments(kind: Arrival, count: int, per_s: float, seed: int = 7) -> list[float] | None:
    """Return the start time of each request, in seconds.

    Args:
        kind: The kind of arrival.
        count: The number of requests.
        per_s: The average number of requests per second.
        seed: The seed of random moments.

    Returns:
        The start times, the first of them 0; None for a closed loop.
    """
    if kind == "closed":
        return None
    if kind == "burst":
        return [(number // _BURST) * (_BURST / per_s) for number in range(count)]
    source = random.Random(seed)
    gaps = (source.expovariate(per_s) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))
