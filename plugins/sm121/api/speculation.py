"""What speculative decoding must keep: the target's tokens, log-probabilities and distribution, the
end of an answer wherever it falls, and honest counts of what was drafted and accepted. A drafter
may make an engine faster and nothing else (Leviathan et al. 2023; Chen et al. 2023). Each check
holds the server against itself: what it generated against its own prefill of the same text, which
nobody drafts, and samples against the probabilities that it reports."""

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sm121.answers import promised
from sm121.answers.prompts import PromptSet
from sm121.client.completions import Asker, Completion, Position, Prompt, Refused, Request, parse
from sm121.core.level_settings import AgreementBound
from sm121.core.server import Server
from sm121.core.unmet import Fact, Unmet, require
from sm121.core.verdict import NotRun
from sm121.engines.capabilities import Capabilities
from sm121.measure import counters

#: What two evaluations of one log-softmax in float32 may differ by.
_ROUNDING = 1e-3
#: The chance that a right server is called wrong by the samples of one run.
ERROR_RATE = 1e-6
#: Texts that can go on in many ways one or two tokens after the first, which nobody drafts: at the
#: first and at the second place of a draft. And how many of the likeliest tokens are counted.
_OPEN = ("The capital", "The capital of France is Paris. The", "1 + 1 = 2. The capital")
SLICE = 4
_SAMPLED_TOKENS, _CHOICES = 4, 128
#: How they are sampled, and how many times so many choices of each text.
_KINDS = (("temperature", 1.0, 4), ("temperature", 0.6, 1), ("top_p", 0.6, 1))
_SAMPLES = "samples by the reported probabilities"
_ALL = "at all places"
#: Tokens after which samples of one text are still many enough to be counted together.
_SHARED = 2
#: A text of one kind, however long it gets: its tokens are as easy to draft at the end.
_EVEN = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"
_SHORT, _LONG = 64, 256
#: Such texts at once: from three on a drafter may be given something else.
_AT_ONCE = 8
#: Tokens of each greedy answer that are held against a prefill.
_JUDGED_TOKENS = 200
#: Tokens that a form follows at most, and how it goes on then.
_FORMED, _ELSEWHERE = 8, " Paris."
#: Drafts below which a share says nothing.
_FEW = 16
#: Methods that have no draft where the text so far has no match.
_LOOKUPS = ("ngram", "suffix", "lookup")


@dataclass
class Speculation:
    """One server that speculates. What it is asked greedily is asked once. `prompts`: texts that go
    on by themselves; `bound`: what two of its answers may differ by; `method`: as the engine calls
    it, None where nothing shows it."""

    server: Server
    asker: Asker
    prompts: PromptSet
    bound: AgreementBound
    method: str | None
    capabilities: Capabilities

    @property
    def _looks_up(self) -> bool:
        return any(word in (self.method or "") for word in _LOOKUPS)

    def tokens_are_the_targets(self) -> str:
        """Each greedy token is the likeliest after the text before it, as the server's own prefill
        of that text says; returns what was seen. Raises AssertionError: one is not."""
        fork = max(self.bound.fork, _ROUNDING)
        for name, entries in self._judged.items():
            for number, (token, _, top) in enumerate(entries):
                below = max(top.values(), default=math.inf) - top.get(token, -math.inf)
                require(
                    below <= fork,
                    "the likeliest token of the target, or one below it by at most",
                    "by a prefill of the same text",
                    f"{name!r}: token {number} ({token})",
                    value=below,
                    limit=fork,
                    unit="nats",
                )
        return f"{sum(map(len, self._judged.values()))} tokens are those of the target"

    def log_probabilities_are_the_targets(self) -> str:
        """What is reported of a generated token is what a prefill of the text reports of it. Raises
        AssertionError: it is not."""
        worst = 0.0
        for name, entries in self._judged.items():
            for number, (token, position, top) in enumerate(entries):
                reported, prefilled = position.log_probability, top.get(token, -math.inf)
                difference = abs(reported - prefilled)
                worst = max(worst, difference)
                require(
                    difference <= self.bound.max_abs,
                    "a log-probability that differs from that of a prefill by at most",
                    "",
                    f"{name!r}: token {number} ({token})",
                    value=difference,
                    limit=self.bound.max_abs,
                    unit="nats",
                    evidence=f"{reported:.4g} for {prefilled:.4g}",
                )
        return f"log-probabilities differ from the prefill's by {worst:.2g} at most"

    def samples_follow_the_target(self) -> str:
        """Wherever drafts were offered, each token is a draw from the probabilities reported there,
        also at a temperature and with a cut. Over all places of a rank, and all after one text, the
        hits are compared with the sum of the probabilities. Freedman's inequality bounds how far a
        right server may be off, at `ERROR_RATE` for all comparisons of a run together. Raises
        AssertionError: some token comes too often or too seldom, or is cut off."""
        self.capabilities.require("logprobs")
        listed = 20 if self.capabilities.can("top_logprobs_20") else SLICE
        tally: defaultdict[tuple[str, str], promised.Tally] = defaultdict(promised.Tally)
        for (kind, value, batches), text in itertools.product(_KINDS, _OPEN):
            everywhere = f"{_ALL} with {kind} {value:g}"
            for sample in self._samples(text, batches, {"logprobs": listed, kind: value}):
                prefix = f"{text} {sample[0].token}"  # the prefill's token, which nobody drafts
                for number, position in enumerate(sample[1:], 1):
                    shares = _shares(position, listed, kind, value)
                    # Of equally likely ones by name: an engine lists the drawn one first.
                    best = sorted(shares.items(), key=lambda item: (-item[1], item[0]))[:SLICE]
                    for rank, (token, share) in enumerate(best):
                        tally[everywhere, f"rank {rank + 1}"].add(token == position.token, share)
                        if number <= _SHARED and value == 1:
                            tally[f"after {prefix!r}", token].add(token == position.token, share)
                    prefix += f" {position.token}"
        for (where, label), count in tally.items():
            # Half of the error rate is for what is counted over all places.
            alike = SLICE * len(_KINDS) if where.startswith(_ALL) else len(tally)
            allowed = promised.allowed(count.variance, ERROR_RATE / 2 / alike)
            off, rate = abs(count.hits - count.expected), f"chance of a false alarm {ERROR_RATE:g}"
            require(
                off <= allowed,
                f"{_SAMPLES}, off by at most",
                "",
                f"{where}, {label}",
                value=off,
                limit=allowed,
                evidence=f"{count}; {rate}",
            )
        return f"sampled tokens follow the target in {len(tally)} comparisons"

    def ends_anywhere(self) -> None:
        """An answer ends where it is told to, also between two tokens that were accepted together:
        by max_tokens, a stop token or a stop string. Raises AssertionError: it ends elsewhere."""
        prompt = self.prompts.prompts[0]
        whole = self.asker.ask(Request(prompt.text, prompt.tokens))
        ids = self.asker.ids(whole)[:10]
        for count in range(1, len(ids)):
            cut = self._post(prompt.text, max_tokens=count)
            require(cut.ids == ids[:count], f"the first {count} tokens {ids[:count]}", cut.ids,
                    f"max_tokens {count}")  # fmt: skip
            require(cut.completion_tokens == count, f"usage of {count}", cut.completion_tokens)
        for index, token in enumerate(ids):
            if token in ids[:index]:
                continue
            stopped = self._post(prompt.text, max_tokens=len(ids), stop_token_ids=[token])
            expected = ids[: index + 1]
            require((stopped.ids, stopped.finish_reason) == (expected, "stop"),
                    f"an end with the stop token {token}: {expected}, stop",
                    f"{stopped.ids}, {stopped.finish_reason}")  # fmt: skip
            require(stopped.completion_tokens == len(expected), f"usage of {len(expected)}",
                    stopped.completion_tokens)  # fmt: skip
        text = whole.text
        for begin in range(1, 9):
            stop = text[begin : begin + 3]
            wanted_text = text[: text.index(stop)]
            stopped = self._post(prompt.text, max_tokens=whole.completion_tokens or 40, stop=[stop])
            require(stopped.text == wanted_text, f"the text before {stop!r}: {wanted_text!r}",
                    repr(stopped.text))  # fmt: skip

    def forms_are_kept(self) -> None:
        """A text that must leave, at any of its tokens, what the target would say by itself: drafts
        are accepted until there, and not beyond. Raises AssertionError: another text comes; NotRun:
        the engine knows no regex."""
        prompt = self.prompts.prompts[0]
        whole = self.asker.ask(Request(prompt.text, _FORMED, top=0)).text
        for cut in range(1, min(len(whole), 3 * _FORMED)):
            form = whole[:cut] + _ELSEWHERE
            options = self.capabilities.structured("regex", re.escape(form))
            answer = self._post(prompt.text, max_tokens=8 * _FORMED, ignore_eos=False, **options)
            require(answer.text == form, f"the text of the form {form!r}", repr(answer.text))

    def counts_add_up(self) -> counters.Drafted:
        """What the server says that it drafted and accepted makes the tokens that came. Raises
        AssertionError: it does not; NotRun: it has no such counters."""
        drafted, generated, requests = self._texts
        by_position = drafted.by_position
        k = len(by_position) or math.ceil(drafted.tokens / drafted.drafts)
        if by_position:
            whole = sum(by_position) == drafted.accepted
            require(whole, "accepted tokens by position that make all", "others", evidence=drafted)
            falling = all(a >= b for a, b in itertools.pairwise((drafted.drafts, *by_position)))
            require(falling, "no position accepted more often than the one before it or than there "
                    "were drafts", "one", evidence=drafted)  # fmt: skip
        require(drafted.accepted <= drafted.tokens <= k * drafted.drafts,
                f"at most {k} tokens a draft, and no more accepted than drafted", "more",
                evidence=drafted)  # fmt: skip
        # A step gives one token and what it accepted; the first token of an answer is the
        # prefill's, and what a last step accepts beyond the limit is cut off.
        steps_make = drafted.accepted + drafted.drafts
        expected = generated - requests
        spare = (k + 1) * requests
        few = steps_make < expected and not self._looks_up
        require(not few and steps_make <= expected + spare, "accepted tokens and drafts that make "
                f"the tokens after the first of {requests} answers, and at most {spare} more",
                "fewer" if few else "more",
                evidence=f"{steps_make:.0f} for {expected}; {drafted}")  # fmt: skip
        return drafted

    @property
    def drafted(self) -> counters.Drafted:
        """What was drafted for the fixed texts. Raises NotRun: nothing, or nothing counts it."""
        return self._texts[0]

    def drafts_are_accepted(self) -> None:
        """Some of what is drafted is accepted, and no less in a long answer or in several at once
        than in a short one. Raises AssertionError: nothing is, or acceptance is lost; NotRun: the
        server has no such counters."""
        early, _, _ = self._drafted([Request(_EVEN, _SHORT, top=0, salt="early")])
        whole, _, _ = self._drafted([Request(_EVEN, _LONG, top=0, salt="whole")])
        each = [Request(_EVEN, _SHORT, top=0, salt=f"at once {n}") for n in range(_AT_ONCE)]
        many, natural = self._drafted(each, at_once=True)[0], self.drafted
        drafts = early.drafts + whole.drafts + natural.drafts
        accepted = early.accepted + whole.accepted + natural.accepted
        require(accepted > 0, "an accepted token", "none; the drafter's hidden states, its weights "
                "or its vocabulary are not those of this model",
                evidence=f"{drafts:.0f} drafts")  # fmt: skip
        places = {f"the last {_LONG - _SHORT} tokens of a count": whole.since(early)}
        places[f"{_AT_ONCE} counts at once"] = many
        for place, later in places.items():
            if min(early.tokens, later.tokens) < _FEW:
                continue
            before, after = early.accepted / early.tokens, later.accepted / later.tokens
            noise = 5 * math.sqrt(0.25 / early.tokens + 0.25 / later.tokens)
            least = min(before / 2, before - noise)
            words = f"of the drafts, accepted in {place} at least, by its first {_SHORT} alone"
            require(after >= least, words, "acceptance is lost", value=100 * after,
                    limit=100 * least, unit="%")  # fmt: skip

    @functools.cached_property
    def _judged(self) -> dict[str, list[tuple[int, Position, Mapping[int, float]]]]:
        """Each prompt's greedy answer, token by token, beside what the prefill of the same text
        says of it and of the likeliest. The answers go on for long: of 200 tokens a single one may
        be wrong."""
        self.capabilities.require("prompt_logprobs")
        judged = {}
        requests = [Request(prompt.text, _JUDGED_TOKENS) for prompt in self.prompts.prompts]
        answers = self.asker.ask_together(requests)
        for prompt, answer in zip(self.prompts.prompts, answers, strict=True):
            ids, before = self.asker.ids(answer), answer.prompt_ids
            before = self.asker.need(before, "the prompt's token ids")
            prefill = Request((*before, *ids), 1, 0, prompt_log_probabilities=True, prompt_top=1)
            tops = self.asker.need(self.asker.ask(prefill).prompt_tops, "prompt_logprobs")
            columns = ids, self.asker.positions(answer), tops[len(before) - 1 :]
            judged[prompt.name] = [*zip(*columns, strict=True)]
        return judged

    def _samples(
        self, text: str, batches: int, options: dict[str, float]
    ) -> Iterable[tuple[Position, ...]]:
        body = self._body(text, max_tokens=_SAMPLED_TOKENS, temperature=1.0, n=_CHOICES) | options
        for _ in range(batches):
            choices = self._send(body)["choices"]
            require(len(choices) == _CHOICES, f"{_CHOICES} choices", len(choices))
            yield from (self.asker.positions(parse({"choices": [choice]})) for choice in choices)

    @functools.cached_property
    def _texts(self) -> tuple[counters.Drafted, int, int]:
        requests = [Request(prompt.text, prompt.tokens, top=0) for prompt in self.prompts.prompts]
        return self._drafted(requests)

    def _drafted(
        self, requests: Sequence[Request], *, at_once: bool = False
    ) -> tuple[counters.Drafted, int, int]:
        """What was drafted while some requests were answered, one after the other or at once, their
        generated tokens and their number."""
        if (before := counters.drafted(self.server.endpoint)) is None:
            raise NotRun("the server's /metrics count no drafts, and nothing else shows them")
        ask = self.asker.ask_together if at_once else lambda each: map(self.asker.ask, each)
        generated = sum(len(self.asker.ids(answer)) for answer in ask(requests))
        if (after := counters.drafted(self.server.endpoint)) is None:
            raise Unmet(Fact("/metrics with the counters of drafts"))
        drafted = after.since(before)
        if not drafted.drafts:
            fact = Fact("drafts", "none for these prompts", f"{self.method}")
            raise NotRun(fact) if self._looks_up or self.method is None else Unmet(fact)
        return drafted, generated, len(requests)

    def _post(self, prompt: str, **options: Any) -> Completion:
        return parse(self._send(self._body(prompt, **options)))

    def _body(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        return Request(prompt, 1, top=0).body(self.server.endpoint.served_name) | options

    def _send(self, body: Mapping[str, Any]) -> dict[str, Any]:
        with self.server.endpoint.http(timeout_s=240.0) as http:
            answer = http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise Refused(answer.status_code, answer.text)
        return dict(answer.json())


def _shares(position: Position, listed: int, kind: str, value: float) -> dict[str, float]:
    """How probable the tokens are that remain, if one of them was drawn. Raises AssertionError: one
    was that is cut off."""
    top, drawn = position.top, position.token
    only_drawn = len(top) > listed  # it is listed because it was drawn
    if value == 1:
        return {t: math.exp(log) for t, log in top.items() if not only_drawn or t != drawn}
    cut, temperature = (value, 1.0) if kind == "top_p" else (1.0, value)
    remaining, dropped = promised.remaining(top, "top_p", cut)
    require(drawn not in dropped, f"{_SAMPLES}, none cut off", drawn, f"{kind} {value:g}")
    if drawn not in remaining or only_drawn:
        return {}
    return promised.shares({token: top[token] for token in remaining}, temperature)
