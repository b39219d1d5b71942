"""Prompts that no cache has seen: fresh random tokens, of an exact length."""

import random
import secrets
import string
from dataclasses import dataclass, field

import httpx

from sm121.core.errors import Sm121Error
from sm121.core.server import Endpoint

_WORDS = 4000
_ATTEMPTS = 4


class PromptError(Sm121Error):
    """No prompt of the length that was asked for could be made."""


@dataclass
class Prompts:
    """Makes prompts of token ids, or of text where the server refuses ids.

    Args:
        endpoint: asked for /tokenize where text is needed.
        vocabulary: ids below it are plain tokens.
        as_text: the server refuses ids.
    """

    endpoint: Endpoint
    vocabulary: int
    as_text: bool = False
    #: False where the server cannot be asked how long a text is.
    exact: bool = True
    #: As a text of words turned out to have.
    tokens_per_word: float = 1.0
    _random: random.Random = field(default_factory=lambda: random.Random(secrets.randbits(64)))
    _first_tokens: set[int] = field(default_factory=set)
    _words: list[str] = field(default_factory=list)

    def make(self, tokens: int) -> list[int] | str:
        """A prompt that shares nothing with any other: of ids, not even its first token."""
        if self.as_text:
            return self._text(tokens)
        ids = [self._random.randrange(self.vocabulary) for _ in range(tokens)]
        while ids and ids[0] in self._first_tokens and len(self._first_tokens) < self.vocabulary:
            ids[0] = self._random.randrange(self.vocabulary)
        self._first_tokens.update(ids[:1])
        return ids

    def words(self, count: int) -> str:
        """A text of so many random words."""
        if not self._words:
            self._words = [
                "".join(self._random.choices(string.ascii_lowercase, k=self._random.randint(2, 7)))
                for _ in range(_WORDS)
            ]
        return " ".join(self._random.choices(self._words, k=count))

    def _text(self, tokens: int) -> str:
        if not self.exact:
            return self.words(max(1, round(tokens / self.tokens_per_word)))
        with self.endpoint.http() as http:
            text = self.words(tokens)  # a word is a token at least
            for _ in range(_ATTEMPTS):
                ids = self._tokenize(http, text)
                if len(ids) == tokens:
                    return text
                if len(ids) < tokens:
                    text = f"{text} {self.words(tokens - len(ids))}"
                else:
                    body = {"model": self.endpoint.served_name, "tokens": ids[:tokens]}
                    answer = http.post("/detokenize", json=body).raise_for_status()
                    text = str(answer.json()["prompt"])
        raise PromptError(f"no text of exactly {tokens} tokens came out of /tokenize")

    def _tokenize(self, http: httpx.Client, text: str) -> list[int]:
        body = {"model": self.endpoint.served_name, "prompt": text, "add_special_tokens": False}
        return list(http.post("/tokenize", json=body).raise_for_status().json()["tokens"])

    def can_tokenize(self) -> bool:
        """Whether the server says how many tokens a text has."""
        with self.endpoint.http() as http:
            try:
                return len(self._tokenize(http, "one two three")) > 0
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                return False
