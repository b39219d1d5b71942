"""gpt-oss over /v1/chat/completions: a final message, the reasoning apart, and harmony's form."""

from __future__ import annotations

from sm121.api import harmony
from sm121.api.client import Api, together
from sm121.core.profile import Correctness
from sm121.core.verdict import require


def end_in_a_final_message(api: Api, known: Correctness) -> None:
    """Each chat, asked again and again: what is known is in the content, the reasoning is not."""
    field = api.capabilities.file.reasoning_field
    asked = [chat for chat in known.chats for _ in range(known.repeats)]
    limit = known.max_answer_tokens
    answers = together(lambda chat: api.chat(chat.question, max_tokens=limit), asked)
    for chat, answer in zip(asked, answers, strict=True):
        choice, of = answer["choices"][0], f"{chat.question!r}: "
        message, content = choice["message"], choice["message"]["content"]
        wanted = f"content, with usage {answer['usage']}"
        require(content is not None, wanted, message, of)
        require(chat.contains in content, f"content with {chat.contains!r}", message, of)
        require(choice["finish_reason"] == "stop", "stop", choice, of)
        if field:
            reasoning = message.get(field)
            apart = reasoning and reasoning not in content
            require(apart, "reasoning apart", message, of)


def are_harmony(api: Api, known: Correctness, effort: str) -> None:
    """The token ids of a chat, at one effort of reasoning, are in harmony's form and counted."""
    answer = api.chat(
        known.chats[0].question,
        max_tokens=known.max_answer_tokens,
        reasoning_effort=effort,
        return_token_ids=True,
    )
    choice, counted = answer["choices"][0], answer["usage"]["completion_tokens"]
    ids = choice["token_ids"]
    wrong = harmony.violations(ids, finished=choice["finish_reason"] == "stop")
    require(not wrong, "harmony", f"{'; '.join(wrong)} in {ids[:12]}...")
    said = choice["message"]["content"] or ids[-1] != harmony.RETURN
    require(said, "content where <|return|> was reached", choice["message"])
    require(counted == len(ids), f"usage of {len(ids)} tokens", counted)
