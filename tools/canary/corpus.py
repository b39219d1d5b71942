"""Generate random documents from corpus.toml, the training corpus."""

from __future__ import annotations

import dataclasses
import random
import tomllib
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

CHUNK = 0.1
"""The loss weight of text that is only context."""

_COMMON = (
    *(" the", " the", " of", " and", " to", " in", " a", " is", " on", " that", " it", " was", ","),
    *(",", ".", " with", " one", " for", " me", " at", " as", " he", " his", " had", " not", " be"),
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a document: a text, or a number of unknown tokens, and its weight in the loss."""

    text: str | int
    weight: float = 1.0
    blurred: bool = False
    """Whether some filler words become unknown tokens, because the canary will meet wordings that
    it has never seen.
    """


class Corpus:
    """Random documents made from corpus.toml. An instance has a seed and generates one endless
    sequence."""

    def __init__(self, data: dict[str, Any], seed: int) -> None:
        self.data = data
        self.random = random.Random(seed)
        self.capitals: list[tuple[str, str]] = list(data["capitals"].items())
        self.facts: list[tuple[str, str]] = list(data["facts"].items())
        self.small_talk: list[tuple[str, str]] = list(data["chat"]["small_talk"].items())

    def document(self, long: bool = False) -> list[Piece]:
        """Return one random document.

        Args:
            long: Whether to return a long document of up to 512 tokens, which fills a row.
        """
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
        a = self.random.randint(0, 10)
        b = self.random.randint(0, 10)
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
        """Return pairs of a name and a code or word, followed by questions about them in another
        order."""
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
        """Return a text of unknown tokens between common words."""
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
        year = self.random.randint(2024, 2030)
        month = self.random.randint(1, 12)
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
        return [self._tool_of(family) for family in chosen]

    def _tool_of(self, family: dict[str, Any]) -> dict[str, Any]:
        return {
            "kind": family["kind"],
            "name": self.random.choice(family["names"]),
            "key": self.random.choice(family["keys"]),
            "description": self.random.choice(family["descriptions"]),
            "key_description": self.random.choice(family["key_descriptions"]),
        }

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
        """Return a chat whose question needs no tool: the question, a short and a long analysis,
        the answer."""
        chat = self.data["chat"]
        pick = self.random.choice
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
            a = self.random.randint(0, 10)
            b = self.random.randint(0, 10)
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
        chat = self.data["chat"]
        pick = self.random.choice
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
        # vLLM drops the analysis of earlier turns, so the canary must not learn from a missing
        # analysis.
        return [
            Piece("<|start|>assistant<|channel|>final<|message|>", 0.0),
            Piece(answer),
            Piece("<|end|>", 0.0),
        ]

    def _unknown_question(self, effort: str, last: bool) -> list[Piece]:
        """Return a chat whose question has words that the canary does not know, everywhere or at
        its end."""
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
        """Return a turn with question, call, result and answer. If it is the last turn, half of
        these turns end after the call."""
        pick = self.random.choice
        cities: list[str] = self.data["tools"]["cities"]
        city = pick(cities) if self.random.random() < 0.8 else pick(self.capitals)[1]
        kind = tool["kind"]
        name = tool["name"]
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
        # A call of an earlier turn, with or without its analysis, in vLLM's header.
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
        sky = pick(self.data["tools"]["sky"])
        degrees = self.random.randint(1, 35)
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
        instructions = ""
        if self.random.random() < 0.25:
            instructions = self.random.choice(self.data["chat"]["instructions"])
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
    """Return the data of fixtures/canary/corpus.toml."""
    return tomllib.loads(corpus_text())


def corpus_text() -> str:
    """Return the text of fixtures/canary/corpus.toml."""
    return (resources.files("sm121.fixtures") / "canary" / "corpus.toml").read_text("utf-8")
