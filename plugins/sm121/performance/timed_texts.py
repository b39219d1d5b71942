"""What timed requests say is what the server says to the same prompts when nobody times it. A timed
request asks for neither ids nor log-probabilities, which would cost time. Its prompt is asked again
in other forms: whole and with log-probabilities; for one token without the fields of a timed
request; and with a part of it changed, which must change the log-probabilities."""

import bisect
import json
import random
import re
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from sm121.answers.agreement import MOST_FORKS
from sm121.client.completion_json import Completion, Position, Prompt, ids_of
from sm121.client.completions import Asker, Refused, Request
from sm121.client.timed_answer import TimedAnswer
from sm121.core.level_settings import AgreementBound
from sm121.core.unmet import Fact, Unmet, facts_of, require
from sm121.core.verdict import NotRun
from sm121.measure.cells import MeasuredCell

#: A sign of several bytes is shown with the last of its tokens, of which it has so many at most.
_TOKENS_OF_A_SIGN = 4
#: Parts of a prompt, of which each look changes the next.
_PARTS = 4
_SHOWN = 60
Ids = tuple[int, ...]


@dataclass
class TimedTexts:
    """Holds the texts of a server's timed answers. `bound`: how far apart two tokens are equally
    likely; None: not known. `vocabulary`: ids below it are plain tokens."""

    asker: Asker
    bound: AgreementBound | None
    vocabulary: int
    _looks: Counter[tuple[int, int]] = field(default_factory=Counter)

    def hold(self, cell: MeasuredCell) -> None:
        """Ask a cell's new timed requests again: a long one drawn at random, at the first reading a
        short one too. What is wrong with their answers speaks against each number of the cell."""
        key = cell.depth, cell.concurrency
        pairs = [pair for pair in cell.unread if pair.answer.ok]
        cell.unread.clear()
        random.shuffle(pairs)
        pairs.sort(key=lambda pair: -pair.answer.asked_tokens)
        for pair in pairs[:1] + ([] if self._looks[key] else pairs[1:][-1:]):
            cell.server.show(f"{cell.shape.title}: what a timed request said, asked again")
            try:
                prompt = json.loads(pair.request.body)["prompt"]
                self.judge(prompt, pair.answer, self._looks[key])
            except Unmet as failure:
                cell.doubts.against("timed_answer", str(facts_of(failure)[0]))
            except (Refused, httpx.HTTPError) as error:
                cell.doubts.against("timed_answer", f"asked again: {error or type(error).__name__}")
            except NotRun as obstacle:
                cell.doubts.not_checked(f"timed answers at depth {cell.depth}: {obstacle}")
            self._looks[key] += 1

    def judge(self, prompt: str | list[int], answer: TimedAnswer, look: int = 0) -> None:
        """Raises Unmet: the answer is not what the server says untimed; NotRun: the server gives no
        means to judge it; Refused, HTTPError: the untimed request fails. `look`: says which part of
        the prompt is changed."""
        salt = f"sm121-timed-{secrets.token_hex(8)}"
        whole = prompt if isinstance(prompt, str) else (*prompt,)
        ids, first = self._follow(whole, (), answer, salt)
        if isinstance(prompt, str):
            raise NotRun("only a prompt of ids can be asked for one token of its answer")
        for at in sorted({0, random.randrange(len(ids)), len(ids) - 1}):
            alone = self.asker.ask(Request((*prompt, *ids[:at]), 1, salt=salt, fields={}))
            if self.asker.ids(alone) != (ids[at],):
                # The kernels of a prefill round otherwise than those of a decode step.
                within, about = 2 * self._equal_within, f"token {at}, asked alone"
                self._could_be(ids[at], self.asker.positions(alone)[0], within, about)
        part = len(prompt) // _PARTS
        start = look % _PARTS * part
        changed = (*random.choices(range(self.vocabulary), k=part), *prompt[start + part :])
        other = self.asker.ask(Request((*prompt[:start], *changed), 1, salt=f"{salt}-changed"))
        differs = not part or self.asker.positions(other)[0].top != first.top
        about = f"tokens {start} to {start + part} of {len(prompt)} changed"
        require(differs, "other log-probabilities for another prompt", "the same", about)

    def _follow(
        self, prompt: Prompt, before: Ids, timed: TimedAnswer, salt: str, forks: int = 0
    ) -> tuple[Ids, Position]:
        """The ids of a timed text after some of them, and what is as likely as the first."""
        tokens = timed.asked_tokens - len(before)
        answer = self._untimed(prompt if isinstance(prompt, str) else prompt + before, tokens, salt)
        ids, positions = self.asker.ids(answer), self.asker.positions(answer)
        content = _plain(timed.content)
        text = self._text(before + ids) if before else _plain(answer.text)
        if text == content:
            return ids, positions[0]

        def has_parted(count: int) -> bool:
            return not content.startswith(self._text(before + ids[:count]))

        parting = max(bisect.bisect_left(range(tokens + 1), True, key=has_parted) - 1, 0)
        for at in range(min(parting, tokens - 1), max(parting - _TOKENS_OF_A_SIGN, -1), -1):
            for other in self._as_likely(ids[at], positions[at]):
                begun = (*before, *ids[:at], other)
                if forks >= max(MOST_FORKS, timed.asked_tokens // 8):
                    break
                if not content.startswith(self._text(begun)):
                    continue
                if isinstance(prompt, str):
                    raise NotRun("as untimed up to a token that is equally likely; no ids go on")
                if len(begun) == timed.asked_tokens:
                    return (*ids[:at], other), positions[0]
                try:
                    rest, _ = self._follow(prompt, begun, timed, salt, forks + 1)
                except Unmet:
                    continue
                return (*ids[:at], other, *rest), positions[0]
        start = len(self._text(before + ids[:parting]))
        expected, observed = (each[start : start + _SHOWN] for each in (text, content))
        about = f"token {len(before) + parting} of a timed answer to {len(prompt)} tokens"
        raise Unmet(Fact(f"as untimed {expected!r}", f"{observed!r}", about))

    def _untimed(self, prompt: Prompt, tokens: int, salt: str) -> Completion:
        """The rest of an answer, with the end of a text banned as in a timed request."""
        fields: dict[str, Any] = {"ignore_eos": True, "min_tokens": tokens}
        fields |= {"add_special_tokens": False} if isinstance(prompt, str) else {}
        answer = self.asker.ask(Request(prompt, tokens, salt=salt, fields=fields))
        if len(self.asker.ids(answer)) != tokens:
            raise NotRun("the engine ends an answer where its text ends")
        for at, position in enumerate(self.asker.positions(answer)):
            self._could_be(self.asker.ids(answer)[at], position, 0.0, f"token {at}, untimed")
        return answer

    @property
    def _equal_within(self) -> float:
        if self.bound is None:
            raise NotRun("what is equally likely needs correctness.agreement in the profile")
        return self.bound.fork or self.bound.max_abs

    def _as_likely(self, token: int, position: Position) -> list[int]:
        """The tokens that could stand in the place of one, by the noise of the arithmetic."""
        values, within = _by_id(position), self._equal_within
        return [n for n, value in values.items() if n != token and value >= values[token] - within]

    def _could_be(self, token: int, position: Position, within: float, about: str) -> None:
        """A token is the likeliest one of those that do not end a text."""
        values = _by_id(position)
        best = max([v for n, v in values.items() if n < self.vocabulary], default=-1e9)
        least, about = best - within - 1e-3, f"{about}: {token}"
        observed = f"{values.get(token, 'not among them')}"
        require(values.get(token, -1e9) >= least, "the likeliest", observed, about)

    def _text(self, ids: Ids) -> str:
        return _plain(self.asker.text_of(ids))


def _by_id(position: Position) -> dict[int, float]:
    likely = {**position.top, position.token: position.log_probability}
    if (ids := ids_of([Position(name, 0.0, {}) for name in likely])) is None:
        raise NotRun("the engine does not name tokens by their ids (return_tokens_as_token_ids)")
    return dict(zip(ids, likely.values(), strict=True))


def _plain(text: str) -> str:
    """A text with one mark for bytes that are no sign, and none at its ends."""
    return re.sub("\ufffd+", "\ufffd", text).strip("\ufffd")
