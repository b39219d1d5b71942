"""A timed answer may contain a token that is less likely than one that ends a text.

A timed request forbids the tokens that end a text, but engines send the log-probabilities from
before the ban."""

import pytest

from sm121.client.completion_json import Completion, Position, Prompt
from sm121.client.completions import Request
from sm121.client.timed_answer import TimedAnswer
from sm121.core.level_settings import AgreementBound
from sm121.core.unmet import Unmet
from sm121.performance.timed_texts import TimedTexts

BOUND = AgreementBound(max_abs=0.5, mean_abs=0.25, fork=0.5, source="a test")
PROMPT = (7, 8, 9, 6)
#: The id of the token that is likelier than the third token of the answer. As in many vocabularies,
#: ids of special tokens are not above those of plain tokens.
LIKELIER = 1
FIRST = 10


class FakeAsker:
    """Answers with the tokens 10, 11, 12 and so on, and counts the requests of single tokens."""

    def __init__(self, *, is_end: bool, end: int = LIKELIER) -> None:
        self.is_end = is_end
        self.end = end
        self.single = 0

    def ask(self, request: Request) -> Completion:
        prompt = request.prompt
        begins = len(prompt) - len(PROMPT)
        if isinstance(prompt, str):
            begins = prompt.count("t")
        forbids = "ignore_eos" in request.fields
        self.single += not forbids
        ids = tuple(FIRST + begins + n for n in range(request.tokens))
        finish = "length"
        if not forbids and begins == 2:
            ids = (self.end,)
            finish = "stop" if self.is_end else "length"
        positions = tuple(position(token, prompt) for token in ids)
        return Completion(self.text_of(ids), finish, ids, None, positions, None, None, None)

    def ids(self, answer: Completion) -> tuple[int, ...]:
        return answer.ids or ()

    def positions(self, answer: Completion) -> tuple[Position, ...]:
        return answer.positions or ()

    def text_of(self, ids: tuple[int, ...]) -> str:
        return "t" * len(ids)


def position(token: int, prompt: Prompt) -> Position:
    """Return the position of a token; its log-probability depends on the beginning of the text."""
    own = -2.0
    if not isinstance(prompt, str):
        own -= sum(prompt[: len(PROMPT)]) / 1e6
    top = {f"token_id:{token}": own}
    if token == FIRST + 2:
        top[f"token_id:{LIKELIER}"] = -0.1
    return Position(f"token_id:{token}", own, top)


def judge(asker: FakeAsker, prompt: str | list[int]) -> None:
    answer = TimedAnswer(0, asked_tokens=4, content="tttt")
    TimedTexts(asker, BOUND, vocabulary=30000).judge(prompt, answer)


def test_a_likelier_token_may_end_the_text():
    asker = FakeAsker(is_end=True)
    judge(asker, [*PROMPT])
    assert asker.single


def test_a_likelier_token_that_does_not_end_the_text_is_a_fault():
    with pytest.raises(Unmet, match="expected the likeliest"):
        judge(FakeAsker(is_end=False), [*PROMPT])


def test_only_the_token_that_ends_the_text_may_be_likelier():
    """gpt-oss ends a text by an id above the vocabulary. A likelier plain token is a fault."""
    with pytest.raises(Unmet, match="expected the likeliest"):
        judge(FakeAsker(is_end=True, end=200_002), [*PROMPT])


@pytest.mark.parametrize("is_end", [True, False])
def test_the_end_of_a_text_after_a_prompt_of_text(is_end):
    """Single tokens cannot be requested after a text, so the comparison ends later with NotRun."""
    expected = "only be requested after a prompt of ids" if is_end else "expected the likeliest"
    with pytest.raises(Exception, match=expected):
        judge(FakeAsker(is_end=is_end), "begin: ")
