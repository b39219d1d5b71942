"""gpt-oss over /v1/chat/completions: a final message, the reasoning apart, and harmony's form."""

from sm121.api import harmony
from sm121.api.client import Api, Json, together
from sm121.core.level_settings import Chat, Correctness
from sm121.core.unmet import require, require_each


def end_in_a_final_message(api: Api, correctness: Correctness) -> None:
    """Each chat, asked again and again: what is known is in the content, the reasoning is not."""
    field = api.capabilities.file.reasoning_field
    repeated = [chat for chat in correctness.chats for _ in range(correctness.repeats)]
    limit = correctness.max_answer_tokens
    answers = together(lambda chat: api.chat(chat.question, max_tokens=limit), repeated)

    def ends_well(chat: Chat, answer: Json) -> None:
        choice, of = answer["choices"][0], f"{chat.question!r}"
        message, content = choice["message"], choice["message"]["content"]
        expected = f"content, with usage {answer['usage']}"
        require(content is not None, expected, message, of)
        require(chat.contains in content, f"content with {chat.contains!r}", message, of)
        require(choice["finish_reason"] == "stop", "stop", choice, of)
        if field:
            reasoning = message.get(field)
            separate = reasoning and reasoning not in content
            require(separate, "reasoning apart", message, of)

    require_each(ends_well, repeated, answers)


def end_by_themselves(api: Api, correctness: Correctness) -> None:
    """Each chat without a limit has its final message."""

    def is_whole(chat: Chat) -> None:
        choice = api.chat(chat.question)["choices"][0]
        whole = choice["finish_reason"] == "stop" and choice["message"]["content"]
        require(whole, "a whole answer", choice, f"{chat.question!r}")

    require_each(is_whole, correctness.chats)


def are_harmony(api: Api, correctness: Correctness, effort: str) -> None:
    """The token ids of a chat, at one effort of reasoning, are in harmony's form and counted."""
    options = {"max_tokens": correctness.max_answer_tokens, "reasoning_effort": effort}
    answer = api.chat(correctness.chats[0].question, return_token_ids=True, **options)
    choice, counted = answer["choices"][0], answer["usage"]["completion_tokens"]
    ids = choice["token_ids"]
    wrong = harmony.violations(ids, finished=choice["finish_reason"] == "stop")
    require(not wrong, "harmony", f"{'; '.join(wrong)} in {ids[:12]}...")
    finished = choice["message"]["content"] or ids[-1] != harmony.RETURN
    require(finished, "content where <|return|> was reached", choice["message"])
    require(counted == len(ids), f"usage of {len(ids)} tokens", counted)
