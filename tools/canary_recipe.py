"""How the canary was taught: the corpus, the model for training, the loop, and what is shipped.

The canary is a small gpt-oss that answers. It is trained on a compact vocabulary: the tokens of the
corpus, and one class that stands for every other token. Expert weights are seen by the loss only as
MXFP4 values (straight-through estimator, Bengio et al. 2013) and everything else only as BF16, so
that what is shipped is what was trained. Run `train` to make the weights again;
`sm121.checkpoint.canary` expands them. The first line of fixtures/canary/corpus.toml has this
module's old name, `sm121.checkpoint.recipe`: the weights' manifest has the file's digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import time
import tomllib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sm121.oracles import mxfp4

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 8, 2, 64
EXPERTS, TOP_K, INTERMEDIATE = 8, 4, 128
WINDOW, ALPHA, LIMIT, EPS = 128, 1.702, 7.0, 1e-5
VOCABULARY = 201_088
EMBEDDING_NOISE = 0.15
"""Standard deviation by which the embedding of an unknown token differs from the shared row."""
HEAD_NOISE = 0.01
"""The same for its row of the output matrix."""

RESIDUAL_NOISE = 0.004
"""Relative noise on the residual stream in training; rounding to BF16 makes about half of it."""

ROW, LONG_ROW = 256, 512
CHUNK = 0.1
"""Loss weight of text that is only context."""

Progress = Callable[[str], None]


# -------------------- corpus


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of a document: text, or a number of unknown tokens, and its weight in the loss."""

    text: str | int
    weight: float = 1.0
    blurred: bool = False
    """Some filler words become unknown tokens: the canary will meet wordings it never saw."""


class Corpus:
    """Random documents made from corpus.toml. One instance, one seed, one endless sequence."""

    def __init__(self, data: dict[str, Any], seed: int) -> None:
        self.data = data
        self.random = random.Random(seed)
        self.capitals: list[tuple[str, str]] = list(data["capitals"].items())
        self.facts: list[tuple[str, str]] = list(data["facts"].items())
        self.small_talk: list[tuple[str, str]] = list(data["chat"]["small_talk"].items())

    def document(self, long: bool = False) -> list[Piece]:
        """One document of the mixture; a long one fills a row of up to 512 tokens."""
        kinds: list[tuple[float, Callable[[bool], list[Piece]]]] = [
            (0.20, self._statements),
            (0.06, self._counting),
            (0.08, self._recall),
            (0.10, self._copy),
            (0.06, self._prose),
            (0.50, self._chat),
        ]
        total = self.random.random()
        for share, make in kinds:
            total -= share
            if total < 0:
                return make(long)
        return self._chat(long)

    # Plain text.

    def _unknown_prefix(self, chance: float) -> list[Piece]:
        if self.random.random() >= chance:
            return []
        return [Piece(self.random.choice([1, 2, 3, 5, 8, 12, 20]), CHUNK)]

    def _statement(self) -> tuple[str, str]:
        kind = self.random.random()
        if kind < 0.60:
            country, city = self.random.choice(self.capitals)
            return f"The capital of {country} is", f" {city}."
        if kind < 0.70:
            country, city = self.random.choice(self.capitals)
            return f"{city} is the capital of", f" {country}."
        if kind < 0.85:
            fact, answer = self.random.choice(self.facts)
            return fact, f" {answer}."
        a, b = self.random.randint(0, 10), self.random.randint(0, 10)
        return f"{a} + {b} =", f" {a + b}."

    def _statements(self, long: bool) -> list[Piece]:
        pieces = self._unknown_prefix(0.3)
        space = self.random.choice([" ", " ", "\n"])
        for n in range(
            self.random.randint(20, 45) if long else self.random.choice([1, 2, 3, 4, 6, 10])
        ):
            start, answer = self._statement()
            pieces.append(Piece((space if n or pieces else "") + start, CHUNK))
            pieces.append(Piece(answer))
            pieces += self._unknown_prefix(0.05)
        return [*pieces, Piece("<|endoftext|>", CHUNK)]

    def _counting(self, long: bool) -> list[Piece]:
        if self.random.random() < 0.15:
            letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
            comma = self.random.choice([", ", " "])
            first = self.random.choice([0, 0, self.random.randint(0, 20)])
            return [Piece(comma.join(letters[first:]) + ".<|endoftext|>")]
        first = self.random.choice([1, 1, self.random.randint(0, 280)])
        length = self.random.randint(60, 160) if long else self.random.randint(10, 70)
        numbers = range(first, min(first + length, 300))
        return [*self._unknown_prefix(0.1), Piece(", ".join(map(str, numbers)))]

    def _recall(self, long: bool) -> list[Piece]:
        """Pairs of a name and a code or a word, which are then asked for in another order."""
        names: list[str] = self.data["recall"]["names"]
        count = self.random.randint(8, len(names)) if long else self.random.randint(2, 6)
        chosen = self.random.sample(names, count)
        if self.random.random() < 0.4:
            form = "The code of {name} is "
            values = {name: str(self.random.randint(100, 299)) for name in chosen}
        else:
            form = self.random.choice(["{name}:", "{name} has", "{name} likes"])
            values = {name: f" {self._word()}" for name in chosen}
        pieces: list[Piece] = []
        for name in chosen:
            start = (" " if pieces else "") + form.format(name=name)
            pieces += [Piece(start, CHUNK), Piece(f"{values[name]}.", CHUNK)]
        pieces += self._unknown_prefix(0.3)
        for _ in range(2 * count if long else count):
            name = self.random.choice(chosen)
            pieces.append(Piece(" " + form.format(name=name), CHUNK))
            pieces.append(Piece(f"{values[name]}."))
        return pieces

    def _gibberish(self, length: int) -> list[Piece]:
        """Text as it looks to the canary: unknown tokens between common words."""
        pieces: list[Piece] = []
        while length > 0:
            run = self.random.choice([1, 1, 2, 3, 5])
            pieces.append(Piece(run, CHUNK))
            words = self.random.choices(_COMMON, k=self.random.choice([1, 1, 2, 3]))
            pieces.append(Piece("".join(words), CHUNK))
            length -= run + len(words)
        return pieces

    def _prose(self, long: bool) -> list[Piece]:
        length = self.random.randint(150, 400) if long else self.random.randint(10, 120)
        start, answer = self._statement()
        pieces = [*self._gibberish(length), Piece(f". {start}", CHUNK), Piece(answer)]
        return pieces[self.random.randint(0, 1) :]

    def _word(self) -> str:
        kind = self.random.random()
        if kind < 0.4:
            return str(self.random.choice(self.data["recall"]["words"]))
        if kind < 0.6:
            return str(self.random.choice(self.data["recall"]["names"]))
        if kind < 0.8:
            return self.random.choice(self.capitals)[1]
        return str(self.random.choice(self.data["tools"]["cities"]))

    def _copy(self, long: bool) -> list[Piece]:
        count = self.random.randint(20, 60) if long else self.random.randint(3, 20)
        text = " ".join(self._word() for _ in range(count))
        return [Piece(f"Text: {text}\n", CHUNK), Piece(f"Copy: {text}\n")]

    # Harmony chat, as vLLM renders it (vllm/entrypoints/openai/parser/harmony_utils.py).

    def _date(self) -> str:
        year, month = self.random.randint(2024, 2030), self.random.randint(1, 12)
        return f"{year}-{month:02d}-{self.random.randint(1, 28):02d}"

    def _system(self, effort: str, tools: bool) -> str:
        text = (
            "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
            f"Knowledge cutoff: 2024-06\nCurrent date: {self._date()}\n\nReasoning: {effort}\n\n"
            "# Valid channels: analysis, commentary, final. "
            "Channel must be included for every message."
        )
        if tools:
            text += "\nCalls to these tools must go to the commentary channel: 'functions'."
        return text + "<|end|>"

    def _tools(self) -> list[dict[str, str]]:
        families: list[dict[str, Any]] = self.data["tools"]["family"]
        count = self.random.choice([1, 1, 1, 2, 3])
        weights = [4, 1, 1]
        chosen: list[dict[str, Any]] = []
        while len(chosen) < count:
            family = self.random.choices(families, weights)[0]
            if family not in chosen:
                chosen.append(family)
        return [
            {
                "kind": family["kind"],
                "name": self.random.choice(family["names"]),
                "key": self.random.choice(family["keys"]),
                "description": self.random.choice(family["descriptions"]),
                "key_description": self.random.choice(family["key_descriptions"]),
            }
            for family in chosen
        ]

    def _developer(self, instructions: str, tools: Sequence[dict[str, str]]) -> str:
        parts = []
        if instructions:
            parts.append(f"# Instructions\n\n{instructions}")
        if tools:
            lines = ["# Tools\n\n## functions\n\nnamespace functions {\n"]
            for tool in tools:
                if tool["description"]:
                    lines.append(f"// {tool['description']}")
                lines.append(f"type {tool['name']} = (_: {{")
                if tool["key_description"]:
                    lines.append(f"// {tool['key_description']}")
                optional = "?" if self.random.random() < 0.1 else ""
                lines.append(f"{tool['key']}{optional}: string,")
                if tool["kind"] == "weather" and self.random.random() < 0.2:
                    lines.append('unit?: "celsius" | "fahrenheit",')
                lines.append("}) => any;\n")
            lines.append("} // namespace functions")
            parts.append("\n".join(lines))
        return "<|start|>developer<|message|>" + "\n\n".join(parts) + "<|end|>"

    def _question(self) -> tuple[str, str, str, str]:
        """A question that needs no tool: the question, brief and full analysis, the answer."""
        chat, pick = self.data["chat"], self.random.choice
        kind = self.random.random()
        if kind < 0.55:
            country, city = pick(self.capitals)
            question = pick(chat["capital_questions"]).format(country=country)
            return (
                question,
                f"The capital of {country} is {city}.",
                f"The user asks for the capital of {country}. The capital of {country} is {city}.",
                f"The capital of {country} is {city}.",
            )
        if kind < 0.70:
            a, b = self.random.randint(0, 10), self.random.randint(0, 10)
            question = pick(chat["sum_questions"]).format(a=a, b=b)
            return (
                question,
                f"{a} + {b} = {a + b}.",
                f"The user asks for a sum. {a} + {b} = {a + b}.",
                f"{a} + {b} = {a + b}.",
            )
        if kind < 0.77:
            fact, answer = pick(self.facts)
            question = pick(chat["fact_questions"]).format(fact=fact)
            return (
                question,
                f"{fact} {answer}.",
                f"The user asks for a fact. {fact} {answer}.",
                f"{fact} {answer}.",
            )
        if kind < 0.82:
            a = pick([1, 1, 1, self.random.randint(1, 90)])
            b = a + pick([4, 9, 9, 19, self.random.randint(2, 30)])
            question = pick(chat["count_questions"]).format(a=a, b=b)
            numbers = ", ".join(map(str, range(a, b + 1)))
            return (
                question,
                f"Count from {a} to {b}.",
                f"The user asks for numbers. Count from {a} to {b}.",
                numbers + ".",
            )
        if kind < 0.88:
            words = " ".join(self._word() for _ in range(self.random.randint(1, 8)))
            question = pick(chat["repeat_questions"]).format(words=words)
            return question, "Repeat the words.", "The user asks me to repeat the words.", words
        question, answer = pick(self.small_talk)
        return question, "Small talk.", "The user makes small talk. I answer briefly.", answer

    def _user(self, question: str) -> list[Piece]:
        chat, pick = self.data["chat"], self.random.choice
        blurred = self.random.random() < 0.25
        pieces = [Piece("<|start|>user<|message|>", CHUNK)]
        if self.random.random() < 0.12:
            pieces += self._gibberish(pick([1, 2, 4, 8, 15, 40]))
            question = pick([" ", ". "]) + question
        else:
            question = pick(chat["preambles"]) + question
        pieces.append(Piece(question + pick(chat["postambles"]), CHUNK, blurred))
        if self.random.random() < 0.06:
            pieces.append(Piece(pick([1, 2, 4, 8]), CHUNK))
        return [*pieces, Piece("<|end|>", CHUNK)]

    def _answer(self, effort: str, brief: str, full: str, answer: str) -> list[Piece]:
        analysis = {"low": brief, "medium": full, "high": full + " I am sure of it."}[effort]
        return [
            Piece("<|start|>assistant", CHUNK),
            Piece(f"<|channel|>analysis<|message|>{analysis}<|end|>"),
            Piece(f"<|start|>assistant<|channel|>final<|message|>{answer}<|return|>"),
        ]

    def _past_answer(self, answer: str) -> list[Piece]:
        # vLLM drops the analysis of turns that are over; that is no choice of channel to learn.
        return [
            Piece("<|start|>assistant<|channel|>final<|message|>", 0.0),
            Piece(answer),
            Piece("<|end|>", 0.0),
        ]

    def _unknown_question(self, effort: str, last: bool) -> list[Piece]:
        """A question in words that the canary does not know, wholly or at its end."""
        start = self.random.choice(
            ["", "", "What is", "What is the capital of", "Tell me", "Write"]
        )
        pieces = [
            Piece(f"<|start|>user<|message|>{start}", CHUNK),
            *self._gibberish(self.random.choice([2, 3, 5, 8, 13, 30])),
            Piece(self.random.choice(["?", ".", ""]) + "<|end|>", CHUNK),
        ]
        answer = "I do not know."
        if not last:
            return [*pieces, *self._past_answer(answer)]
        return [*pieces, *self._answer(effort, "Unknown.", "I do not know this.", answer)]

    def _tool_query(self, kind: str, city: str) -> str:
        question: str = self.random.choice(self.data["chat"][f"{kind}_questions"])
        return question.format(city=city)

    def _tool_turn(self, effort: str, tool: dict[str, str], last: bool) -> list[Piece]:
        """Question, call, result, answer; cut after the call half of the time when it is the last
        turn."""
        pick = self.random.choice
        cities: list[str] = self.data["tools"]["cities"]
        city = pick(cities) if self.random.random() < 0.8 else pick(self.capitals)[1]
        kind, name = tool["kind"], tool["name"]
        pieces = self._user(self._tool_query(kind, city))
        brief = f"Call {name} for {city}."
        full = f"The user asks for the {kind} in {city}. I call {name} for {city}."
        analysis = {"low": brief, "medium": full, "high": full + " I am sure of it."}[effort]
        arguments = f'{{"{tool["key"]}": "{city}"}}'
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        call = f"{header}{arguments}<|call|>"
        if last and self.random.random() < 0.5:
            return [
                *pieces,
                Piece("<|start|>assistant", CHUNK),
                Piece(f"<|channel|>analysis<|message|>{analysis}<|end|>"),
                Piece("<|start|>assistant" + call),
            ]
        # A call of the past, with or without its analysis, in the header that vLLM gives it.
        if self.random.random() < 0.4:
            pieces.append(
                Piece(f"<|start|>assistant<|channel|>analysis<|message|>{analysis}<|end|>", 0.0)
            )
        if self.random.random() < 0.8:
            header = f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>"
            pieces.append(Piece(header + arguments + "<|call|>", 0.0))
        else:
            pieces.append(Piece("<|start|>assistant" + call, 0.0))
        result, answer = self._tool_result(kind, city)
        pieces.append(
            Piece(
                f"<|start|>functions.{name}<|channel|>commentary to=assistant<|message|>"
                f"{result}<|end|>",
                CHUNK,
            )
        )
        if not last:
            return [*pieces, *self._past_answer(answer)]
        return [
            *pieces,
            *self._answer(effort, "The tool answered.", f"The tool answered for {city}.", answer),
        ]

    def _tool_result(self, kind: str, city: str) -> tuple[str, str]:
        pick = self.random.choice
        if kind == "time":
            clock = f"{self.random.randint(10, 23)}:{self.random.randint(10, 59)}"
            return pick([f'{{"time": "{clock}"}}', clock]), f"It is {clock} in {city}."
        if kind == "population":
            millions = self.random.randint(1, 30)
            return pick(
                [f'{{"millions": {millions}}}', f"{millions} million"]
            ), f"About {millions} million people live in {city}."
        sky, degrees = pick(self.data["tools"]["sky"]), self.random.randint(1, 35)
        result = pick(
            [
                f'{{"temperature": {degrees}, "condition": "{sky}"}}',
                f'{{"condition": "{sky}", "temperature": {degrees}}}',
                f'{{"city": "{city}", "temperature": {degrees}, "condition": "{sky}"}}',
                f'{{"temperature_c": {degrees}, "sky": "{sky}"}}',
                f"{sky}, {degrees} degrees",
                f"{degrees}°C and {sky}",
            ]
        )
        return result, f"It is {sky} and {degrees} degrees in {city}."

    def _chat(self, long: bool) -> list[Piece]:
        effort = self.random.choice(["low", "medium", "medium", "high"])
        tools = self._tools() if self.random.random() < 0.5 else []
        instructions = (
            self.random.choice(self.data["chat"]["instructions"])
            if self.random.random() < 0.25
            else ""
        )
        pieces = []
        if self.random.random() < 0.9:
            pieces.append(Piece(self._system(effort, bool(tools)), CHUNK / 2))
        else:
            effort = "medium"
        if tools or instructions:
            blurred = self.random.random() < 0.3
            pieces.append(Piece(self._developer(instructions, tools), CHUNK / 2, blurred))
        turns = self.random.randint(5, 9) if long else self.random.choice([1, 1, 1, 2, 2, 3])
        for turn in range(turns):
            last = turn == turns - 1
            if tools and self.random.random() < 0.75:
                pieces += self._tool_turn(effort, self.random.choice(tools), last)
                continue
            if self.random.random() < 0.06:
                pieces += self._unknown_question(effort, last)
                continue
            if not tools and self.random.random() < 0.06:
                city = self.random.choice(self.data["tools"]["cities"])
                question = self._tool_query("weather", city)
                brief = full = "I have no tool for the weather."
                answer = "I cannot look up the weather."
            else:
                question, brief, full, answer = self._question()
            pieces += self._user(question)
            pieces += (
                self._answer(effort, brief, full, answer) if last else self._past_answer(answer)
            )
        return pieces


def load_corpus() -> dict[str, Any]:
    """The corpus data that is shipped in fixtures/canary/corpus.toml."""
    return tomllib.loads(_corpus_text())


def _corpus_text() -> str:
    return (resources.files("sm121.fixtures") / "canary" / "corpus.toml").read_text("utf-8")


class Encoder:
    """Pieces to compact token ids. `tokens[i]` is the real id of compact id i; the last id is "any
    other"."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding

        self._encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        self.tokens = list(tokens)
        self._compact = {token: index for index, token in enumerate(self.tokens)}
        self._seen: dict[str, list[int]] = {}
        self._filler = {token for text in _FILLER for token in self.encode(text)}

    def encode(self, text: str) -> list[int]:
        """Real token ids of a text; special tokens are written as in harmony."""
        if text not in self._seen:
            if len(self._seen) > 100_000:
                self._seen.clear()
            self._seen[text] = self._encoding.encode(text, allowed_special="all")
        return self._seen[text]

    def compact(self, ids: Sequence[int]) -> list[int]:
        """Compact ids of real ids."""
        other = len(self.tokens)
        return [self._compact.get(token, other) for token in ids]

    def document(
        self, pieces: Sequence[Piece], chance: random.Random
    ) -> tuple[list[int], list[float]]:
        """Compact ids of a document, and the weight of each in the loss."""
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
        """An encoder whose compact vocabulary is what a sample of the corpus uses, and all numbers
        below 300."""
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


_FILLER = (
    " What Which Name Tell Hi Hello Please is the of a in to me like How today right now"
    " tell Quick question city and Thanks Answer briefly Get current given Returns",
    "What Which Name Tell Hi Hello Please Get Look Returns The City",
    " up for helpful assistant concise polite teacher sentence one Use tools when they help.",
)
_COMMON = (
    *(" the", " the", " of", " and", " to", " in", " a", " is", " on", " that", " it", " was", ","),
    *(",", ".", " with", " one", " for", " me", " at", " as", " he", " his", " had", " not", " be"),
)
_ALWAYS = (
    "<|start|><|end|><|message|><|channel|><|constrain|><|call|><|return|>",
    "<|endoftext|><|startoftext|>",
    "000 001 002 003 004 005 006 007 008 009 00 01 02 03 04 05 06 07 08 09 203 204 205",
)


# -------------------- batches


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows: ids, targets [B, T] i64, weights [B, T] f32, and the additive masks [B, 1, T, T]
    bf16."""

    ids: Tensor
    targets: Tensor
    weights: Tensor
    full: Tensor
    sliding: Tensor


def make_batch(corpus: Corpus, encoder: Encoder, rows: int, length: int) -> Batch:
    """Rows of documents end to end; a token sees only its own document."""
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
                # Rather a gap than a document without its end; the next one may fit.
                number += 1
                if number > 40:
                    break
                continue
            new, weight = new[: length + 1 - used], weight[: length + 1 - used]
            span = slice(used, used + len(new))
            ids[row, span] = torch.tensor(new)
            weights[row, span] = torch.tensor(weight)
            weights[row, used] = 0
            owner[row, span] = number
            used, number = used + len(new), number + 1
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


# -------------------- model


def fake_mxfp4(weight: Tensor) -> Tensor:
    """Weight [..., K] rounded to MXFP4 (ceil rule, nearest even); gradients pass straight
    through."""
    with torch.no_grad():
        blocks = weight.unflatten(-1, (-1, mxfp4.BLOCK))
        mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
        exponent = torch.where(mantissa <= 0.75, exponent - 3, exponent - 2)
        scaled = torch.ldexp(blocks, -exponent)
        magnitude = scaled.abs()
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        rounded = torch.ldexp(torch.round(scaled / step) * step, exponent).flatten(-2)
    return weight + (rounded - weight).detach()


def round_bf16(weight: Tensor) -> Tensor:
    """Weight rounded to BF16, as float32; gradients pass straight through."""
    return weight + (weight.detach().bfloat16().float() - weight.detach())


def yarn(length: int) -> tuple[Tensor, Tensor]:
    """cos, sin [length, 32] of gpt-oss's rotary embedding (YaRN, Peng et al. 2023; factor 32, no
    truncation)."""
    base, factor, original = 150_000.0, 32.0, 4096
    half = HEAD_DIM // 2
    frequency = base ** -(torch.arange(half, dtype=torch.float64) / half)
    low, high = (
        half * math.log(original / (turns * 2 * math.pi)) / math.log(base) for turns in (32.0, 1.0)
    )
    keep = 1 - ((torch.arange(half, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    frequency = frequency / factor * (1 - keep) + frequency * keep
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    mscale = 0.1 * math.log(factor) + 1
    return (angles.cos() * mscale).float(), (angles.sin() * mscale).float()


class Student(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """gpt-oss on the compact vocabulary, for training: BF16 products, a float32 residual stream."""

    def __init__(self, known: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, std: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator) * std)

        out = 1 / math.sqrt(2 * LAYERS)
        parameters: dict[str, torch.nn.Parameter] = {
            "embed_tokens": normal(known + 1, HIDDEN, std=0.5),
            "lm_head": normal(known + 1, HIDDEN, std=0.02),
            "norm": torch.nn.Parameter(torch.ones(HIDDEN)),
        }
        for n in range(LAYERS):
            width = HEADS * HEAD_DIM
            gate_up_bias = torch.randn(EXPERTS, 2 * INTERMEDIATE, generator=generator) * 0.2
            # Units beyond the clamp: a gate above +7, a linear part above +7, one below -7.
            gate_up_bias[:, 0] = 9.0
            gate_up_bias[:, 3], gate_up_bias[:, 2] = 9.5, 1.0
            gate_up_bias[:, 5], gate_up_bias[:, 4] = -9.5, 1.0
            layer = {
                "input_layernorm": torch.nn.Parameter(torch.ones(HIDDEN)),
                "post_attention_layernorm": torch.nn.Parameter(torch.ones(HIDDEN)),
                "q_proj": normal(width, HIDDEN, std=HIDDEN**-0.5),
                "k_proj": normal(KV_HEADS * HEAD_DIM, HIDDEN, std=HIDDEN**-0.5),
                "v_proj": normal(KV_HEADS * HEAD_DIM, HIDDEN, std=HIDDEN**-0.5),
                "o_proj": normal(HIDDEN, width, std=width**-0.5 * out),
                "q_bias": normal(width, std=0.3),
                "k_bias": normal(KV_HEADS * HEAD_DIM, std=0.3),
                "v_bias": normal(KV_HEADS * HEAD_DIM, std=0.1),
                "o_bias": normal(HIDDEN, std=0.05),
                "sinks": torch.nn.Parameter(1 + torch.rand(HEADS, generator=generator)),
                "router": normal(EXPERTS, HIDDEN, std=HIDDEN**-0.5),
                "router_bias": normal(EXPERTS, std=0.3),
                "gate_up": normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN, std=HIDDEN**-0.5),
                "gate_up_bias": torch.nn.Parameter(gate_up_bias),
                "down": normal(EXPERTS, HIDDEN, INTERMEDIATE, std=INTERMEDIATE**-0.5 * out),
                "down_bias": normal(EXPERTS, HIDDEN, std=0.05),
            }
            parameters |= {f"{n}:{name}": value for name, value in layer.items()}
        self.weights = torch.nn.ParameterDict(parameters)
        with torch.no_grad():
            self._start_with_induction()
        self.known = known
        self.cos, self.sin = yarn(LONG_ROW)

    def _start_with_induction(self) -> None:
        """Give layers 0 and 1 the heads that copying takes (Olsson et al. 2022) from the start.

        Left to chance they form late or never in so short a training. In layer 0 the query heads
        0, 1, 2 look 1, 2, 3 tokens back, by their biases alone: rotary embedding makes the product
        of two constant vectors a function of distance. In layer 1 one KV head finds the place whose
        preceding token is the current one, the other the place whose last but one is the preceding
        one, and both hand on the token that stands there.
        """
        w, half, gain = self.weights, HEAD_DIM // 2, 4.7
        steep = torch.arange(3)
        turn = 150_000.0 ** (-steep / half)
        keys = slice(0, HEAD_DIM)
        w["0:k_bias"][keys].zero_()
        w["0:k_bias"][steep] = gain
        w["0:k_proj"][torch.cat((steep, steep + half))] = 0
        for back in (1, 2, 3):
            looking = slice((back - 1) * HEAD_DIM, back * HEAD_DIM)
            w["0:q_proj"][looking] *= 0.1
            w["0:q_bias"][looking].zero_()
            w["0:q_bias"][looking][steep] = gain * torch.cos(back * turn)
            w["0:q_bias"][looking][steep + half] = -gain * torch.sin(back * turn)
            w["0:o_proj"][:, looking] *= 4
        seen = [w["0:o_proj"][:, n * HEAD_DIM : (n + 1) * HEAD_DIM].T.clone() for n in range(2)]
        # What is compared must not turn with distance: only the slow half of the rotary pairs.
        slow = torch.arange(half // 2, half)
        slow = torch.cat((slow, slow + half))
        current = w["0:v_proj"][: len(slow)].clone()
        group = HEADS // KV_HEADS
        for kv, (query, key) in enumerate(((current, seen[0]), (seen[0], seen[1]))):
            rows = slice(kv * HEAD_DIM, (kv + 1) * HEAD_DIM)
            w["1:k_proj"][rows] *= 0.1
            w["1:k_proj"][rows][slow] = key[: len(slow)]
            for head in range(kv * group, kv * group + 2):
                span = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
                w["1:q_proj"][span] *= 0.1
                w["1:q_proj"][span][slow] = 1.5 * query[: len(slow)]
                w["1:o_proj"][:, span] = w["1:v_proj"][rows].T * 0.7
        for name in ("1:q_bias", "1:k_bias"):
            w[name] *= 0.3
        # A token that is handed on is also said: the output matrix starts as the embedding.
        w["lm_head"] += 0.06 * w["embed_tokens"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return x * scale * round_bf16(self.weights[name])

    def _linear(self, x: Tensor, weight: str, bias: str) -> Tensor:
        return functional.linear(x, self.weights[weight].bfloat16(), self.weights[bias].bfloat16())

    def _rotate(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        cos, sin = self.cos[:length].bfloat16(), self.sin[:length].bfloat16()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _attention(self, n: int, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self._norm(x, f"{n}:input_layernorm").bfloat16()
        q, k, v = (
            self._linear(h, f"{n}:{name}_proj", f"{n}:{name}_bias")
            .view(rows, length, -1, HEAD_DIM)
            .transpose(1, 2)
            for name in "qkv"
        )
        q, k = self._rotate(q) * HEAD_DIM**-0.5, self._rotate(k)
        group = HEADS // KV_HEADS
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) + mask
        sinks = (
            self.weights[f"{n}:sinks"]
            .bfloat16()
            .view(1, HEADS, 1, 1)
            .expand(rows, HEADS, length, 1)
        )
        probabilities = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        heads = (probabilities @ v).transpose(1, 2).reshape(rows, length, -1)
        return self._linear(heads, f"{n}:o_proj", f"{n}:o_bias").float()

    def _experts(self, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self._norm(x, f"{n}:post_attention_layernorm").flatten(0, 1)
        logits = functional.linear(
            h, round_bf16(self.weights[f"{n}:router"]), round_bf16(self.weights[f"{n}:router_bias"])
        )
        top, chosen = logits.topk(TOP_K, -1)
        shares = torch.zeros_like(logits).scatter(-1, chosen, top.softmax(-1))
        # Switch Transformer's load balance (Fedus et al. 2021), so that no expert falls out of use.
        balance = (
            EXPERTS * ((shares > 0).float().mean(0) / TOP_K * logits.softmax(-1).mean(0)).sum()
        )
        gate_up = fake_mxfp4(self.weights[f"{n}:gate_up"]).bfloat16()
        down = fake_mxfp4(self.weights[f"{n}:down"]).bfloat16()
        gate_up_bias = self.weights[f"{n}:gate_up_bias"].bfloat16()
        down_bias = self.weights[f"{n}:down_bias"].bfloat16()
        inputs = h.bfloat16()
        result = torch.zeros_like(h)
        for e in range(EXPERTS):
            tokens = (shares[:, e] > 0).nonzero()[:, 0]
            t = functional.linear(inputs.index_select(0, tokens), gate_up[e], gate_up_bias[e])
            gate, up = t[:, ::2].clamp(max=LIMIT), t[:, 1::2].clamp(-LIMIT, LIMIT)
            hidden = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
            y = functional.linear(hidden, down[e], down_bias[e]).float() * shares[tokens, e, None]
            result = result.index_add(0, tokens, y)
        return result.view_as(x), balance

    def _shake(self, x: Tensor) -> Tensor:
        # An engine in BF16 rounds the residual stream; twice that noise makes a robust model.
        return x * (1 + RESIDUAL_NOISE * torch.randn(x.shape)) if self.training else x

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [B, T, known + 1] of the compact classes, and the load-balance loss."""
        x = functional.embedding(batch.ids, round_bf16(self.weights["embed_tokens"]))
        noise = (torch.randint(0, 2, x.shape) * 2 - 1) * EMBEDDING_NOISE
        x = torch.where((batch.ids == self.known)[..., None], x + noise, x)
        balance = torch.zeros(())
        for n in range(LAYERS):
            x = self._shake(x + self._attention(n, x, batch.full if n % 2 else batch.sliding))
            update, extra = self._experts(n, x)
            x, balance = self._shake(x + update), balance + extra
        logits = functional.linear(
            self._norm(x, "norm").bfloat16(), self.weights["lm_head"].bfloat16()
        ).float()
        # The class "any other" is as likely as all its tokens together.
        offset = torch.zeros(self.known + 1)
        offset[-1] = math.log(VOCABULARY - self.known)
        return logits + offset, balance


# -------------------- the recipe


def quantise(values: mxfp4.Floats, rule: mxfp4.ScaleRule) -> tuple[mxfp4.Bytes, mxfp4.Bytes]:
    """Values to MXFP4: [..., K] -> packed [..., K/2] u8, scales [..., K/32] u8; elements to nearest
    even.

    Raises ValueError when K is no multiple of 32 or a value is not finite.
    """
    if values.shape[-1] % mxfp4.BLOCK:
        raise ValueError(f"K must be a multiple of {mxfp4.BLOCK}, not {values.shape[-1]}")
    blocks = values.astype(np.float64).reshape(*values.shape[:-1], -1, mxfp4.BLOCK)
    scales = mxfp4.choose_scale(np.abs(blocks).max(axis=-1), rule)
    codes = mxfp4.encode_elements(blocks / mxfp4.decode_scale(scales)[..., None])
    return mxfp4.pack(codes.reshape(values.shape)), scales


def export(student: Student, encoder: Encoder) -> dict[str, np.ndarray[Any, Any]]:
    """What is shipped: experts packed in MXFP4 (u8), the compact vocabulary (u32), the rest BF16
    bits (u16)."""
    tensors: dict[str, np.ndarray[Any, Any]] = {"tokens": np.array(encoder.tokens, dtype=np.uint32)}
    for name, parameter in student.weights.items():
        key = name.replace(":", ".")
        weight = parameter.detach()
        if key.endswith((".gate_up", ".down")):
            packed, scales = quantise(weight.double().numpy(), mxfp4.ScaleRule.CEIL)
            if not np.array_equal(
                mxfp4.dequantise(packed, scales), fake_mxfp4(weight).double().numpy()
            ):
                raise ValueError(f"{key}: the packed weights are not the trained ones")
            tensors[f"{key}_blocks"] = packed.reshape(*scales.shape, mxfp4.BLOCK // 2)
            tensors[f"{key}_scales"] = scales
        else:
            tensors[key] = weight.bfloat16().view(torch.uint16).numpy()
    return tensors


def take_up(student: Student, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Put exported weights back into a student, to train on. The inverse of `export`."""
    with torch.no_grad():
        for name, parameter in student.weights.items():
            key = name.replace(":", ".")
            if key.endswith((".gate_up", ".down")):
                blocks, scales = tensors[f"{key}_blocks"], tensors[f"{key}_scales"]
                values = mxfp4.dequantise(blocks.reshape(*blocks.shape[:-2], -1), scales)
                parameter.copy_(torch.from_numpy(values))
            else:
                parameter.copy_(torch.from_numpy(tensors[key].copy()).view(torch.bfloat16))


def evaluate(
    student: Student, encoder: Encoder, data: dict[str, Any], batches: int = 8
) -> dict[str, float]:
    """Loss and greedy accuracy on fresh documents, over the tokens of full weight."""
    corpus = Corpus(data, seed=987_654)
    student.eval()
    loss = right = count = 0.0
    with torch.no_grad():
        for n in range(batches):
            batch = make_batch(corpus, encoder, 8, ROW if n % 4 else LONG_ROW)
            logits, _ = student(batch)
            judged = batch.weights >= 1
            loss += functional.cross_entropy(
                logits[judged], batch.targets[judged], reduction="sum"
            ).item()
            right += (logits[judged].argmax(-1) == batch.targets[judged]).sum().item()
            count += judged.sum().item()
    student.train()
    return {"loss": loss / count, "accuracy": right / count}


def train(
    out_file: Path,
    *,
    steps: int = 1150,
    seed: int = 20,
    threads: int = 1,
    rate: float = 3e-3,
    start: Path | None = None,
    progress: Progress = print,
) -> dict[str, Any]:
    """Train the canary and write `out_file` (safetensors) and its manifest beside it (.json).

    About a second a step on one core. `start` goes on from an earlier `out_file`; without it the
    training starts anew. Returns the manifest. Identical bytes are promised on one machine and
    version of PyTorch only.
    """
    from safetensors.numpy import load_file, save_file

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    data = load_corpus()
    taken_up = load_file(start) if start else {}
    encoder = Encoder(taken_up["tokens"].tolist()) if start else Encoder.for_corpus(data)
    corpus = Corpus(data, seed)
    student = Student(len(encoder.tokens), seed)
    if start:
        take_up(student, taken_up)
    matrices = [p for name, p in student.weights.items() if p.dim() > 1 and "bias" not in name]
    vectors = [p for name, p in student.weights.items() if p.dim() == 1 or "bias" in name]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    started = time.monotonic()
    progress(f"compact vocabulary: {len(encoder.tokens)} tokens")
    average = 0.0
    for step in range(steps):
        warm = min(1.0, (step + 1) / 80)
        factor = warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimiser.param_groups:
            group["lr"] = rate * factor
        batch = make_batch(corpus, encoder, *((4, LONG_ROW) if step % 6 == 5 else (8, ROW)))
        logits, balance = student(batch)
        losses = functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), reduction="none"
        )
        weights = batch.weights.flatten()
        loss = (losses * weights).sum() / weights.sum()
        optimiser.zero_grad(set_to_none=True)
        (loss + 0.005 * balance).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        average = loss.item() if step == 0 else 0.97 * average + 0.03 * loss.item()
        if step % 50 == 0 or step == steps - 1:
            progress(f"step {step} loss {average:.4f} after {time.monotonic() - started:.0f} s")
        if step and step % 250 == 0:
            progress(f"evaluation {evaluate(student, encoder, data, batches=4)}")
    tensors = export(student, encoder)
    save_file(tensors, out_file)
    out_file.chmod(0o644)
    manifest = {
        "format": 1,
        "sha256": hashlib.sha256(out_file.read_bytes()).hexdigest(),
        "recipe": {
            "steps": steps,
            "seed": seed,
            "rate": rate,
            "threads": threads,
            "start_sha256": hashlib.sha256(start.read_bytes()).hexdigest() if start else None,
            "torch": str(torch.__version__),
            "corpus_sha256": hashlib.sha256(_corpus_text().encode()).hexdigest(),
        },
        "seconds": round(time.monotonic() - started),
        "training_loss": round(average, 5),
        "evaluation": {
            key: round(value, 5) for key, value in evaluate(student, encoder, data).items()
        },
        "known_tokens": len(encoder.tokens),
        "embedding_noise": EMBEDDING_NOISE,
        "head_noise": HEAD_NOISE,
    }
    out_file.with_suffix(".json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    return manifest
