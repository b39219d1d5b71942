"""Make prompts of an exact length that no prefix cache contains.

The prompts are new random tokens. For a server with speculative decoding, they are fixed natural
texts (``fixtures/texts.toml``) after a new beginning.
"""

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

#: In a byte-level BPE vocabulary, each id below this number is one printable ASCII character.
_ASCII = 94
#: The number of different random words of which texts consist.
_WORDS = 4000
#: The maximum number of attempts to make a text of an exact length. Of 1,800
#: texts for a vocabulary of 1,024 tokens, 4 % changed their length when they were shortened, and
#: 0.2 % needed more than four attempts.
_ATTEMPTS = 20
#: If a text is shortened, this many tokens at its beginning are kept, because they make it unique.
_HEAD = 4
_FILE = files("sm121.fixtures") / "texts.toml"
#: The fixed texts; the keys are their names.
TEXTS: Mapping[str, str] = {
    name: row["text"].rstrip("\n") for name, row in tomllib.loads(_FILE.read_text("utf-8")).items()
}


@dataclass
class Prompts:
    """Makes prompts of token ids, or of text if the server refuses ids.

    Attributes:
        endpoint: The server, whose /tokenize is used for texts.
        vocabulary: Ids below this number are ordinary tokens.
        natural: Whether to use the fixed texts. With speculative decoding, the text determines how
            many draft tokens are accepted.
        as_text: Whether to make texts instead of ids.
        exact: Whether the server's /tokenize gives the length of a text.
        tokens_per_word: The measured mean number of tokens per word.
    """

    endpoint: Endpoint
    vocabulary: int
    natural: bool = False
    as_text: bool = False

    exact: bool = True

    tokens_per_word: float = 1.0
    _random: random.Random = field(default_factory=lambda: random.Random(secrets.randbits(64)))
    _first_tokens: set[int] = field(default_factory=set)
    #: The first tokens of each text.
    _beginnings: set[tuple[int, ...]] = field(default_factory=set)
    _words: list[str] = field(default_factory=list)
    #: The tokens of each fixed text.
    _tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[str, ...]:
        """The names of the fixed texts with which prompts end.

        If no fixed texts are used, this is one empty name.
        """
        return tuple(TEXTS) if self.natural else ("",)

    def make(self, tokens: int, text: str = "") -> list[int] | str:
        """Return a prompt with a new beginning.

        Prompts of ids differ in the first token, and texts of an exact length in the first tokens.

        Args:
            tokens: The length of the prompt.
            text: The name of the text at the end of the prompt; empty for random tokens. Random
                tokens end with a complete character, because after an incomplete one vLLM's answer
                would repeat text of the prompt.
        """
        if self.as_text:
            return self._text(tokens, text)
        ids = [self._random.randrange(self.vocabulary) for _ in range(1 if text else tokens)]
        if text:
            if not self._tokens:
                with self.endpoint.http() as http:
                    for name, fixed_text in TEXTS.items():
                        self._tokens[name] = self._tokenize(http, fixed_text)
            ids += ending(self._tokens, text, tokens - 1)
        elif tokens > 1:
            ids[-1] %= _ASCII
        while ids and ids[0] in self._first_tokens and len(self._first_tokens) < self.vocabulary:
            ids[0] = self._random.randrange(self.vocabulary)
        self._first_tokens.update(ids[:1])
        return ids

    def words(self, count: int, text: str = "") -> str:
        """Return a text of random words.

        Args:
            count: The number of words.
            text: The name of the fixed text at the end; empty for random words only.
        """
        if text:
            words = {name: re.findall(r"\S+\s*", fixed) for name, fixed in TEXTS.items()}
            end = "".join(ending(words, text, max(count - _HEAD, 1)))
            return f"{self.words(_HEAD)} {end}"
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
            text = self.words(tokens, name)  # a word has at least one token
            for _ in range(_ATTEMPTS):
                ids = self._tokenize(http, text)
                beginning = tuple(ids[:_HEAD])
                if beginning in self._beginnings:
                    text = f"{self.words(_HEAD)} {text}"
                elif len(ids) == tokens:
                    self._beginnings.add(beginning)
                    return text
                elif len(ids) < tokens:
                    text = f"{self.words(tokens - len(ids))} {text}"
                else:
                    cut = [*ids[:_HEAD], *ids[_HEAD - tokens :]]
                    body = {"model": self.endpoint.served_name, "tokens": cut}
                    answer = http.post("/detokenize", json=body).raise_for_status()
                    answered = answer.json()  # llama-server: "content"
                    text = str(answered["prompt" if "prompt" in answered else "content"])
        raise Sm121Error(f"no text has exactly {tokens} tokens according to /tokenize")

    def _tokenize(self, http: httpx.Client, text: str) -> list[int]:
        """Return the tokens of a text. vLLM and SGLang read ``prompt``, llama-server ``content``.

        llama-server answers a request without ``content`` with an empty list (llama.cpp,
        tools/server/README.md, "POST /tokenize").
        """
        body = {"model": self.endpoint.served_name, "prompt": text, "add_special_tokens": False}
        tokens = http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        if not tokens and text:
            body = {"content": text, "add_special": False}
            tokens = http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        return list(tokens)

    def can_tokenize(self) -> bool:
        """Return whether the server has a working /tokenize."""
        with self.endpoint.http() as http:
            try:
                return len(self._tokenize(http, "one two three")) > 0
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                return False


def ending(texts: Mapping[str, Sequence[Any]], name: str, count: int) -> list[Any]:
    """Return the last tokens or words of a text.

    If the text is too short, the other texts are put in front of it, as often as needed, so that a
    prompt contains only natural text.

    Args:
        texts: For each text, its parts (tokens or words).
        name: The name of the text at the end.
        count: The number of parts.
    """
    others = [part for other, parts in texts.items() if other != name for part in parts]
    missing = max(count - len(texts[name]), 0)
    before = others * (missing // len(others) + 1)
    return [*before[len(before) - missing :], *texts[name]][-count:]
