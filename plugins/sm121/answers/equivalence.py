"""The same prompt asked in another way has the same answer: in a batch, from the prefix cache, in
chunks of prefill, streamed, as token ids, a token at a time, again, and after others have hung up.
Tokens are equal where the engine promises it; else they are judged within the noise, and both ways
are right where two tokens are equally likely."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from sm121.answers import agreement, sanity
from sm121.answers.prompts import Prompt, PromptSet
from sm121.client.completions import Asker, Completion, Request
from sm121.core.level_settings import AgreementBound
from sm121.core.unmet import Fact, Unmet, of, require, require_each
from sm121.core.verdict import NotRun

#: Longer than a step's budget of tokens, and than the blocks of the prefix cache.
_LONG = "count past two windows"
#: Tokens of prompts of which a hit of the prefix cache must save time: the first that takes so many
#: seconds more than a short one. Each is asked in so many ways, and the quickest counts.
_LENGTHS, _TELLING_S, _PAIRS = (1024, 4096, 16_384), 0.1, 3
#: What an answer may not lack where the answer to the same prompt alone has it.
_TOLD = ("ids", "positions", "prompt_ids", "completion_tokens")


@dataclass
class Continuations:
    """The prompt set with the answers that one server gives to each prompt alone. Asked once, when
    first needed, in a cold part of the prefix cache. The checks raise AssertionError where another
    way to ask gives another answer."""

    prompts: PromptSet
    bound: AgreementBound
    asker: Asker
    _salts: Iterator[int] = field(default_factory=itertools.count)
    _alone: dict[str, Completion] = field(default_factory=dict)

    def alone(self, prompt: Prompt) -> Completion:
        """The prompt's answer, asked alone and cold."""
        if prompt.name not in self._alone:
            self._alone[prompt.name] = self.asker.ask(self._request(prompt))
        return self._alone[prompt.name]

    def equal_in_a_batch(self) -> None:
        """All prompts at once, in order and in reverse."""
        chosen = self.prompts.prompts
        for how, order in (("in a batch", chosen), ("in a batch in reverse order", chosen[::-1])):
            answers = self.asker.ask_together([self._request(prompt) for prompt in order])
            self._hold(zip(order, answers, strict=True), how)

    def equal_from_the_prefix_cache(
        self, hits: Callable[[], float | None], *, is_on: bool = False
    ) -> None:
        """A long prompt, cold and from the cache. `hits`: tokens that the server took from its
        prefix cache so far; None: it does not count. `is_on`: its log says that it has one. Raises
        NotRun: the server counts hits of its prefix cache, and had none, and may have none."""
        prompt = self._named(_LONG)
        self.alone(prompt)
        request = self._request(prompt)
        before = hits()
        answers = [self.asker.ask(request) for _ in range(2)]
        if before is not None and not (hits() or 0) > before:
            require(not is_on, "a hit of the prefix cache, which is on by the log", "none")
            raise NotRun("the prefix cache had no hit: it is off, or its blocks are too large")
        for how, answer in zip(("cold", "from the cache"), answers, strict=True):
            self._hold([(prompt, answer)], how)

    def hits_save_time(self, hits: Callable[[], float | None], *, is_on: bool = False) -> None:
        """A long prompt takes at most half as long from the cache as cold, beside a short one.
        `hits`, `is_on`: as above. Raises NotRun: no prompt takes long enough to tell, or there was
        no hit, and need not be."""
        ids = self.asker.need(self.alone(self._named(_LONG)).prompt_ids, "the prompt's token ids")
        for length in _LENGTHS:
            before = hits()
            pairs = [self._cold_and_again(ids, length, turn) for turn in range(_PAIRS)]
            count = (hits() or 0) - (before or 0)
            short_s = min(self._cold_and_again(ids, 16, turn)[0] for turn in range(_PAIRS))
            cold_s, again_s = (min(seconds) - short_s for seconds in zip(*pairs, strict=True))
            if cold_s >= max(_TELLING_S, short_s):
                break
        else:
            raise NotRun(f"a prompt of {length} tokens is too quick to tell a hit from noise")
        if not is_on and (before is None or 2 * count < _PAIRS * length):
            raise NotRun(f"no hit of the prefix cache is known, of {_PAIRS} prompts of {length}")
        evidence = f"{cold_s:.3g} s cold, {again_s:.3g} s again; {count:g} tokens of hits"
        requirement = "at most half of the time that it takes cold"
        value: dict[str, Any] = {"value": again_s, "limit": cold_s / 2, "unit": "s"}
        saves = 2 * again_s <= cold_s
        require(saves, requirement, "more", f"{length} tokens again", evidence=evidence, **value)

    def _cold_and_again(self, ids: tuple[int, ...], length: int, turn: int) -> tuple[float, float]:
        """Seconds of a prompt whose beginning nobody has asked for, and of the same again."""
        prompt = tuple(ids[(7 * turn + n) % len(ids)] for n in range(length))
        request, seconds = Request(prompt, 1, top=0, salt=self._cold()), []
        for _ in range(2):
            began = time.perf_counter()
            self.asker.ask(request)
            seconds.append(time.perf_counter() - began)
        return seconds[0], seconds[1]

    def equal_in_chunks(self) -> None:
        """Eight long prompts together, more than a step may prefill."""
        prompt = self._named(_LONG)
        self.alone(prompt)
        answers = self.asker.ask_together([self._request(prompt) for _ in range(8)])
        self._hold(((prompt, answer) for answer in answers), "among eight long prompts")

    def equal_streamed(self) -> None:
        """Streamed: the same tokens and text, and usage that counts them."""

        def equal(prompt: Prompt) -> None:
            alone = self.alone(prompt)
            streamed = self.asker.stream(self._request(prompt))
            self._hold([(prompt, streamed)], "streamed")
            counted, of = streamed.completion_tokens, f"{prompt.name!r}"
            if counted is not None and streamed.ids is not None:
                count = len(streamed.ids)
                require(counted == count, f"usage of {count} tokens", counted, of)
            if streamed.ids == alone.ids:
                same = streamed.text == alone.text
                require(same, f"the text {alone.text!r}", repr(streamed.text), of)
                reason = alone.finish_reason
                require(streamed.finish_reason == reason, reason, streamed.finish_reason, of)

        require_each(equal, self.prompts.prompts[:3])

    def equal_as_token_ids(self) -> None:
        """Prompts as the tokens that the server itself makes of them."""
        for prompt in self.prompts.prompts[:4]:
            ids = self.asker.need(self.alone(prompt).prompt_ids, "the prompt's token ids")
            answer = self.asker.ask(Request(ids, prompt.tokens, salt=self._cold()))
            self._hold([(prompt, answer)], "as token ids")

    def equal_token_by_token(self) -> None:
        """A request for each token, whose prompt is all tokens before it. Such steps are never
        drafted. Their prompts are prefilled, or come from the prefix cache with what was generated
        in them, as in the next turn of a chat. The kernels of a prefill round otherwise than those
        of a decode step, so that twice as much is allowed (a healthy H100: 0.032 of 0.02 nats)."""
        bound = self.bound
        if bound.fork:
            allowed = {name: 2 * getattr(bound, name) for name in ("max_abs", "mean_abs", "fork")}
            bound = bound.model_copy(update=allowed)
        for prompt in (self.prompts.prompts[0], self._named(_LONG)):
            alone, salt = self.alone(prompt), self._cold()
            ids = self.asker.need(alone.prompt_ids, "the prompt's token ids")
            steps: list[Completion] = []
            for _ in range(prompt.tokens):
                before = ids + tuple(token for step in steps for token in step.ids or ())
                steps.append(self.asker.ask(Request(before, 1, salt=salt)))
                self.asker.need(steps[-1].ids, "token ids")
            all_positions = [step.positions for step in steps if step.positions is not None]
            is_whole = len(all_positions) == len(steps)
            whole = replace(
                alone,
                ids=tuple(token for step in steps for token in step.ids or ()),
                positions=tuple(itertools.chain(*all_positions)) if is_whole else None,
            )
            self._hold([(prompt, whole)], "a token at a time", bound)

    def equal_repeated(self) -> None:
        """One prompt three times."""
        prompt = self.prompts.prompts[1]
        for _ in range(3):
            self._hold([(prompt, self.asker.ask(self._request(prompt)))], "repeated")

    def equal_after_aborted_requests(self) -> None:
        """Prompts whose streams were broken off before."""
        prompts = self.prompts.prompts[2:5]
        for prompt in prompts:
            self.alone(prompt)
            self.asker.abort(Request(prompt.text, 200, salt=self._cold()))
        for prompt in prompts:
            answer = self.asker.ask(self._request(prompt))
            self._hold([(prompt, answer)], "after an aborted request")

    def go_on_sensibly(self) -> None:
        """No sign of a broken engine in the answers that should not repeat themselves."""

        def goes_on(prompt: Prompt) -> None:
            alone = self.alone(prompt)
            positions = alone.positions
            values = None if positions is None else [p.log_probability for p in positions]
            signs = sanity.signs(alone.text, alone.ids, values)
            require(not signs, "a text that goes on", signs, f"{prompt.name!r}")

        require_each(goes_on, [prompt for prompt in self.prompts.prompts if prompt.varied])

    def wrong(
        self, prompt: Prompt, answer: Completion, how: str, bound: AgreementBound | None = None
    ) -> Fact | None:
        """Why an answer to a prompt, asked in another way, is not the one that it has alone. Before
        any noise is allowed for, it must have what the answer alone has, to the same prompt. Tokens
        are the same where the engine promises that; else they are judged within the noise, and the
        other way's tokens after a fork by the server asked alone. Raises NotRun: tokens after a
        fork could not be judged."""
        alone, about = self.alone(prompt), f"{prompt.name!r} {how}"
        bound = bound or self.bound
        for name in _TOLD:
            if getattr(answer, name) is None and getattr(alone, name) is not None:
                return Fact(f"{name}, as asked alone", about=about)
        if answer.prompt_ids != alone.prompt_ids:
            return Fact("the prompt's ids as asked alone", "others", about)
        if answer.ids is not None and answer.ids == alone.ids and answer.text != alone.text:
            requirement = f"the text {alone.text!r} for the same tokens"
            return Fact(requirement, f"{answer.text!r}", about)
        different = agreement.same_tokens(alone, answer)
        if different is not None and bound.fork == 0:
            return of(about, [different])[0]
        if answer.positions is None or alone.positions is None:
            if different is not None:
                requirement = "log-probabilities, to tell two right choices from a wrong one,"
                self.asker.need(None, requirement)
            return None
        judged = agreement.judge(answer.positions, alone.positions, bound, self._again(prompt))
        if judged.disagreement is not None:
            return of(f"{about}, against the same alone", [judged.disagreement])[0]
        if judged.unjudged:
            raise NotRun(
                f"{about}: {judged.unjudged} tokens after a fork within the noise "
                "were not judged: the engine gives no token ids to ask from (return_token_ids)"
            )
        return None

    def _hold(
        self, answers: Iterable[tuple[Prompt, Completion]], how: str,
        bound: AgreementBound | None = None,
    ) -> None:  # fmt: skip
        def is_right(prompt: Prompt, answer: Completion) -> None:
            if (wrong := self.wrong(prompt, answer, how, bound)) is not None:
                raise Unmet(wrong)

        require_each(is_right, *zip(*answers, strict=True))

    def _named(self, name: str) -> Prompt:
        return next(prompt for prompt in self.prompts.prompts if prompt.name == name)

    def _request(self, prompt: Prompt) -> Request:
        return Request(prompt.text, prompt.tokens, salt=self._cold())

    def _cold(self) -> str:
        """A part of the prefix cache that nobody has used."""
        return f"sm121-{id(self)}-{next(self._salts)}"

    def _again(self, prompt: Prompt) -> agreement.Resume:
        def resume(prefix: tuple[int, ...]) -> agreement.Positions | None:
            if (ids := self.alone(prompt).prompt_ids) is None:
                return None
            rest = Request((*ids, *prefix), prompt.tokens - len(prefix), salt=self._cold())
            return self.asker.ask(rest).positions

        return resume
