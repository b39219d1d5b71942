"""The shapes of load: which requests, when, and what their clients do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sm121.answers.prompts import Prompt
from sm121.client.completions import Completion, Request
from sm121.client.load import Behaviour, Job

Arrival = Literal["closed", "poisson", "burst"]
ARRIVALS: tuple[Arrival, ...] = ("closed", "poisson", "burst")

#: Requests that every server must refuse, each alone and in the middle of a load.
BAD_REQUESTS: dict[str, dict[str, Any]] = {
    "negative max_tokens": {"max_tokens": -1},
    "prompt of numbers that are no tokens": {"prompt": [-5, 10**9]},
    "temperature of -1": {"temperature": -1.0},
    "no such model": {"model": "no-such-model"},
    "messages in place of a prompt": {"prompt": {"role": "user"}},
}
_BURST = 8


@dataclass
class Shapes:
    """Makes jobs for one server.

    Args:
        model: the served name.
        prompts: with one right continuation each.
        ask: asks a prompt alone, in a cold part of the cache.
        salted: the server keeps apart what is cached under different salts.
        log_probabilities: the answers can only be compared by them.
    """

    model: str
    prompts: Sequence[Prompt]
    ask: Callable[[Request], Completion]
    salted: bool
    log_probabilities: bool
    plain: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
    random: random.Random = field(default_factory=lambda: random.Random(121))
    _alone: dict[tuple[Any, int], Completion] = field(default_factory=dict)
    _salt: int = 0

    def alone(self, prompt: str | tuple[int, ...], tokens: int) -> Completion:
        """The answer to a prompt when nothing else is asked."""
        key = (prompt, tokens)
        if key not in self._alone:
            top = 5 if self.log_probabilities else 0
            asked = Request(prompt, tokens, top=top, salt=self._fresh_salt())
            self._alone[key] = self.ask(asked)
        return self._alone[key]

    def short(self, tokens: int) -> Iterator[Job]:
        """Short requests without end: the prompts in turn, streamed and not."""
        for number in self._count():
            prompt = self.prompts[number % len(self.prompts)]
            yield self.job(prompt.text, tokens, name=prompt.name, stream=number % 4 != 3)

    def mixed(self, tokens: int) -> Iterator[Job]:
        """Prompts of all lengths with answers of all lengths, as users send them."""
        for number in self._count():
            prompt = self.prompts[self.random.randrange(len(self.prompts))]
            asked = self.random.choice((1, 2, max(tokens // 2, 1), tokens, 2 * tokens))
            yield self.job(prompt.text, asked, name=prompt.name, stream=number % 4 != 3)

    def unruly(self, tokens: int) -> Iterator[Job]:
        """Between requests like any other: clients that cancel, disconnect, read slowly, and
        requests that must be refused."""
        bad = list(BAD_REQUESTS.items())
        for number in self._count():
            prompt = self.prompts[number % len(self.prompts)]
            match number % 6:
                case 1:
                    yield self.job(prompt.text, 8 * tokens, name="cancels", behaviour="cancel")
                case 2:
                    name, change = bad[(number // 6) % len(bad)]
                    yield self.job(prompt.text, tokens, name=name, behaviour="bad", change=change)
                case 3:
                    yield self.job(
                        prompt.text, 8 * tokens, name="disconnects", behaviour="disconnect"
                    )
                case 4:
                    yield self.job(prompt.text, tokens, name="reads slowly", behaviour="slow")
                case _:
                    yield self.job(prompt.text, tokens, name=prompt.name)

    def long(self, tokens: int, compared: int) -> Job:
        """One answer of many tokens, of which the first are compared."""
        prompt = self.prompts[0]
        job = self.job(prompt.text, compared, name=f"{tokens} tokens")
        return replace(job, tokens=tokens, body={**job.body, "max_tokens": tokens})

    def of_length(self, prompt_tokens: int, tokens: int, *, turn: int = 0) -> Job:
        """A prompt of exactly so many token ids, which repeats a text (so that it goes on in one
        way), beginning at another place for each ``turn``."""
        prompt = self.prompts[turn % len(self.prompts)]
        ids = self.alone(prompt.text, 1).prompt_ids
        if ids is None:
            raise ValueError("the engine returns no token ids of prompts")
        start = (turn * 7) % len(ids)
        repeated = [ids[(start + n) % len(ids)] for n in range(prompt_tokens)]
        return self.job(
            tuple(repeated), tokens, name=f"{prompt_tokens} + {tokens} tokens, {prompt.name}"
        )

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
        top = 5 if self.log_probabilities else 0
        salt = self._fresh_salt()
        body = Request(prompt, tokens, top=top, salt=salt).body(self.model)
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        body = {**self.plain(body), **(change or {})}
        compared = behaviour in ("complete", "slow")
        alone = self.alone(prompt, tokens) if compared else None
        return Job(name, body, tokens, alone, behaviour)

    def _fresh_salt(self) -> str | None:
        self._salt += 1
        return f"sm121-stress-{id(self)}-{self._salt}" if self.salted else None

    @staticmethod
    def _count() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def moments(kind: Arrival, count: int, per_s: float, seed: int = 7) -> list[float] | None:
    """When each of ``count`` requests comes, in seconds; None for a closed loop."""
    source = random.Random(seed)
    if kind == "closed":
        return None
    if kind == "burst":
        return [(number // _BURST) * (_BURST / per_s) for number in range(count)]
    at, found = 0.0, []
    for _ in range(count):
        found.append(at)
        at += source.expovariate(per_s)
    return found
