"""Prompts that no cache has seen, of an exact length: fresh random tokens; of a server that drafts,
fixed natural texts (``fixtures/texts.toml``) behind a fresh beginning."""

import random
import re
import secrets
import string
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import httpx

from sm121.core.errors import Sm121Error
from sm121.core.server import Endpoint

#: Ids below it are one ASCII character each in a byte-level BPE, whose first tokens are the bytes.
_ASCII = 94
_WORDS = 4000
_ATTEMPTS = 4
#: Tokens at the beginning of a text that are kept where it is cut: no other prompt begins so.
_HEAD = 4
_FILE = files("sm121.fixtures") / "texts.toml"
#: The fixed texts, by name.
TEXTS: Mapping[str, str] = {
    name: row["text"].rstrip("\n") for name, row in tomllib.loads(_FILE.read_text("utf-8")).items()
}


@dataclass
class Prompts:
    """Makes prompts of token ids, or of text (`as_text`) where the server refuses ids. `endpoint`:
    asked for /tokenize where text is needed; `vocabulary`: ids below it are plain tokens;
    `natural`: of the fixed texts, which decide how much of a draft is accepted."""

    endpoint: Endpoint
    vocabulary: int
    natural: bool = False
    as_text: bool = False
    #: False where the server cannot be asked how long a text is.
    exact: bool = True
    #: As a text of words turned out to have.
    tokens_per_word: float = 1.0
    _random: random.Random = field(default_factory=lambda: random.Random(secrets.randbits(64)))
    _first_tokens: set[int] = field(default_factory=set)
    _words: list[str] = field(default_factory=list)
    #: The tokens of each fixed text.
    _tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[str, ...]:
        """The names of the fixed texts that prompts end with; one empty name without them."""
        return tuple(TEXTS) if self.natural else ("",)

    def make(self, tokens: int, text: str = "") -> list[int] | str:
        """A prompt that shares no beginning with any other: of ids, not even its first token.
        `text`: the name of the text that it ends with; empty: it is random to its end, which is a
        whole character: behind half of one, vLLM sends the prompt's text with the answer's."""
        if self.as_text:
            return self._text(tokens, text)
        ids = [self._random.randrange(self.vocabulary) for _ in range(1 if text else tokens)]
        if text:
            if not self._tokens:
                with self.endpoint.http() as http:
                    self._tokens = {name: self._tokenize(http, t) for name, t in TEXTS.items()}
            ids += ending(self._tokens, text, tokens - 1)
        elif tokens > 1:
            ids[-1] %= _ASCII
        while ids and ids[0] in self._first_tokens and len(self._first_tokens) < self.vocabulary:
            ids[0] = self._random.randrange(self.vocabulary)
        self._first_tokens.update(ids[:1])
        return ids

    def words(self, count: int, text: str = "") -> str:
        """A text of so many random words, or of a few and then the end of a fixed text."""
        if text:
            by_name = {name: re.findall(r"\S+\s*", each) for name, each in TEXTS.items()}
            return f"{self.words(_HEAD)} {''.join(ending(by_name, text, max(count - _HEAD, 1)))}"
        if not self._words:
            self._words = [
                "".join(self._random.choices(string.ascii_lowercase, k=self._random.randint(2, 7)))
                for _ in range(_WORDS)
            ]
        return " ".join(self._random.choices(self._words, k=count))

    def _text(self, tokens: int, name: str) -> str:
        if not self.exact:
            return self.words(max(1, round(tokens / self.tokens_per_word)), name)
        with self.endpoint.http() as http:
            text = self.words(tokens, name)  # a word is a token at least
            for _ in range(_ATTEMPTS):
                ids = self._tokenize(http, text)
                if len(ids) == tokens:
                    return text
                if len(ids) < tokens:
                    text = f"{self.words(tokens - len(ids))} {text}"
                else:
                    cut = [*ids[:_HEAD], *ids[_HEAD - tokens :]]
                    body = {"model": self.endpoint.served_name, "tokens": cut}
                    answer = http.post("/detokenize", json=body).raise_for_status()
                    text = str(answer.json()["prompt"])
        raise Sm121Error(f"no text of exactly {tokens} tokens came out of /tokenize")

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


def ending(texts: Mapping[str, Sequence[Any]], name: str, count: int) -> list[Any]:
    """The last so many parts of a text; before them, where it has fewer, the other texts in turns,
    so that what is generated has been in no prompt."""
    others = [part for other, parts in texts.items() if other != name for part in parts]
    missing = max(count - len(texts[name]), 0)
    before = others * (missing // len(others) + 1)
    return [*before[len(before) - missing :], *texts[name]][-count:]
