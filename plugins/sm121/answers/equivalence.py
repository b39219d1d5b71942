"""Check that the answer to a prompt does not depend on how the prompt is sent.

The checks send a prompt in a batch, from the prefix cache, with chunked prefill, streamed, as token
ids, one token at a time, repeatedly, and after aborted requests. If the engine documents equal
results, the tokens must be equal. Otherwise the tokens are compared within the noise of the
arithmetic, and either of two equally likely tokens is correct.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sm121.answers import agreement, sanity
from sm121.answers.prompts import Prompt, PromptSet
from sm121.client.completion_json import Completion, Position
from sm121.client.completions import Asker, Request
from sm121.core.level_settings import AgreementBound
from sm121.core.unmet import Fact, Unmet, require, require_each, with_subject
from sm121.core.verdict import NotRun

#: The name of a prompt that is longer than a step's token budget and longer than a block of the
#: prefix cache.
_LONG = "count past two windows"
#: The lengths of the prompts that are tried, in tokens. A prompt is sent twice, and the time that
#: the prefix cache saves is measured. The check uses the first length whose prompt takes at least
#: `_MEASURABLE_S` seconds longer than a short prompt.
_LENGTHS = (1024, 4096, 16_384)
_MEASURABLE_S = 0.1
#: Number of tokens of a short prompt.
_SHORT = 16
#: How often each time is measured; the shortest time counts.
_REPEATS = 3
#: Number of concurrent long prompts, so that their prefill is chunked.
_CHUNKED = 8
#: Number of tokens of a stream that is aborted after its first chunk.
_ABORTED_TOKENS = 200
#: Fields that an answer must have if the answer to the same prompt, sent alone, has them.
_FIELDS = ("ids", "positions", "prompt_ids", "completion_tokens")


class _Times(NamedTuple):
    """The durations of a request whose prompt is not cached, and of its repetition, in seconds."""

    cold_s: float
    again_s: float


@dataclass
class Continuations:
    """The prompt set, with one server's answers to each prompt sent alone.

    These answers are requested once, on first use, without the prefix cache. Each check sends the
    prompts in another way, and raises `Unmet` if the answers differ.
    """

    prompts: PromptSet
    #: The tolerance between two answers.
    bound: AgreementBound
    asker: Asker
    _salts: Iterator[int] = field(default_factory=itertools.count)
    _alone: dict[str, Completion] = field(default_factory=dict)

    def alone(self, prompt: Prompt) -> Completion:
        """Return the answer to a prompt that is sent alone, bypassing the prefix cache.

        Args:
            prompt: A prompt of the set. Its answer is requested once, and kept.

        Raises:
            NotRun: The server's context is too short, or its engine does not accept the request.
            Refused: The server answered with an error.
            Unmet: The answer is malformed.
        """
        if prompt.name not in self._alone:
            self._alone[prompt.name] = self.asker.ask(self._request(prompt))
        return self._alone[prompt.name]

    def equal_in_a_batch(self) -> None:
        """Compare concurrent requests of all prompts, in order and in reverse order."""
        prompts = self.prompts.prompts
        for case, order in (
            ("in a batch", prompts),
            ("in a batch in reverse order", prompts[::-1]),
        ):
            answers = self.asker.ask_together([self._request(prompt) for prompt in order])
            self._require_equal(zip(order, answers, strict=True), case)

    def equal_from_the_prefix_cache(
        self, hits: Callable[[], float | None], *, is_on: bool = False
    ) -> None:
        """Compare the answers to a long prompt without and with a hit of the prefix cache.

        Args:
            hits: Returns how many tokens the server took from its prefix cache so far; None if it
                does not count them.
            is_on: Whether the server's log shows that the prefix cache is on.

        Raises:
            Unmet: An answer differs, or the cache is on, but had no hit.
            NotRun: The cache had no hit, and may be off.
        """
        prompt = self._find_prompt(_LONG)
        self.alone(prompt)
        request = self._request(prompt)
        before = hits()
        cold = self.asker.ask(request)
        cached = self.asker.ask(request)
        if before is not None and not (hits() or 0) > before:
            require(
                not is_on,
                "a prefix-cache hit, because the log shows that the prefix cache is on",
                "none",
            )
            raise NotRun("the prefix cache had no hit: it is off, or its blocks are too large")
        self._require_equal([(prompt, cold)], "cold")
        self._require_equal([(prompt, cached)], "from the cache")

    def hits_save_time(self, hits: Callable[[], float | None], *, is_on: bool = False) -> None:
        """Require that a cached long prompt takes at most half of the time of an uncached one.

        The time of a short prompt is subtracted from both times.

        Args:
            hits: As in `equal_from_the_prefix_cache`.
            is_on: As in `equal_from_the_prefix_cache`.

        Raises:
            Unmet: The cached prompt takes more than half of the time.
            NotRun: No prompt takes long enough to measure, or the cache had no hit and may be off.
        """
        prompt = self._find_prompt(_LONG)
        ids = self.asker.need(self.alone(prompt).prompt_ids, "the prompt's token ids")
        for length in _LENGTHS:
            before = hits()
            times = [self._time_twice(ids, length, turn) for turn in range(_REPEATS)]
            count = (hits() or 0) - (before or 0)
            short_s = min(self._time_twice(ids, _SHORT, turn).cold_s for turn in range(_REPEATS))
            cold_s = min(pair.cold_s for pair in times) - short_s
            again_s = min(pair.again_s for pair in times) - short_s
            if cold_s >= max(_MEASURABLE_S, short_s):
                break
        else:
            raise NotRun(
                f"a prompt of {length} tokens is processed too fast to distinguish a cache hit "
                "from noise"
            )
        if not is_on and (before is None or 2 * count < _REPEATS * length):
            raise NotRun(
                f"the server counts no prefix-cache hit for {_REPEATS} prompts of {length} tokens"
            )
        require(
            2 * again_s <= cold_s,
            "a cached prompt to take at most half of the cold time,",
            "",
            f"{length} tokens, sent again",
            value=again_s,
            limit=cold_s / 2,
            unit="s",
            evidence=f"{cold_s:.3g} s cold, {again_s:.3g} s again; {count:g} tokens from the cache",
        )

    def _time_twice(self, ids: tuple[int, ...], length: int, turn: int) -> _Times:
        """Time a prompt whose beginning is not in the cache, and the same prompt again."""
        prompt = tuple(ids[(7 * turn + n) % len(ids)] for n in range(length))
        request = Request(prompt, 1, top=0, salt=self._new_salt())
        return _Times(self._time(request), self._time(request))

    def _time(self, request: Request) -> float:
        began = time.perf_counter()
        self.asker.ask(request)
        return time.perf_counter() - began

    def equal_in_chunks(self) -> None:
        """Compare eight concurrent long prompts, which together exceed a step's token budget."""
        prompt = self._find_prompt(_LONG)
        self.alone(prompt)
        answers = self.asker.ask_together([self._request(prompt) for _ in range(_CHUNKED)])
        pairs = [(prompt, answer) for answer in answers]
        self._require_equal(pairs, "among eight long prompts")

    def equal_streamed(self) -> None:
        """Compare streamed answers: tokens, text, finish_reason and usage."""

        def is_equal(prompt: Prompt) -> None:
            about = f"{prompt.name!r}"
            alone = self.alone(prompt)
            streamed = self.asker.stream(self._request(prompt))
            self._require_equal([(prompt, streamed)], "streamed")
            counted = streamed.completion_tokens
            if counted is not None and streamed.ids is not None:
                count = len(streamed.ids)
                require(counted == count, f"usage of {count} tokens", counted, about)
            if streamed.ids == alone.ids:
                same = streamed.text == alone.text
                require(same, f"the text {alone.text!r}", repr(streamed.text), about)
                reason = alone.finish_reason
                require(streamed.finish_reason == reason, reason, streamed.finish_reason, about)

        require_each(is_equal, self.prompts.prompts[:3])

    def equal_as_token_ids(self) -> None:
        """Compare prompts that are sent as the token ids of the server's own tokenizer."""
        for prompt in self.prompts.prompts[:4]:
            ids = self.asker.need(self.alone(prompt).prompt_ids, "the prompt's token ids")
            answer = self.asker.ask(Request(ids, prompt.tokens, salt=self._new_salt()))
            self._require_equal([(prompt, answer)], "as token ids")

    def equal_token_by_token(self) -> None:
        """Compare answers whose tokens are requested one by one, each after all tokens before it.

        These requests do not use speculative decoding. Their prompts are prefilled, or come from
        the prefix cache, which then contains generated tokens, as in the next turn of a chat.
        Prefill kernels round differently from decode kernels, so twice the tolerance applies (a
        healthy H100 differed by 0.032 nats, with a tolerance of 0.02).
        """
        bound = self.bound
        if bound.fork:
            twice = {
                "max_abs": 2 * bound.max_abs,
                "mean_abs": 2 * bound.mean_abs,
                "fork": 2 * bound.fork,
            }
            bound = bound.model_copy(update=twice)
        for prompt in (self.prompts.prompts[0], self._find_prompt(_LONG)):
            answer = self._answer_by_steps(prompt)
            self._require_equal([(prompt, answer)], "a token at a time", bound)

    def _answer_by_steps(self, prompt: Prompt) -> Completion:
        """Return an answer that is assembled from one request per token."""
        alone = self.alone(prompt)
        salt = self._new_salt()
        prompt_ids = self.asker.need(alone.prompt_ids, "the prompt's token ids")
        ids: tuple[int, ...] = ()
        positions: list[Position] = []
        lacks_positions = False
        for _ in range(prompt.tokens):
            step = self.asker.ask(Request(prompt_ids + ids, 1, salt=salt))
            ids += self.asker.need(step.ids, "token ids")
            if step.positions is None:
                lacks_positions = True
            else:
                positions += step.positions
        return replace(alone, ids=ids, positions=None if lacks_positions else tuple(positions))

    def equal_repeated(self) -> None:
        """Compare three repetitions of one prompt."""
        prompt = self.prompts.prompts[1]
        for _ in range(3):
            self._require_equal([(prompt, self.asker.ask(self._request(prompt)))], "repeated")

    def equal_after_aborted_requests(self) -> None:
        """Compare the answers to prompts after streams with the same prompts were aborted."""
        prompts = self.prompts.prompts[2:5]
        for prompt in prompts:
            self.alone(prompt)
            self.asker.abort(Request(prompt.text, _ABORTED_TOKENS, salt=self._new_salt()))
        for prompt in prompts:
            answer = self.asker.ask(self._request(prompt))
            self._require_equal([(prompt, answer)], "after an aborted request")

    def go_on_sensibly(self) -> None:
        """Require that the answers to the prompts show no sign of a broken engine.

        Raises:
            Unmet: An answer has one of the signs that `sanity` detects.
        """

        def goes_on(prompt: Prompt) -> None:
            alone = self.alone(prompt)
            values = None
            if alone.positions is not None:
                values = [position.log_probability for position in alone.positions]
            signs = sanity.signs(alone.text, alone.ids, values)
            require(not signs, "a text that goes on", signs, f"{prompt.name!r}")

        require_each(goes_on, [prompt for prompt in self.prompts.prompts if prompt.varied])

    def find_difference(
        self, prompt: Prompt, answer: Completion, form: str, bound: AgreementBound | None = None
    ) -> Fact | None:
        """Compare an answer with the answer to the prompt sent alone.

        The answer must have the same fields and prompt ids, and the same text for the same tokens.
        The tokens must be equal if the tolerance allows no forks. Otherwise they are compared
        within the tolerance, and the tokens after a fork are requested from the server.

        Args:
            prompt: The prompt.
            answer: Its answer to another form of the request.
            form: The form of the request, for the message.
            bound: The tolerance; None: the tolerance of this prompt set.

        Returns:
            The first difference; None if there is none.

        Raises:
            NotRun: Tokens after a fork could not be requested.
        """
        alone = self.alone(prompt)
        about = f"{prompt.name!r} {form}"
        bound = bound or self.bound
        for name in _FIELDS:
            if getattr(answer, name) is None and getattr(alone, name) is not None:
                return Fact(f"{name}, as in the answer to the prompt sent alone", about=about)
        if answer.prompt_ids != alone.prompt_ids:
            return Fact("the prompt's token ids, as for the prompt sent alone", "others", about)
        if answer.ids is not None and answer.ids == alone.ids and answer.text != alone.text:
            required = f"the text {alone.text!r} for the same tokens"
            return Fact(required, f"{answer.text!r}", about)
        difference = agreement.same_tokens(alone, answer)
        if difference is not None and bound.fork == 0:
            return with_subject(about, [difference])[0]
        if answer.positions is None or alone.positions is None:
            if difference is not None:
                required = "log-probabilities, which show whether both tokens are equally likely,"
                self.asker.need(None, required)
            return None
        judged = agreement.compare_runs(
            answer.positions, alone.positions, bound, self._resume(prompt)
        )
        if judged.disagreement is not None:
            return with_subject(
                f"{about}, compared with the answer to the prompt sent alone",
                [judged.disagreement],
            )[0]
        if judged.unjudged:
            raise NotRun(
                f"{about}: {judged.unjudged} tokens were not compared, because they follow a "
                "position where two tokens are equally likely, and the engine returns no token "
                "ids (return_token_ids)"
            )
        return None

    def _require_equal(
        self,
        answers: Iterable[tuple[Prompt, Completion]],
        form: str,
        bound: AgreementBound | None = None,
    ) -> None:
        def is_equal(prompt: Prompt, answer: Completion) -> None:
            difference = self.find_difference(prompt, answer, form, bound)
            if difference is not None:
                raise Unmet(difference)

        require_each(is_equal, *zip(*answers, strict=True))

    def _find_prompt(self, name: str) -> Prompt:
        return next(prompt for prompt in self.prompts.prompts if prompt.name == name)

    def _request(self, prompt: Prompt) -> Request:
        return Request(prompt.text, prompt.tokens, salt=self._new_salt())

    def _new_salt(self) -> str:
        """Return a new cache salt, for which the prefix cache has no entries."""
        return f"sm121-{id(self)}-{next(self._salts)}"

    def _resume(self, prompt: Prompt) -> agreement.Resume:
        def resume(prefix: tuple[int, ...]) -> agreement.Positions | None:
            ids = self.alone(prompt).prompt_ids
            if ids is None:
                return None
            rest = Request((*ids, *prefix), prompt.tokens - len(prefix), salt=self._new_salt())
            return self.asker.ask(rest).positions

        return resume
