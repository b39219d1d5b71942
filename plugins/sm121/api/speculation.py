"""Check speculative decoding.

Speculative decoding must change only the speed (Leviathan et al. 2023; Chen et al. 2023). The
tokens, log-probabilities and distribution must equal those of the target model. An answer must end
where it would end without drafts. The counters of drafted and accepted tokens must be correct.

Each check compares the server with itself. Generated tokens are compared with the server's own
prefill of the same text, which does not use drafts. Samples are compared with the probabilities
that the server reports.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sm121.answers.prompts import PromptSet
from sm121.api.drafted_samples import KINDS, OPEN_TEXTS, SLICE, Tallies
from sm121.client.completion_json import Completion, Position, Prompt, parse
from sm121.client.completions import Asker, Refused, Request
from sm121.core.level_settings import AgreementBound
from sm121.core.server import Server
from sm121.core.unmet import Fact, Unmet, require
from sm121.core.verdict import NotRun
from sm121.engines.attached_pages import json_of
from sm121.engines.capabilities import Capabilities
from sm121.measure import counters

#: Two evaluations of one log-softmax in float32 differ by less than this, in nats.
_ROUNDING = 1e-3
#: Number of tokens per sample, and of samples per request.
_SAMPLED_TOKENS = 4
_CHOICES = 128
#: A text whose continuation is equally easy to draft at each position.
_EVEN = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"
#: Numbers of tokens of a short and of a long continuation of `_EVEN`.
_SHORT = 64
_LONG = 256
#: The number of concurrent continuations of `_EVEN`. With three or more, a drafter may get wrong
#: inputs.
_AT_ONCE = 8
#: Number of tokens of each greedy answer that are compared with a prefill.
_JUDGED_TOKENS = 200
#: The number of tokens of the greedy answer that a regex repeats, and the text that the regex then
#: requires.
_FORMED = 8
_ELSEWHERE = " Paris."
#: The number of positions in an answer at which the check tests an end.
_ENDS = 10
#: Length of a stop string, and the positions in the text at which it begins.
_STOP_LENGTH = 3
_STOP_STARTS = range(1, 9)
#: Acceptance rates are compared only if there are at least this many drafted tokens.
_FEW = 16
#: An acceptance rate may fall by this many standard deviations.
_DEVIATIONS = 5
#: Parts of the names of methods that draft only if they find a match in the text.
_LOOKUPS = ("ngram", "suffix", "lookup")
#: The timeout of a request in seconds.
_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class _JudgedToken:
    """A generated token, and the likeliest tokens at its position in a prefill of the text."""

    id: int
    generated: Position
    prefilled: Mapping[int, float]


@dataclass(frozen=True)
class _Drafts:
    """The change of the counters of drafts over some requests."""

    counted: counters.Drafted
    #: The number of generated tokens.
    tokens: int
    requests: int


@dataclass
class Speculation:
    """Checks of one server with speculative decoding.

    The greedy answers are requested once, and all checks use them.
    """

    server: Server
    asker: Asker
    #: The prompts, each with the number of tokens to generate.
    prompts: PromptSet
    #: The tolerance between two of the server's answers.
    bound: AgreementBound
    #: The engine's name of the speculation method; None if it is unknown.
    method: str | None
    capabilities: Capabilities

    @property
    def _looks_up(self) -> bool:
        return any(word in (self.method or "") for word in _LOOKUPS)

    def tokens_are_the_targets(self) -> str:
        """Require that each greedy token is the likeliest one in a prefill of the text before it.

        Returns:
            The number of compared tokens, as text.

        Raises:
            Unmet: A token is less likely than another by more than the tolerance.
            NotRun: The engine sends no log-probabilities of a prompt.
        """
        limit = max(self.bound.fork, _ROUNDING)
        count = 0
        for name, tokens in self._judged.items():
            for number, token in enumerate(tokens):
                highest = max(token.prefilled.values(), default=math.inf)
                below = highest - token.prefilled.get(token.id, -math.inf)
                require(
                    below <= limit,
                    "the likeliest token of the target, or one below it by at most",
                    "by a prefill of the same text",
                    f"{name!r}: token {number} ({token.id})",
                    value=below,
                    limit=limit,
                    unit="nats",
                )
                count += 1
        return f"{count} tokens are those of the target"

    def log_probabilities_are_the_targets(self) -> str:
        """Require that each greedy token's log-probability equals that in a prefill of the text.

        Returns:
            The largest difference, as text.

        Raises:
            Unmet: A log-probability differs by more than the tolerance.
            NotRun: The engine sends no log-probabilities of a prompt.
        """
        largest = 0.0
        for name, tokens in self._judged.items():
            for number, token in enumerate(tokens):
                reported = token.generated.log_probability
                prefilled = token.prefilled.get(token.id, -math.inf)
                difference = abs(reported - prefilled)
                largest = max(largest, difference)
                require(
                    difference <= self.bound.max_abs,
                    "a log-probability that differs from that of a prefill by at most",
                    "",
                    f"{name!r}: token {number} ({token.id})",
                    value=difference,
                    limit=self.bound.max_abs,
                    unit="nats",
                    evidence=f"{reported:.4g} for {prefilled:.4g}",
                )
        return f"log-probabilities differ from the prefill's by {largest:.2g} at most"

    def samples_follow_the_target(self) -> str:
        """Require that samples follow the reported probabilities where tokens may be drafted.

        For each of the likeliest tokens, the number of draws is compared with the sum of the
        token's probabilities, over all positions and per prefix. This is repeated with another
        temperature and with top_p. Freedman's inequality bounds the difference for a correct
        server. All comparisons of a run share one probability of a false alarm.

        Returns:
            A text with the number of comparisons.

        Raises:
            Unmet: A token was drawn too often or too seldom, or was excluded by top_p.
            NotRun: The engine sends no log-probabilities.
        """
        self.capabilities.require("logprobs")
        listed = 20 if self.capabilities.can("top_logprobs_20") else SLICE
        tallies = Tallies(listed)
        for kind, text in itertools.product(KINDS, OPEN_TEXTS):
            options = {"logprobs": listed, kind.name: kind.value}
            for sample in self._samples(text, kind.batches, options):
                tallies.add(text, kind, sample)
        return tallies.judge()

    def ends_anywhere(self) -> None:
        """Require that answers end exactly at max_tokens, a stop token or a stop string.

        Such an end may be between two tokens that were accepted together.

        Raises:
            Unmet: An answer ends elsewhere, or its usage differs.
            NotRun: The engine sends no token ids without log-probabilities.
        """
        prompt = self.prompts.prompts[0]
        whole = self.asker.ask(Request(prompt.text, prompt.tokens))
        ids = self.asker.ids(whole)[:_ENDS]
        self._require_ends_by_length(prompt.text, ids)
        self._require_ends_by_stop_token(prompt.text, ids)
        limit = whole.completion_tokens or 40
        for begin in _STOP_STARTS:
            stop = whole.text[begin : begin + _STOP_LENGTH]
            expected = whole.text[: whole.text.index(stop)]
            answer = self._post(prompt.text, max_tokens=limit, stop=[stop])
            required = f"the text before {stop!r}: {expected!r}"
            require(answer.text == expected, required, repr(answer.text))

    def _require_ends_by_length(self, text: str, ids: Sequence[int]) -> None:
        for count in range(1, len(ids)):
            answer = self._post(text, max_tokens=count)
            required = f"the first {count} tokens {ids[:count]}"
            generated = self.asker.ids(answer)
            require(generated == ids[:count], required, generated, f"max_tokens {count}")
            counted = answer.completion_tokens
            require(counted == count, f"usage of {count}", counted)

    def _require_ends_by_stop_token(self, text: str, ids: Sequence[int]) -> None:
        for index, token in enumerate(ids):
            if token in ids[:index]:
                continue
            answer = self._post(text, max_tokens=len(ids), stop_token_ids=[token])
            expected = ids[: index + 1]
            right = answer.ids == expected and answer.finish_reason == "stop"
            required = f"an end with the stop token {token}: ids {expected}, finish_reason stop"
            require(right, required, f"{answer.ids}, {answer.finish_reason}")
            counted = answer.completion_tokens
            require(counted == len(expected), f"usage of {len(expected)}", counted)

    def forms_are_kept(self) -> None:
        """Require texts that match a regex, even if drafts follow the greedy answer instead.

        The regex differs from the greedy answer from some character on. Each character of the
        answer's beginning is tried. Drafts of the greedy answer must be accepted up to that
        character, and not beyond.

        Raises:
            Unmet: The text does not match the regex.
            NotRun: The engine does not support regexes.
        """
        prompt = self.prompts.prompts[0]
        whole = self.asker.ask(Request(prompt.text, _FORMED, top=0)).text
        for cut in range(1, min(len(whole), 3 * _FORMED)):
            form = whole[:cut] + _ELSEWHERE
            options = self.capabilities.structured("regex", re.escape(form))
            answer = self._post(prompt.text, max_tokens=8 * _FORMED, ignore_eos=False, **options)
            require(answer.text == form, f"the text of the form {form!r}", repr(answer.text))

    def counts_add_up(self) -> counters.Drafted:
        """Require that the counters of drafted and accepted tokens match the generated tokens.

        Returns:
            The counters for the prompts.

        Raises:
            Unmet: The counters contradict each other or the generated tokens.
            NotRun: The server has no such counters.
        """
        drafted = self._texts.counted
        by_position = drafted.by_position
        length = len(by_position) or math.ceil(drafted.tokens / drafted.drafts)
        if by_position:
            whole = sum(by_position) == drafted.accepted
            required = "accepted tokens by position that sum to all accepted tokens"
            require(whole, required, "others", evidence=drafted)
            required = (
                "no position accepted more often than the one before it or than there were drafts"
            )
            falling = all(a >= b for a, b in itertools.pairwise((drafted.drafts, *by_position)))
            require(falling, required, "one", evidence=drafted)
        required = f"at most {length} tokens a draft, and no more accepted than drafted"
        right = drafted.accepted <= drafted.tokens <= length * drafted.drafts
        require(right, required, "more", evidence=drafted)
        self._require_counted_tokens(self._texts, length)
        return drafted

    def _require_counted_tokens(self, drafts: _Drafts, length: int) -> None:
        """Require a number of generated tokens that fits steps with at most `length` draft tokens.

        A step generates one token and the accepted draft tokens. The first token of an answer comes
        from the prefill. Tokens that the last step accepts beyond the limit are discarded. With a
        method that looks drafts up in the text, there are also steps without a draft, which are not
        counted.
        """
        drafted = drafts.counted
        made = drafted.accepted + drafted.drafts
        expected = drafts.tokens - drafts.requests
        spare = (length + 1) * drafts.requests
        required = (
            "accepted tokens and drafts that add up to the tokens after the first token of "
            f"{drafts.requests} answers, and at most {spare} more"
        )
        evidence = f"{made:.0f} for {expected}; {drafted}"
        if not self._looks_up:
            require(made >= expected, required, "fewer", evidence=evidence)
        require(made <= expected + spare, required, "more", evidence=evidence)

    @property
    def drafted(self) -> counters.Drafted:
        """How much the counters of drafts changed while the prompts were answered.

        Raises:
            NotRun: The server has no such counters, or did not draft any tokens for these prompts.
        """
        return self._texts.counted

    def drafts_are_accepted(self) -> None:
        """Require that drafts are accepted, also in long and in concurrent answers.

        Raises:
            Unmet: No draft token is accepted, or the acceptance rate falls.
            NotRun: The server has no such counters.
        """
        early = self._drafted([Request(_EVEN, _SHORT, top=0, salt="early")]).counted
        whole = self._drafted([Request(_EVEN, _LONG, top=0, salt="whole")]).counted
        requests = [Request(_EVEN, _SHORT, top=0, salt=f"at once {n}") for n in range(_AT_ONCE)]
        many = self._drafted(requests, at_once=True).counted
        natural = self.drafted
        drafts = early.drafts + whole.drafts + natural.drafts
        accepted = early.accepted + whole.accepted + natural.accepted
        observed = (
            "none; the drafter's hidden states, its weights or its vocabulary are not those of "
            "this model"
        )
        require(accepted > 0, "an accepted token", observed, evidence=f"{drafts:.0f} drafts")
        late = f"the last {_LONG - _SHORT} tokens of a long answer"
        _require_accepted(late, early, whole.since(early))
        _require_accepted(f"{_AT_ONCE} answers at the same time", early, many)

    @functools.cached_property
    def _judged(self) -> dict[str, list[_JudgedToken]]:
        """The tokens of the greedy answer to each prompt; the keys are the prompts' names.

        The answers are long, because a fault may change only one of 200 tokens.
        """
        self.capabilities.require("prompt_logprobs")
        judged = {}
        requests = [Request(prompt.text, _JUDGED_TOKENS) for prompt in self.prompts.prompts]
        answers = self.asker.ask_together(requests)
        for prompt, answer in zip(self.prompts.prompts, answers, strict=True):
            ids = self.asker.ids(answer)
            before = self.asker.need(answer.prompt_ids, "the prompt's token ids")
            prefill = Request((*before, *ids), 1, 0, prompt_log_probabilities=True, prompt_top=1)
            tops = self.asker.need(self.asker.ask(prefill).prompt_tops, "prompt_logprobs")
            positions = self.asker.positions(answer)
            # The entries begin with the second token of the prompt.
            columns = zip(ids, positions, tops[len(before) - 1 :], strict=True)
            judged[prompt.name] = [_JudgedToken(*column) for column in columns]
        return judged

    def _samples(
        self, text: str, batches: int, options: dict[str, float]
    ) -> Iterator[tuple[Position, ...]]:
        """Yield the tokens of each sample."""
        count = self._choices
        body = self._body(text, max_tokens=_SAMPLED_TOKENS, temperature=1.0, n=count) | options
        for _ in range(math.ceil(batches * _CHOICES / count)):
            choices = self._send(body)["choices"]
            require(len(choices) == count, f"{count} choices", len(choices))
            for choice in choices:
                yield self.asker.positions(parse({"choices": [choice]}))

    @functools.cached_property
    def _choices(self) -> int:
        """The number of choices of a request, which llama-server limits to its slots."""
        with self.server.endpoint.http() as http:
            slots = json_of(http, "/props").get("total_slots")
        if isinstance(slots, int) and slots > 0:
            return min(slots, _CHOICES)
        return _CHOICES

    @functools.cached_property
    def _texts(self) -> _Drafts:
        """How much the counters of drafts changed during one greedy answer to each prompt."""
        requests = [Request(prompt.text, prompt.tokens, top=0) for prompt in self.prompts.prompts]
        return self._drafted(requests)

    def _drafted(self, requests: Sequence[Request], *, at_once: bool = False) -> _Drafts:
        """Send requests, one after another or concurrently, and count the drafts."""
        before = counters.drafted(self.server.endpoint)
        if before is None:
            raise NotRun("the server's /metrics count no drafts, and nothing else shows them")
        if at_once:
            answers = self.asker.ask_together(requests)
        else:
            answers = [self.asker.ask(request) for request in requests]
        generated = sum(len(self.asker.ids(answer)) for answer in answers)
        after = counters.drafted(self.server.endpoint)
        if after is None:
            raise Unmet(Fact("/metrics with the counters of drafts"))
        drafted = after.since(before)
        if not drafted.drafts:
            fact = Fact("drafts", "none for these prompts", f"{self.method}")
            if self._looks_up or self.method is None:
                raise NotRun(fact)
            raise Unmet(fact)
        return _Drafts(drafted, generated, len(requests))

    def _post(self, prompt: str, **options: Any) -> Completion:
        return parse(self._send(self._body(prompt, **options)))

    def _body(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        return Request(prompt, 1, top=0).body(self.server.endpoint.served_name) | options

    def _send(self, body: Mapping[str, Any]) -> dict[str, Any]:
        with self.server.endpoint.http(timeout_s=_TIMEOUT_S) as http:
            answer = http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise Refused(answer.status_code, answer.text)
        return dict(answer.json())


def _require_accepted(place: str, early: counters.Drafted, later: counters.Drafted) -> None:
    """Require that the acceptance rate has not fallen since an earlier measurement.

    The rate may fall to half, or by the noise of both rates if that is more. If either measurement
    has few drafted tokens, nothing is compared.
    """
    if min(early.tokens, later.tokens) < _FEW:
        return
    before = early.accepted / early.tokens
    after = later.accepted / later.tokens
    noise = _DEVIATIONS * math.sqrt(0.25 / early.tokens + 0.25 / later.tokens)
    least = min(before / 2, before - noise)
    require(
        after >= least,
        f"accepted drafts in {place}, compared with the first {_SHORT} tokens, of at least",
        "acceptance is lost",
        value=100 * after,
        limit=100 * least,
        unit="%",
    )
