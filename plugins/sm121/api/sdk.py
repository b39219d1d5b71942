"""The server as its users meet it: asked through the ``openai`` package."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sm121.answers import accuracy, prompts
from sm121.core import level_settings, verdict
from sm121.core.profile import Profile
from sm121.core.unmet import Fact, require, require_each, require_none

if TYPE_CHECKING:
    import openai

PROMPT = "The capital of France is"
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Sdk:
    """Asks one server, greedily unless the options say otherwise."""

    client: "openai.OpenAI"
    model: str

    def complete(self, prompt: str = PROMPT, *, ids: bool = True, **options: Any) -> Any:
        """A completion, by default with the token ids that the server generated."""
        extra = {"return_token_ids": ids, **options.pop("extra_body", {})}
        options = {"temperature": 0.0, "max_tokens": 16, "extra_body": extra, **options}
        return self.client.completions.create(model=self.model, prompt=prompt, **options)

    def exactly(self, tokens: int, **options: Any) -> Any:
        """A completion of so many tokens, which does not end before."""
        extra = {"ignore_eos": True, "min_tokens": tokens}
        return self.complete(max_tokens=tokens, extra_body=extra, **options)

    def chat(self, question: str, max_tokens: int, **options: Any) -> Any:
        """The answer to one question."""
        return self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            **{"temperature": 0.0, **options},
        )

    def knows(self, correctness: level_settings.Correctness) -> None:
        """Completions begin as the profile's known answers do."""
        wrong = []
        for fact in correctness.known_answers:
            text = self.complete(fact.prompt, ids=False, max_tokens=8).choices[0].text
            if not text.startswith(fact.begins):
                wrong.append(Fact(f"{fact.begins!r}", f"{text!r}", f"{fact.prompt!r}"))
        require_none(wrong)

    def finds_text_and_usage(self, correctness: level_settings.Correctness) -> None:
        """A chat and a completion have text and usage where the package looks for them."""
        chat = self.chat(correctness.chats[0].question, correctness.max_answer_tokens)
        complete = chat.choices[0].message.content and chat.usage.total_tokens > 0
        require(complete, "content and usage", chat)
        text = self.client.completions.create(
            model=self.model, prompt=PROMPT, max_tokens=4, temperature=0.0
        )
        complete = text.choices[0].text and text.usage and text.usage.completion_tokens <= 4
        require(complete, "text", text)

    def answer_lengths_fit(self, profile: Profile, remark: Callable[[str], object]) -> None:
        """The answers to fixtures/answers/questions.toml are whole, and fit the band."""
        if (band := profile.correctness.mean_answer_tokens) is None:
            raise verdict.NotRun(f"profile {profile.name} has no correctness.mean_answer_tokens")
        lengths = []

        def ends(question: str) -> None:
            answer = self.chat(question, profile.correctness.max_answer_tokens)
            reason = answer.choices[0].finish_reason
            require(reason == "stop", "finish_reason stop", reason, f"{question!r}")
            require(answer.usage is not None, "usage", "none", f"{question!r}")
            lengths.append(answer.usage.completion_tokens)

        require_each(ends, prompts.questions().questions)
        mean = statistics.fmean(lengths)
        remark(f"answers have {mean:.1f} tokens on average")
        expected = f"a mean of {band.low:g} to {band.high:g} tokens"
        require(band.low <= mean <= band.high, expected, f"{mean:.1f} ({lengths})")

    def answer_to(self, question: accuracy.Question, limit: int) -> tuple[str, int | None]:
        """The answer to a question of ``--questions``, and how many tokens it has."""
        if question.kind == "begins":
            text = self.complete(question.prompt, ids=False, max_tokens=16)
            return text.choices[0].text, text.usage and text.usage.completion_tokens
        chat = self.chat(question.prompt, limit)
        return chat.choices[0].message.content or "", chat.usage and chat.usage.completion_tokens


def first_that(answers: Iterable[_Answer], holds: Callable[[_Answer], bool]) -> _Answer:
    """The first answer for which it holds, else the last: each is asked for when it is needed."""
    for answer in answers:
        if holds(answer):
            break
    return answer
