"""Many more requests at once than the server runs, of all kinds: each answer is its own. Every
request is asked alone first. In the crowd its answer must be the same, or within the bound where
tokens have log-probabilities. Where arithmetic may fork and they have none (streams of chats,
responses), only the whole answer to another request is detected. Between them are samples of one
token, for what is sampled wrongly only while others run: `Sampler.far` judges them."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sm121.answers import sanity
from sm121.api.client import Refused
from sm121.api.sample_comparison import Case
from sm121.api.sample_source import Samples
from sm121.api.sampled import Sampler
from sm121.api.tools import tools
from sm121.client.jobs import Job, JobOutcome, LoadResult
from sm121.client.load import LoadClient
from sm121.core import level_settings, verdict
from sm121.core.verdict import NotRun
from sm121.engines.capabilities import Capabilities, Name
from sm121.stress import checks
from sm121.stress.checks import Fault, UnderLoad
from sm121.stress.shapes import Shapes

#: So many samples of each kind are in a crowd.
_REQUESTS = 8


@dataclass(frozen=True)
class SampleJob(Job):
    """A request for samples of one token."""

    #: The case of `Sampler.far` that they are of.
    case: str = ""


@dataclass
class CrowdedSamples:
    """The samples for the crowds of one server."""

    sampler: Sampler
    shapes: Shapes
    #: Why there are none.
    lacking: str = ""

    def jobs(self) -> list[Job]:
        """The requests for a crowd, of all kinds in turn; none where the engine cannot do it."""
        made: list[Job] = []
        for number in range(_REQUESTS):
            for kind, (texts, options, _) in self._cases.items():
                body = {"prompt": texts, **self.sampler.body(options)}
                job = self.shapes.other("/v1/completions", body, 1)
                group = f"samples with {kind}"
                named = replace(job, name=f"{group} {number + 1}", kind=group)
                made.append(SampleJob(**vars(named), case=kind))
        return made

    def faults(self, outcomes: Sequence[JobOutcome]) -> list[Fault]:
        """What is wrong with those that were answered."""
        faults, samples = list[Fault](), dict[str, Samples]()
        for outcome in outcomes:
            answers = (outcome.answer, *outcome.others)
            drawn = [self.sampler.sample(each.positions or ()) if each else () for each in answers]
            assert isinstance(outcome.job, SampleJob)
            if all(len(positions) == 1 for positions in drawn):
                samples.setdefault(outcome.job.case, []).extend(drawn)
            else:
                required = "required a token and its log-probability in each answer"
                where = f"request {outcome.number} ({outcome.job.name})"
                faults.append(Fault("bad_stream", f"{where}: {required}"))
        facts = [fact for kind, drawn in samples.items() for fact in self._cases[kind][2](drawn)]
        return faults + [Fault("corrupted_answer", f"{fact}") for fact in facts]

    @functools.cached_property
    def _cases(self) -> dict[str, Case]:
        try:
            return self.sampler.far()
        except (NotRun, Refused) as reason:
            self.lacking = f"{reason}"
            return {}


#: Requests at once for each place of the server; at least so many, and never more than a client
#: has connections for (1,024 open files are the default).
TIMES = {2: 40, 10: 64}
_AT_MOST = 512
#: Requests of each kind that differ, and the first of their prompts: others of the set are so sure
#: to go on that hot samples are like greedy ones.
_PROMPTS, _FIRST = 3, 4
#: Tokens of a long prompt, and so many more of the next; and begins the name of those that share
#: their beginning.
_LONG, _LONGER, _SHARED = 400, 80, "one beginning"
Change = Callable[[str], dict[str, Any]]
#: Sampling that leaves the likeliest token alone, each in another way (the first is of OpenAI's own
#: API), and so hot that another token comes where that is ignored.
_HOT = 2.0
_SAMPLED: dict[Name | None, dict[str, Any]] = {
    None: {"temperature": _HOT, "top_p": 1e-6},
    "top_k": {"temperature": _HOT, "top_k": 1},
    "min_p": {"temperature": _HOT, "min_p": 1.0},
}
_BIAS: dict[str, Any] = {"logit_bias": {str(token): 50 for token in range(1000, 1020)}}
_OFTEN = _BIAS | {"frequency_penalty": 2.0}
_STOP: tuple[Name, Change] = ("stop", lambda word: {"stop": [word]})
#: What makes another answer of a greedy one, by the word that it begins with. Where a penalty is
#: ignored, the answer is that of the row before.
_CHANGED: list[tuple[Name, Change]] = [
    ("logit_bias", lambda _word: _BIAS),
    ("penalties", lambda _word: _OFTEN),
    ("penalties", lambda _word: _OFTEN | {"presence_penalty": 2.0}),
    ("repetition_penalty", lambda _word: {"repetition_penalty": 100.0}),
    ("allowed_token_ids", lambda _word: {"allowed_token_ids": [*range(1000, 1020)]}),
    ("bad_words", lambda word: {"bad_words": [word]}),
    *[_STOP] * _PROMPTS,
]
_CITIES, _CHOICE_TOKENS = ("Lima", "Rome", "Tokyo"), 16


def size(times: int, places: int) -> int:
    """Requests of a crowd of so many times the places that the server has."""
    return min(max(TIMES[times], times * places), _AT_MOST)


@dataclass
class Crowd:
    """Makes the requests of a crowd, and compares their answers with those given alone. `client`:
    asks alone; `tokens`: of an answer."""

    shapes: Shapes
    client: LoadClient
    capabilities: Capabilities
    bound: level_settings.AgreementBound
    tokens: int
    samples: CrowdedSamples
    #: Kinds that the server does not serve, with its refusal.
    refused: dict[str, str] = field(default_factory=dict)
    #: Texts of which a structured answer is one, by the job's name.
    _choices: dict[str, Sequence[str]] = field(default_factory=dict)
    #: Kinds whose answer alone is not compared: it is of a changed request.
    _changed_kinds: set[str] = field(default_factory=set)

    def jobs(self, count: int, *, often: bool = False) -> list[Job]:
        """So many requests, of all kinds in turn, and samples between them; of neighbours each has
        another prompt. `often`: without what is judged by chance, or by another's text alone.
        Raises UnderLoad: one of them alone is not answered; NotRun: the server refuses all
        kinds."""
        turns = [job for job in self._turns if not (often and job.kind in self._changed_kinds)]
        jobs = [*itertools.islice(itertools.cycle(turns), count)]
        for number, job in enumerate([] if often else self.samples.jobs()):
            jobs.insert(count // 3 + 2 * number, job)
        if self.samples.lacking:
            self.refused["samples"] = self.samples.lacking
        return [job if job.kind == _SHARED else self.shapes.salted(job) for job in jobs]

    def faults(self, load: LoadResult) -> list[Fault]:
        """Answers that are wrong, or another's."""
        samples, others = list[JobOutcome](), list[JobOutcome]()
        for outcome in load.outcomes:
            is_sample = outcome.answer is not None and isinstance(outcome.job, SampleJob)
            (samples if is_sample else others).append(outcome)
        jobs = {outcome.job.name: outcome.job for outcome in others}
        faults = (self._fault(outcome, jobs.values()) for outcome in others)
        return [fault for fault in faults if fault is not None] + self.samples.faults(samples)

    def _fault(self, outcome: JobOutcome, jobs: Iterable[Job]) -> Fault | None:
        job, answer = outcome.job, outcome.answer
        where = f"request {outcome.number} ({job.name})"
        # Without log-probabilities nobody can tell whether another answer is within the bound.
        forks = self.bound.fork > 0 and answer is not None and answer.positions is None
        judged = replace(outcome, job=replace(job, alone=None)) if forks else outcome
        fault = checks.fault(judged, self.bound)
        if answer is None or not (fault or forks or job.name in self._choices):
            return fault
        for text in (each.text for each in (answer, *outcome.others)):
            if self._is_answer_to(text, job):
                continue
            for other in jobs:
                if other.path == job.path and self._is_answer_to(text, other):
                    observed = f"seen that to {other.name}: {text!r}"
                    return Fault("anothers_answer", f"{where}: required its own answer, {observed}")
            if job.name in self._choices:
                required = f"required one of {self._choices[job.name]}"
                return Fault("corrupted_answer", f"{where}: {required}, seen {text!r}")
            alone = job.alone.text if job.alone is not None else ""
            signs = sanity.signs(text) if text else ["no text"]
            if alone and signs and not sanity.signs(alone):
                required = f"required an answer like {alone!r}"
                return Fault("corrupted_answer", f"{where}: {required}, seen {text!r} ({signs[0]})")
        return fault

    def _is_answer_to(self, text: str, job: Job) -> bool:
        alone = [job.alone.text] if job.alone is not None else []
        return text in self._choices.get(job.name, alone)

    @functools.cached_property
    def _turns(self) -> list[Job]:
        groups = [self._with_alone(kind, make) for kind, make in self._kinds().items()]
        served = enumerate(filter(None, groups))
        shifted = [group[n % _PROMPTS :] + group[: n % _PROMPTS] for n, group in served]
        if not shifted:
            raise verdict.NotRun(f"the server refuses every kind of request: {self.refused}")
        return [job for turn in zip(*shifted, strict=True) for job in turn]

    def _with_alone(self, kind: str, make: Callable[[int], Job]) -> list[Job]:
        """The requests of a kind with their answers alone; none where the server refuses them."""
        jobs = [replace(make(n), name=f"{kind} {n + 1}", kind=kind) for n in range(_PROMPTS)]
        outcomes = self.client.run(jobs, concurrency=1).outcomes
        problem = next((o.problem for o in outcomes if o.problem is not None), None)
        if problem is not None and problem[0] == "refused":
            self.refused[kind] = problem[1]
            return []
        if problem is not None:
            raise UnderLoad(f"{kind}, asked alone", [Fault(*problem)], len(jobs))
        if jobs[0].name in self._choices:
            return jobs
        return [replace(o.job, alone=o.job.alone or o.answer) for o in outcomes]

    def _kinds(self) -> dict[str, Callable[[int], Job]]:
        can = self.capabilities.can
        kinds: dict[str, Callable[[int], Job]] = {
            "completion": self._completion,
            "streamed completion": lambda n: self._completion(n, stream=True),
            "sampled completion": lambda n: self._completion(n, stream=True, **self._sampling(n)),
        }
        if can("several_choices"):
            kinds["two completions"] = lambda n: self._completion(n, n=2, **self._sampling(n))
        if can("token_prompts") and can("token_ids"):
            kinds["long prompt"] = lambda n: self.shapes.of_length(
                _LONG + n * _LONGER, self.tokens, turn=n
            )
            kinds[_SHARED] = self._shared
        biased = {"logit_bias", "penalties"} if not can("logit_bias") else set()
        changed = [options for name, options in _CHANGED if can(name) and name not in biased]
        for number, first in enumerate(range(0, len(changed) - _PROMPTS + 1, _PROMPTS)):
            change = functools.partial(self._changed, number, changed[first : first + _PROMPTS])
            kind = f"changed completion {number + 1}"
            kinds[kind] = change
            self._changed_kinds.add(kind)
        if can("choice"):
            kinds["choice"] = self._choice
        if can("chat"):
            kinds["chat"] = self._chat
            effort = {"reasoning_effort": "high"} if can("reasoning_effort") else {}
            kinds["streamed chat"] = lambda n: self._chat(n, stream=True, **effort)
        if can("tools"):
            kinds["chat with a tool"] = lambda n: self._chat(n, tools=tools(1))
        if can("responses"):
            kinds["response"] = self._response
        return kinds

    def _completion(self, number: int, *, stream: bool = False, **change: Any) -> Job:
        text = self.shapes.prompts[_FIRST + number].text
        return self.shapes.job(text, self.tokens, name="", stream=stream, change=change)

    def _shared(self, number: int) -> Job:
        """From one part of the cache, as users of one system message have it."""
        job = self.shapes.of_length(_LONG + number, self.tokens)
        return replace(job, body=job.body | self._part)

    @functools.cached_property
    def _part(self) -> dict[str, Any]:
        return self.shapes.salted(Job("", {}, 0)).body

    def _sampling(self, number: int) -> dict[str, Any]:
        can = self.capabilities.can
        able = [options for name, options in _SAMPLED.items() if name is None or can(name)]
        return able[number % len(able)]

    def _changed(self, prompt: int, changes: list[Change], number: int) -> Job:
        """Without log-probabilities, which say nothing of what was changed."""
        plain = self._completion(prompt)
        word = plain.alone.text.split()[0] if plain.alone and plain.alone.text.split() else "a"
        body = {name: value for name, value in plain.body.items() if name != "logprobs"}
        body |= changes[number](word)
        return replace(plain, body=body, alone=None, may_end="stop" in body)

    def _choice(self, number: int) -> Job:
        choices = [f"{city} {number}" for city in _CITIES]
        self._choices[f"choice {number + 1}"] = choices
        change = {**self.capabilities.structured("choice", choices), "ignore_eos": False}
        job = self._completion(number, **change)
        body = {name: value for name, value in job.body.items() if name != "logprobs"}
        return replace(job, body=body, tokens=_CHOICE_TOKENS, alone=None, may_end=True)

    def _chat(self, number: int, *, stream: bool = False, **change: Any) -> Job:
        messages = [{"role": "user", "content": self.shapes.prompts[_FIRST + number].text}]
        body = {"messages": messages, "max_tokens": self.tokens, "temperature": 0.0, **change}
        if stream:  # the parts of a stream need not have their tokens: harmony's markers are none
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        elif self.capabilities.can("chat_token_ids"):
            top = {"logprobs": True, "top_logprobs": 5} if self.bound.fork > 0 else {}
            body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, **top}
        return self.shapes.other("/v1/chat/completions", body, self.tokens)

    def _response(self, number: int) -> Job:
        text = self.shapes.prompts[_FIRST + number].text
        body = {"input": text, "max_output_tokens": self.tokens}
        return self.shapes.other("/v1/responses", {**body, "temperature": 0.0}, self.tokens)
