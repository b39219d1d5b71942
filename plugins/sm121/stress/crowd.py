"""Many more concurrent requests than the server runs, of all kinds: no answers may be mixed up.

Every request is sent alone first. In the crowd, its answer must be the same, or within the bound if
its tokens have log-probabilities. If rounding may change tokens and there are no log-probabilities
(streamed chats, responses), the check only detects an answer that belongs to another request.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sm121.answers import sanity
from sm121.api.tools import tools
from sm121.client.jobs import Job, JobOutcome, LoadResult
from sm121.client.load import LoadClient
from sm121.core import level_settings, verdict
from sm121.engines.capabilities import Capabilities, Name
from sm121.stress import checks
from sm121.stress.checks import Fault, UnderLoad
from sm121.stress.crowded_samples import CrowdedSamples, SampleJob
from sm121.stress.shapes import Shapes

#: The minimum number of requests of a crowd. The keys are the sizes of the crowd, as multiples of
#: the server's slots.
TIMES = {2: 40, 10: 64}
#: Maximum number of requests: by default a process may open 1,024 files.
_AT_MOST = 512
#: Number of different requests of each kind.
_PROMPTS = 3
#: Index of the first prompt used. Other prompts of the set have so certain continuations that
#: samples at a high temperature equal greedy ones.
_FIRST = 4
#: Number of tokens of the first long prompt.
_LONG = 400
#: Number of tokens by which each further long prompt is longer.
_LONGER = 80
#: The kind of requests whose prompts share their beginning.
_SHARED = "one beginning"
#: A temperature so high that the token changes if the other sampling parameters are ignored.
_HOT = 2.0
#: The tokens in a logit bias or in a list of allowed tokens.
_NAMED_TOKENS = range(1000, 1020)
#: Maximum number of tokens per answer in a request for several choices.
_CHOICE_TOKENS = 16
_CITIES = ("Lima", "Rome", "Tokyo")
#: Number of likeliest tokens requested per position of a chat, to compare answers.
_TOP = 5


@dataclass(frozen=True)
class _Sampling:
    """Parameters that sample at a high temperature, but only from the likeliest token."""

    options: Mapping[str, Any]
    #: The capability that the engine needs; None for OpenAI's own parameters.
    needs: Name | None = None


_SAMPLED = (
    _Sampling({"temperature": _HOT, "top_p": 1e-6}),
    _Sampling({"temperature": _HOT, "top_k": 1}, needs="top_k"),
    _Sampling({"temperature": _HOT, "min_p": 1.0}, needs="min_p"),
)


@dataclass(frozen=True)
class _Change:
    """Options that change a greedy answer."""

    needs: Name
    options: Mapping[str, Any]
    #: The option whose value is the first word of the greedy answer; empty if there is none.
    of_word: str = ""

    def options_for(self, word: str) -> dict[str, Any]:
        if self.of_word:
            return {**self.options, self.of_word: [word]}
        return dict(self.options)


_BIAS: dict[str, Any] = {"logit_bias": {str(token): 50 for token in _NAMED_TOKENS}}
_OFTEN = {**_BIAS, "frequency_penalty": 2.0}
_STOP = _Change("stop", {}, of_word="stop")
#: If the server ignores a penalty, the answer equals the previous row's answer.
_CHANGED = (
    _Change("logit_bias", _BIAS),
    _Change("penalties", _OFTEN),
    _Change("penalties", {**_OFTEN, "presence_penalty": 2.0}),
    _Change("repetition_penalty", {"repetition_penalty": 100.0}),
    _Change("allowed_token_ids", {"allowed_token_ids": [*_NAMED_TOKENS]}),
    _Change("bad_words", {}, of_word="bad_words"),
    _STOP,
    _STOP,
    _STOP,
)
#: The capabilities of the rows that use the bias of the first row.
_ON_BIAS = ("logit_bias", "penalties")


def size(times: int, places: int) -> int:
    """Return the number of requests of a crowd.

    Args:
        times: The size as a multiple of the server's slots: 2 or 10.
        places: The number of requests that the server runs at a time (its slots).
    """
    return min(max(TIMES[times], times * places), _AT_MOST)


@dataclass
class Crowd:
    """Makes the requests of a crowd, and compares the answers with answers to single requests.

    Attributes:
        shapes: Makes the requests.
        client: Sends each request alone.
        capabilities: The capabilities of the engine.
        bound: How far an answer may differ from the answer to the same request alone.
        tokens: The number of tokens of an answer.
        samples: Requests for samples, which are sent between the others.
        refused: The kinds that the server refuses even alone, with the text of the refusal.
    """

    shapes: Shapes
    client: LoadClient
    capabilities: Capabilities
    bound: level_settings.AgreementBound
    tokens: int
    samples: CrowdedSamples
    refused: dict[str, str] = field(default_factory=dict)
    #: The allowed texts of a structured answer. The keys are the names of jobs.
    _choices: dict[str, Sequence[str]] = field(default_factory=dict)
    #: The kinds whose options change the greedy answer, so that only texts can be compared.
    _changed_kinds: set[str] = field(default_factory=set)

    def jobs(self, count: int, *, often: bool = False) -> list[Job]:
        """Return the requests of a crowd: all kinds in turn, with one-token samples between them.

        Consecutive requests have different prompts.

        Args:
            count: The number of requests without the samples.
            often: Whether the crowd is repeated often. If so, two kinds of requests are left out:
                those whose check may fail by chance, and those of which only texts are compared.

        Raises:
            UnderLoad: A request got no answer even when it was sent alone.
            NotRun: The server refuses all kinds.
        """
        turns = self._turns
        if often:
            turns = [job for job in turns if job.kind not in self._changed_kinds]
        jobs = list(itertools.islice(itertools.cycle(turns), count))
        if not often:
            for number, job in enumerate(self.samples.jobs()):
                jobs.insert(count // 3 + 2 * number, job)
        if self.samples.lacking:
            self.refused["samples"] = self.samples.lacking
        return [job if job.kind == _SHARED else self.shapes.salted(job) for job in jobs]

    def faults(self, load: LoadResult) -> list[Fault]:
        """Find the answers that are wrong, or that belong to another request.

        Args:
            load: The load of `jobs`.
        """
        samples: list[JobOutcome] = []
        answers: list[JobOutcome] = []
        for outcome in load.outcomes:
            if outcome.answer is not None and isinstance(outcome.job, SampleJob):
                samples.append(outcome)
            else:
                answers.append(outcome)
        jobs = {outcome.job.name: outcome.job for outcome in answers}
        faults: list[Fault] = []
        for outcome in answers:
            fault = self._fault(outcome, jobs.values())
            if fault is not None:
                faults.append(fault)
        return faults + self.samples.faults(samples)

    def _fault(self, outcome: JobOutcome, jobs: Iterable[Job]) -> Fault | None:
        job = outcome.job
        answer = outcome.answer
        # Without log-probabilities, a different answer cannot be compared with the bound.
        forks = self.bound.fork > 0 and answer is not None and answer.positions is None
        judged = replace(outcome, job=replace(job, alone=None)) if forks else outcome
        fault = checks.fault(judged, self.bound)
        if answer is None or not (fault or forks or job.name in self._choices):
            return fault
        where = f"request {outcome.number} ({job.name})"
        for choice in (answer, *outcome.others):
            of_text = self._check_text(where, choice.text, job, jobs)
            if of_text is not None:
                return of_text
        return fault

    def _check_text(self, where: str, text: str, job: Job, jobs: Iterable[Job]) -> Fault | None:
        """Check that a text is not another request's answer, is an allowed choice, and is sane."""
        if self._is_answer_to(text, job):
            return None
        for other in jobs:
            if other.path == job.path and self._is_answer_to(text, other):
                observed = f"got that of {other.name}: {text!r}"
                return Fault("anothers_answer", f"{where}: expected its own answer, {observed}")
        if job.name in self._choices:
            required = f"expected one of {self._choices[job.name]}"
            return Fault("corrupted_answer", f"{where}: {required}, got {text!r}")
        alone = job.alone.text if job.alone is not None else ""
        signs = sanity.signs(text) if text else ["no text"]
        if alone and signs and not sanity.signs(alone):
            required = f"expected an answer like {alone!r}"
            return Fault("corrupted_answer", f"{where}: {required}, got {text!r} ({signs[0]})")
        return None

    def _is_answer_to(self, text: str, job: Job) -> bool:
        if job.name in self._choices:
            return text in self._choices[job.name]
        return job.alone is not None and text == job.alone.text

    @functools.cached_property
    def _turns(self) -> list[Job]:
        """The different requests, all kinds in turn. Neighbours have different prompts."""
        shifted: list[list[Job]] = []
        for kind, make in self._kinds().items():
            group = self._with_alone(kind, make)
            if group:
                shift = len(shifted) % _PROMPTS
                shifted.append(group[shift:] + group[:shift])
        if not shifted:
            raise verdict.NotRun(f"the server refuses every kind of request: {self.refused}")
        turns: list[Job] = []
        for turn in zip(*shifted, strict=True):
            turns += turn
        return turns

    def _with_alone(self, kind: str, make: Callable[[int], Job]) -> list[Job]:
        """Return a kind's requests with their answers when sent alone; empty if it is refused."""
        jobs = [replace(make(n), name=f"{kind} {n + 1}", kind=kind) for n in range(_PROMPTS)]
        outcomes = self.client.run(jobs, concurrency=1).outcomes
        problems = [outcome.problem for outcome in outcomes if outcome.problem is not None]
        if problems:
            problem_kind, text = problems[0]
            if problem_kind != "refused":
                fault = Fault(problem_kind, text)
                raise UnderLoad(f"{kind}, sent alone", [fault], len(jobs))
            self.refused[kind] = text
            return []
        if jobs[0].name in self._choices:
            return jobs
        return [replace(o.job, alone=o.job.alone or o.answer) for o in outcomes]

    def _kinds(self) -> dict[str, Callable[[int], Job]]:
        """Return, for each kind that the engine supports, a function from number to request."""
        can = self.capabilities.can
        kinds: dict[str, Callable[[int], Job]] = {
            "completion": self._completion,
            "streamed completion": lambda n: self._completion(n, stream=True),
            "sampled completion": lambda n: self._completion(n, stream=True, **self._sampling(n)),
        }
        if can("several_choices"):
            kinds["two completions"] = lambda n: self._completion(n, n=2, **self._sampling(n))
        if can("token_prompts") and can("token_ids"):
            kinds["long prompt"] = self._long_prompt
            kinds[_SHARED] = self._shared
        changes = self._possible_changes()
        for number in range(len(changes) // _PROMPTS):
            of_kind = changes[number * _PROMPTS : (number + 1) * _PROMPTS]
            kind = f"changed completion {number + 1}"
            kinds[kind] = functools.partial(self._changed, number, of_kind)
            self._changed_kinds.add(kind)
        if can("choice"):
            kinds["choice"] = self._choice
        if can("chat"):
            effort = {"reasoning_effort": "high"} if can("reasoning_effort") else {}
            kinds["chat"] = self._chat
            kinds["streamed chat"] = lambda n: self._chat(n, stream=True, **effort)
        if can("tools"):
            kinds["chat with a tool"] = lambda n: self._chat(n, tools=tools(1))
        if can("responses"):
            kinds["response"] = self._response
        return kinds

    def _possible_changes(self) -> list[_Change]:
        can = self.capabilities.can
        changes = [change for change in _CHANGED if can(change.needs)]
        if can("logit_bias"):
            return changes
        return [change for change in changes if change.needs not in _ON_BIAS]

    def _completion(self, number: int, *, stream: bool = False, **change: Any) -> Job:
        text = self.shapes.prompts[_FIRST + number].text
        return self.shapes.job(text, self.tokens, name="", stream=stream, change=change)

    def _long_prompt(self, number: int) -> Job:
        return self.shapes.of_length(_LONG + number * _LONGER, self.tokens, turn=number)

    def _shared(self, number: int) -> Job:
        """Return a request with the shared cache salt, like users with the same system message."""
        job = self.shapes.of_length(_LONG + number, self.tokens)
        return replace(job, body=job.body | self._part)

    @functools.cached_property
    def _part(self) -> dict[str, Any]:
        return self.shapes.salted(Job("", {}, 0)).body

    def _sampling(self, number: int) -> Mapping[str, Any]:
        possible: list[_Sampling] = []
        for sampling in _SAMPLED:
            if sampling.needs is None or self.capabilities.can(sampling.needs):
                possible.append(sampling)
        return possible[number % len(possible)].options

    def _changed(self, prompt: int, changes: Sequence[_Change], number: int) -> Job:
        """Return a request with changed options.

        It requests no log-probabilities, since the options do not change them.
        """
        plain = self._completion(prompt)
        words = plain.alone.text.split() if plain.alone is not None else []
        word = words[0] if words else "a"
        body = _without_log_probabilities(plain)
        body.update(changes[number].options_for(word))
        return replace(plain, body=body, alone=None, may_end="stop" in body)

    def _choice(self, number: int) -> Job:
        choices = [f"{city} {number}" for city in _CITIES]
        self._choices[f"choice {number + 1}"] = choices
        change = {**self.capabilities.structured("choice", choices), "ignore_eos": False}
        job = self._completion(number, **change)
        body = _without_log_probabilities(job)
        return replace(job, body=body, tokens=_CHOICE_TOKENS, alone=None, may_end=True)

    def _chat(self, number: int, *, stream: bool = False, **change: Any) -> Job:
        messages = [{"role": "user", "content": self.shapes.prompts[_FIRST + number].text}]
        body = {"messages": messages, "max_tokens": self.tokens, "temperature": 0.0, **change}
        if stream:  # chunks need not list all tokens: harmony's markers are missing
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        elif self.capabilities.can("chat_token_ids"):
            body["return_token_ids"] = True
            body["return_tokens_as_token_ids"] = True
            if self.bound.fork > 0:
                body["logprobs"] = True
                body["top_logprobs"] = _TOP
        return self.shapes.other("/v1/chat/completions", body, self.tokens)

    def _response(self, number: int) -> Job:
        text = self.shapes.prompts[_FIRST + number].text
        body = {"input": text, "max_output_tokens": self.tokens, "temperature": 0.0}
        return self.shapes.other("/v1/responses", body, self.tokens)


def _without_log_probabilities(job: Job) -> dict[str, Any]:
    return {name: value for name, value in job.body.items() if name != "logprobs"}
