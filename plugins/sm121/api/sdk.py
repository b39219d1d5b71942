"""A client that sends requests through the ``openai`` package, as users do."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sm121.answers import prompts
from sm121.answers.exam import ExamCompletion
from sm121.core import level_settings, verdict
from sm121.core.profile import Profile
from sm121.core.unmet import Fact, require, require_each, require_none

if TYPE_CHECKING:
    import openai

PROMPT = "The capital of France is"
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Sdk:
    """A client of one server. Sampling is greedy, unless the options contain a temperature."""

    client: "openai.OpenAI"
    #: The served name.
    model: str

    def complete(self, prompt: str = PROMPT, *, ids: bool = True, **options: Any) -> Any:
        """Send a completion.

        Args:
            prompt: The text.
            ids: Whether to request the token ids of prompt and answer.
            **options: Further arguments of ``completions.create``.

        Returns:
            The answer, as the package constructs it.
        """
        extra = {"return_token_ids": ids, **options.pop("extra_body", {})}
        options = {"temperature": 0.0, "max_tokens": 16, "extra_body": extra, **options}
        return self.client.completions.create(model=self.model, prompt=prompt, **options)

    def exactly(self, tokens: int, **options: Any) -> Any:
        """Send a completion that cannot end before its limit.

        Args:
            tokens: The number of tokens.
            **options: Further arguments of ``completions.create``.

        Returns:
            The answer.
        """
        extra = {"ignore_eos": True, "min_tokens": tokens}
        return self.complete(max_tokens=tokens, extra_body=extra, **options)

    def chat(self, question: str, max_tokens: int, **options: Any) -> Any:
        """Send a chat with one user message.

        Args:
            question: The text of the message.
            max_tokens: Maximum tokens of the answer.
            **options: Further arguments of ``chat.completions.create``.

        Returns:
            The answer.
        """
        return self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            **{"temperature": 0.0, **options},
        )

    def knows(self, completions: Iterable[ExamCompletion]) -> None:
        """Require that completions begin as the exam expects.

        Args:
            completions: Prompts, and the beginnings of their answers.

        Raises:
            Unmet: A completion begins differently.
        """
        facts = []
        for known in completions:
            text = self.complete(known.prompt, ids=False, max_tokens=8).choices[0].text
            if not text.startswith(known.begins):
                facts.append(Fact(f"{known.begins!r}", f"{text!r}", f"{known.prompt!r}"))
        require_none(facts)

    def finds_text_and_usage(self, correctness: level_settings.Correctness) -> None:
        """Require that the package's attributes have the text and usage of a chat and a completion.

        Args:
            correctness: The question of its first chat is sent, unless the model cannot chat.

        Raises:
            Unmet: A text or a usage is missing.
        """
        if "chats" not in correctness.cannot:
            chat = self.chat(correctness.chats[0].question, correctness.max_answer_tokens)
            complete = chat.choices[0].message.content and chat.usage.total_tokens > 0
            require(complete, "content and usage", chat)
        text = self.client.completions.create(
            model=self.model, prompt=PROMPT, max_tokens=4, temperature=0.0
        )
        complete = text.choices[0].text and text.usage and text.usage.completion_tokens <= 4
        require(complete, "text", text)

    def answer_lengths_fit(self, profile: Profile, remark: Callable[[str], object]) -> None:
        """Require a plausible mean length of the answers to ``fixtures/answers/questions.toml``.

        Args:
            profile: ``correctness.mean_answer_tokens`` has the range of the mean.
            remark: Called with a text with the mean.

        Raises:
            Unmet: An answer does not end by itself or has no usage, or the mean is out of range.
            NotRun: The profile has no range.
        """
        band = profile.correctness.mean_answer_tokens
        if band is None:
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


def first_that(answers: Iterable[_Answer], holds: Callable[[_Answer], bool]) -> _Answer:
    """Return the first answer for which a condition is true, or else the last answer.

    Args:
        answers: The answers. If this is a generator, no more answers are requested than needed.
        holds: The condition.
    """
    for answer in answers:
        if holds(answer):
            break
    return answer
