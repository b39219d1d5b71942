"""The texts of timed requests compared with untimed answers to the same prompts.

A timed request has neither token ids nor log-probabilities, which would cost time. The same prompt
is sent again in three forms:

1. whole, with log-probabilities;
2. for one token, without the fields of a timed request;
3. with a part of it changed, which must change the log-probabilities.
"""

import bisect
import json
import random
import re
import secrets
from collections import Counter
from collections.abc import Mapping
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

#: Maximum number of tokens of a character of several bytes. A text shows it with its last token.
_TOKENS_OF_A_CHARACTER = 4
#: The number of parts of a prompt. Each comparison changes the next part.
_PARTS = 4
#: Maximum number of characters of a text that a message quotes.
_SHOWN = 60
#: A log-probability below that of any token.
_IMPOSSIBLE = -1e9
#: The rounding error of a log-probability in JSON.
_ROUNDING = 1e-3
#: The token ids of a text.
Ids = tuple[int, ...]


@dataclass
class TimedTexts:
    """Compares the texts of a server's timed answers with untimed ones."""

    asker: Asker
    #: The distance within which two tokens are equally likely; None if it is not known.
    bound: AgreementBound | None
    #: Ids below this number are plain tokens. Most models have no token below it that ends a text.
    vocabulary: int
    #: The number of answers that were compared. The keys are depth and streams of the cell.
    _looks: Counter[tuple[int, int]] = field(default_factory=Counter)
    #: The ids of tokens that ended a text. Timed requests forbid them.
    _ends: set[int] = field(default_factory=set)

    def check_cell(self, cell: MeasuredCell) -> None:
        """Repeat some of a cell's new timed requests, and compare the answers.

        A long request is drawn at random, and for the first comparison a short one too. If an
        answer differs, each number of the cell is invalid.

        Args:
            cell: The cell. The reason is added to its ``doubts``.
        """
        key = (cell.depth, cell.concurrency)
        pairs = [pair for pair in cell.unread if pair.answer.ok]
        cell.unread.clear()
        random.shuffle(pairs)
        pairs.sort(key=lambda pair: -pair.answer.asked_tokens)
        chosen = pairs[:1]
        if len(pairs) > 1 and not self._looks[key]:
            chosen.append(pairs[-1])
        for pair in chosen:
            cell.server.show(f"{cell.shape.title}: the answer of a timed request, requested again")
            try:
                prompt = json.loads(pair.request.body)["prompt"]
                self.judge(prompt, pair.answer, self._looks[key])
            except Unmet as failure:
                cell.doubts.against("timed_answer", str(facts_of(failure)[0]))
            except (Refused, httpx.HTTPError) as error:
                cell.doubts.against(
                    "timed_answer", (f"requested again: {error or type(error).__name__}")
                )
            except NotRun as obstacle:
                cell.doubts.not_checked(f"timed answers at depth {cell.depth}: {obstacle}")
            self._looks[key] += 1

    def judge(self, prompt: str | list[int], answer: TimedAnswer, look: int = 0) -> None:
        """Compare a timed answer with untimed answers.

        Args:
            prompt: The prompt of the timed request, as text or as ids.
            answer: The timed answer.
            look: The number of earlier comparisons, which chooses the changed part of the prompt.

        Raises:
            Unmet: The timed answer differs from the untimed answers.
            NotRun: The server does not return what the comparison needs.
            Refused: An untimed request is refused.
            HTTPError: An untimed request fails.
        """
        salt = f"sm121-timed-{secrets.token_hex(8)}"
        whole = prompt if isinstance(prompt, str) else tuple(prompt)
        ids, first = self._follow(whole, (), answer, salt)
        if isinstance(prompt, str):
            raise NotRun("single tokens of an answer can only be requested after a prompt of ids")
        self._check_single_tokens(prompt, ids, salt)
        self._check_changed_prompt(prompt, first, look, salt)

    def _check_single_tokens(self, prompt: list[int], ids: Ids, salt: str) -> None:
        """Request the first, a random and the last token of an answer alone."""
        for at in sorted({0, random.randrange(len(ids)), len(ids) - 1}):
            alone = self.asker.ask(Request((*prompt, *ids[:at]), 1, salt=salt, fields={}))
            if self.asker.ids(alone) != (ids[at],):
                # The kernels of a prefill round differently from those of a decode step.
                position = self.asker.positions(alone)[0]
                likelier = self._likelier(ids[at], position, 2 * self._equal_within)
                likelier = self._without_end(likelier, position, alone)
                _require_none(likelier, ids[at], position, f"token {at}, requested alone")

    def _check_changed_prompt(
        self, prompt: list[int], first: Position, look: int, salt: str
    ) -> None:
        """Require other log-probabilities of the first token for a prompt with a changed part."""
        part = len(prompt) // _PARTS
        start = look % _PARTS * part
        end = start + part
        drawn = random.choices(range(self.vocabulary), k=part)
        changed = (*prompt[:start], *drawn, *prompt[end:])
        other = self.asker.ask(Request(changed, 1, salt=f"{salt}-changed"))
        differs = not part or self.asker.positions(other)[0].top != first.top
        about = f"tokens {start} to {end} of {len(prompt)} changed"
        require(differs, "other log-probabilities for another prompt", "the same", about)

    def _follow(
        self, prompt: Prompt, before: Ids, timed: TimedAnswer, salt: str, forks: int = 0
    ) -> tuple[Ids, Position]:
        """Return the ids of a timed text after the ids ``before``, and the position of the first.

        Where the untimed answer deviates from the timed text, an equally likely token is tried.
        ``forks`` is the number of such tokens in ``before``.
        """
        tokens = timed.asked_tokens - len(before)
        begun_prompt = prompt if isinstance(prompt, str) else prompt + before
        answer = self._untimed(begun_prompt, tokens, salt)
        ids = self.asker.ids(answer)
        positions = self.asker.positions(answer)
        content = _plain(timed.content)
        text = self._text(before + ids) if before else _plain(answer.text)
        if text == content:
            return ids, positions[0]

        def has_parted(count: int) -> bool:
            return not content.startswith(self._text(before + ids[:count]))

        parting = max(bisect.bisect_left(range(tokens + 1), True, key=has_parted) - 1, 0)
        for at in range(min(parting, tokens - 1), max(parting - _TOKENS_OF_A_CHARACTER, -1), -1):
            for other in self._as_likely(ids[at], positions[at]):
                begun = (*before, *ids[:at], other)
                if forks >= max(MOST_FORKS, timed.asked_tokens // 8):
                    break
                if not content.startswith(self._text(begun)):
                    continue
                if isinstance(prompt, str):
                    raise NotRun(
                        "the timed text agrees up to a token that is as likely as another; the "
                        "rest is not compared, because this needs a prompt of token ids"
                    )
                if len(begun) == timed.asked_tokens:
                    return (*ids[:at], other), positions[0]
                try:
                    rest, _ = self._follow(prompt, begun, timed, salt, forks + 1)
                except Unmet:
                    continue
                return (*ids[:at], other, *rest), positions[0]
        start = len(self._text(before + ids[:parting]))
        expected = text[start : start + _SHOWN]
        observed = content[start : start + _SHOWN]
        about = f"token {len(before) + parting} of a timed answer to {len(prompt)} tokens"
        raise Unmet(Fact(f"{expected!r}, as in the untimed answer", f"{observed!r}", about))

    def _untimed(self, prompt: Prompt, tokens: int, salt: str) -> Completion:
        """Return the rest of an answer. As in a timed request, it cannot end early."""
        fields: dict[str, Any] = {"ignore_eos": True, "min_tokens": tokens}
        if isinstance(prompt, str):
            fields["add_special_tokens"] = False
        answer = self.asker.ask(Request(prompt, tokens, salt=salt, fields=fields))
        if len(self.asker.ids(answer)) != tokens:
            raise NotRun("untimed answer: expected as many tokens as requested, got another number")
        ids = self.asker.ids(answer)
        for at, position in enumerate(self.asker.positions(answer)):
            likelier = self._likelier(ids[at], position, 0.0)
            if likelier:
                alone = self._next_token(prompt, ids[:at], salt)
                likelier = self._without_end(likelier, position, alone)
            _require_none(likelier, ids[at], position, f"token {at}, untimed")
        return answer

    def _next_token(self, prompt: Prompt, ids: Ids, salt: str) -> Completion:
        """Request one token after a prompt and these ids. It may end the text."""
        fields: dict[str, Any] = {}
        before: Prompt
        if isinstance(prompt, str):
            before = prompt + self._text(ids)
            fields["add_special_tokens"] = False
        else:
            before = prompt + ids
        return self.asker.ask(Request(before, 1, salt=salt, fields=fields))

    def _without_end(
        self, likelier: Mapping[int, float], position: Position, alone: Completion
    ) -> dict[int, float]:
        """Return the likelier tokens without the one that ends the text.

        Args:
            likelier: The likelier tokens at a position.
            position: The position, with all of its likeliest tokens.
            alone: The answer of one token at this position, which may end the text.
        """
        if alone.finish_reason != "stop":
            return dict(likelier)
        # llama-server returns no id for a token that ends a text: it is the likeliest one.
        values = _by_id(position)
        end = alone.ids[0] if alone.ids else max(values, key=lambda token: values[token])
        if end in likelier:
            self._ends.add(end)
        return {token: value for token, value in likelier.items() if token != end}

    @property
    def _equal_within(self) -> float:
        if self.bound is None:
            raise NotRun("equally likely tokens need correctness.agreement in the profile")
        return self.bound.fork or self.bound.max_abs

    def _as_likely(self, token: int, position: Position) -> list[int]:
        """Return the tokens that are as likely as a token within the noise of the arithmetic."""
        values = _by_id(position)
        least = values[token] - self._equal_within
        return [other for other, value in values.items() if other != token and value >= least]

    def _likelier(self, token: int, position: Position, within: float) -> dict[int, float]:
        """Return the plain tokens that are likelier than a token, and do not end a text."""
        values = _by_id(position)
        least = values.get(token, _IMPOSSIBLE) + within + _ROUNDING
        likelier = {}
        for other, value in values.items():
            if value > least and other < self.vocabulary and other not in self._ends:
                likelier[other] = value
        return likelier

    def _text(self, ids: Ids) -> str:
        return _plain(self.asker.text_of(ids))


def _require_none(
    likelier: Mapping[int, float], token: int, position: Position, about: str
) -> None:
    """Require that no token is likelier than this one."""
    observed = f"{_by_id(position).get(token, 'not among them')}"
    require(not likelier, "the likeliest", observed, f"{about}: {token}")


def _by_id(position: Position) -> dict[int, float]:
    """Return the log-probabilities of a position by token id."""
    likely = {**position.top, position.token: position.log_probability}
    ids = ids_of([Position(name, 0.0, {}) for name in likely])
    if ids is None:
        raise NotRun("the engine does not name tokens by their ids (return_tokens_as_token_ids)")
    return dict(zip(ids, likely.values(), strict=True))


def _plain(text: str) -> str:
    """Return a text without U+FFFD at both ends, and with adjacent U+FFFD merged into one."""
    return re.sub("\ufffd+", "\ufffd", text).strip("\ufffd")
