"""Convert documents to compact token ids, and pack them into rows for a training step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tools.canary.corpus import Corpus, Piece

ROW = 256
LONG_ROW = 512
WINDOW = 128

_FILLER = (
    " What Which Name Tell Hi Hello Please is the of a in to me like How today right now"
    " tell Quick question city and Thanks Answer briefly Get current given Returns",
    "What Which Name Tell Hi Hello Please Get Look Returns The City",
    " up for helpful assistant concise polite teacher sentence one Use tools when they help.",
)
_ALWAYS = (
    "<|start|><|end|><|message|><|channel|><|constrain|><|call|><|return|>",
    "<|endoftext|><|startoftext|>",
    "000 001 002 003 004 005 006 007 008 009 00 01 02 03 04 05 06 07 08 09 203 204 205",
)


class Encoder:
    """Convert pieces of text to compact token ids. `tokens[i]` is the real id of compact id i; the
    last compact id stands for all other tokens."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding

        self._encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        self.tokens = list(tokens)
        self._compact = {token: index for index, token in enumerate(self.tokens)}
        self._seen: dict[str, list[int]] = {}
        self._filler = {token for text in _FILLER for token in self.encode(text)}

    def encode(self, text: str) -> list[int]:
        """Return the real token ids of a text.

        Args:
            text: The text. Special tokens are written as in harmony, for example ``<|start|>``.
        """
        if text not in self._seen:
            if len(self._seen) > 100_000:
                self._seen.clear()
            self._seen[text] = self._encoding.encode(text, allowed_special="all")
        return self._seen[text]

    def compact(self, ids: Sequence[int]) -> list[int]:
        """Return the compact ids of real ids.

        Args:
            ids: The real ids. Those outside of the vocabulary get the last compact id.
        """
        other = len(self.tokens)
        return [self._compact.get(token, other) for token in ids]

    def document(
        self, pieces: Sequence[Piece], chance: random.Random
    ) -> tuple[list[int], list[float]]:
        """Return the compact ids of a document, and the weight of each in the loss.

        Args:
            pieces: The document.
            chance: Draws which filler words of blurred pieces become unknown tokens: one in four.
        """
        ids: list[int] = []
        weights: list[float] = []
        for piece in pieces:
            if isinstance(piece.text, int):
                new = [len(self.tokens)] * piece.text
            else:
                text = self.encode(piece.text)
                new = self.compact(text)
                if piece.blurred:
                    for place, token in enumerate(text):
                        if token in self._filler and chance.random() < 0.25:
                            new[place] = len(self.tokens)
            ids += new
            weights += [piece.weight] * len(new)
        return ids, weights

    @classmethod
    def for_corpus(cls, data: dict[str, Any], documents: int = 12_000) -> Encoder:
        """Return an encoder for the tokens of a sample of the corpus, and of all numbers below 300.

        Args:
            data: The data of corpus.toml.
            documents: The number of documents of the sample.
        """
        encoder = cls()
        corpus = Corpus(data, seed=1)
        seen: set[int] = set()
        for n in range(documents):
            for piece in corpus.document(long=n % 8 == 0):
                if isinstance(piece.text, str):
                    seen.update(encoder.encode(piece.text))
        for number in range(300):
            seen.update(encoder.encode(str(number)))
        for text in _ALWAYS:
            seen.update(encoder.encode(text))
        return cls(sorted(seen))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows: ids and targets [B, T] i64, weights [B, T] f32, and the additive attention masks
    [B, 1, T, T] bf16."""

    ids: Tensor
    targets: Tensor
    weights: Tensor
    full: Tensor
    sliding: Tensor


def make_batch(corpus: Corpus, encoder: Encoder, rows: int, length: int) -> Batch:
    """Pack documents one after the other into rows; a token attends only to its own document.

    Args:
        corpus: Generates the documents.
        encoder: Converts them to compact ids.
        rows: The number of rows, B.
        length: The number of tokens of a row, T.
    """
    ids = torch.full((rows, length + 1), len(encoder.tokens))
    weights = torch.zeros(rows, length + 1)
    owner = torch.full((rows, length + 1), -1)
    for row in range(rows):
        used = number = 0
        while used < length - 8:
            new, weight = encoder.document(
                corpus.document(long=length > ROW and used == 0), corpus.random
            )
            if used and len(new) > (length + 1 - used) * 1.5:
                # Leave a gap instead of truncating the document, because the next document may fit.
                number += 1
                if number > 40:
                    break
                continue
            new = new[: length + 1 - used]
            weight = weight[: length + 1 - used]
            span = slice(used, used + len(new))
            ids[row, span] = torch.tensor(new)
            weights[row, span] = torch.tensor(weight)
            weights[row, used] = 0
            owner[row, span] = number
            used = used + len(new)
            number = number + 1
    at = torch.arange(length)
    same = owner[:, None, :-1] == owner[:, :-1, None]
    causal = same & (at[None, :] <= at[:, None])
    near = causal & (at[:, None] - at[None, :] < WINDOW)
    return Batch(
        ids[:, :-1],
        ids[:, 1:],
        weights[:, 1:],
        *(
            torch.zeros(rows, 1, length, length, dtype=torch.bfloat16).masked_fill(
                ~mask[:, None], -1e9
            )
            for mask in (causal, near)
        ),
    )
