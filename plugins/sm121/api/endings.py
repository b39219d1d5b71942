"""How an answer ends: by itself, at a limit, at a stop string or token, of a chat with a final
message in harmony's form; and how it is counted."""

from collections.abc import Callable
from typing import Any

from sm121.api import harmony, sampling, stream, tools
from sm121.api.client import Api, Json, together
from sm121.api.sdk import PROMPT, Sdk
from sm121.core.level_settings import Chat, Correctness
from sm121.core.unmet import require, require_each


def natural_length(api: Api, correctness: Correctness) -> int:
    """How many tokens an answer in harmony has, which ends by itself with a special token."""
    limit = correctness.max_answer_tokens
    answer = api.complete(harmony.PROMPT, max_tokens=limit)
    finish = answer["choices"][0]["finish_reason"]
    require(finish == "stop", f"an end within {limit} tokens", finish)
    return int(answer["usage"]["completion_tokens"])


def chat_obeys_stop(api: Api, correctness: Correctness, remark: Callable[[str], object]) -> None:
    """Nothing follows the stop string of a chat, and finish_reason is stop."""
    chat = correctness.chats[0]
    options = {"max_tokens": correctness.max_answer_tokens, "stop": [chat.contains]}
    choice = api.chat(chat.question, **options)["choices"][0]
    _, match, rest = sampling.said(choice["message"]).partition(chat.contains)
    require(not rest, "nothing after it", choice, f"stop {chat.contains!r}")
    require(choice["finish_reason"] == "stop", "stop", choice["finish_reason"])
    if match:  # vLLM reads harmony from the tokens, of which the last one holds the stop string
        remark("a chat's text includes the stop string; OpenAI's API leaves it out")


def stop_string_ends_the_text(api: Api) -> None:
    """The text stops before a string of its own, the first or the second, streamed or not."""
    whole = api.complete(PROMPT, max_tokens=24)["choices"][0]["text"]
    start = next(i for i in range(3, len(whole)) if whole.index(whole[i : i + 4]) == i)
    stop, before = whole[start : start + 4], whole[:start]
    options: Json = {"max_tokens": 24, "stop": [stop, "no such text"]}
    at_once = api.complete(PROMPT, **options)["choices"][0]
    options["stop"].reverse()
    second = api.complete(PROMPT, **options)["choices"][0]
    streamed = stream.completion_of(api.stream_completion(PROMPT, **options))[0]

    def stops(answer: Json, how: str) -> None:
        right = (answer["text"], answer["finish_reason"]) == (before, "stop")
        require(right, f"{before!r} and stop", answer, f"stop {stop!r}: {how}")

    require_each(stops, (at_once, second, streamed), ("first", "second", "streamed"))


def stop_token_ends_the_answer(api: Api) -> None:
    """Generation ends with the one of two stop tokens that comes."""
    options = {"max_tokens": 12, "return_token_ids": True}
    ids = api.complete(PROMPT, **options)["choices"][0]["token_ids"]
    index = next(i for i in range(2, len(ids)) if ids[i] not in ids[:i])
    stops = [min({*range(len(ids) + 1)} - {*ids}), ids[index]]  # the first of them never comes
    choice = api.complete(PROMPT, stop_token_ids=stops, **options)["choices"][0]
    generated, reason = choice["token_ids"], choice["finish_reason"]
    require(generated in (ids[:index], ids[: index + 1]), ids[: index + 1], generated)
    require(reason == "stop", "stop", reason)


def special_tokens_are_hidden(api: Api) -> None:
    """Texts have no special token: at a natural end, and in a stream."""
    api.capabilities.require("hidden_special_tokens")
    choices = api.complete(harmony.PROMPT, max_tokens=60)["choices"][:1]
    choices += stream.completion_of(api.stream_completion(harmony.PROMPT, max_tokens=60))
    texts = [choice["text"] for choice in choices]
    leaks = [token for text in texts for token in harmony.leaked(text)]
    require(not leaks, "no special token", f"{leaks} in {texts}")


def counts_are_exact(sdk: Sdk, tokens: int) -> None:
    """A completion has the number of tokens that was asked for; usage and finish_reason agree."""
    answer = sdk.exactly(tokens)
    choice, usage = answer.choices[0], answer.usage
    ids, counted = len(choice.token_ids), usage.completion_tokens
    require(ids == tokens, f"{tokens} token ids", ids)
    require(counted == tokens, f"usage of {tokens} tokens", counted)
    prompt, counted = len(choice.prompt_token_ids), usage.prompt_tokens
    require(counted == prompt, f"usage of {prompt} prompt tokens", counted)
    reason = choice.finish_reason
    require(reason == "length", "finish_reason length", reason)


def min_tokens_is_kept(api: Api, correctness: Correctness) -> None:
    """An answer does not end before min_tokens, and a bias that would end it at once, by its own
    end or by a stop token, ends it right there."""
    api.capabilities.require("min_tokens")
    least = natural_length(api, correctness) + 6
    counted = _counted(api, harmony.PROMPT, min_tokens=least, max_tokens=least + 6)
    require(counted >= least, f"at least {least} tokens", counted)
    if not api.capabilities.can("logit_bias"):
        return
    stop = api.ids(PROMPT)[-1]
    ends: list[tuple[int, Json]] = [(harmony.RETURN, {}), (stop, {"stop_token_ids": [stop]})]
    for end, options in ends:
        options |= {"max_tokens": 24, "logit_bias": {str(end): 100}}
        without = _counted(api, PROMPT, **options)
        require(without <= 1, "an end at once", f"{without} tokens", f"logit_bias of token {end}")
        for least in (3, 8):
            counted, required = _counted(api, PROMPT, min_tokens=least, **options), least + without
            require(counted == required, f"{required} tokens", counted, f"min_tokens {least}")


def _counted(api: Api, prompt: str, **options: Any) -> int:
    return int(api.complete(prompt, **options)["usage"]["completion_tokens"])


def are_told_apart(api: Api, correctness: Correctness) -> None:
    """Ids are told once, by answers, items and calls of each kind, and by all that `api` has asked
    for before. Times are Unix times in seconds."""
    chat, limit = correctness.chats[0].question, correctness.max_answer_tokens
    question, can = correctness.tool_calls[0].question, api.capabilities.can
    times = []
    for _ in range(3):
        times.append(api.complete(PROMPT, max_tokens=1)["created"])
        api.stream_completion(PROMPT, max_tokens=1)
        if can("chat"):
            times.append(api.send_chat(chat, max_tokens=1)["created"])
            api.stream_chat(chat, max_tokens=1)
        if can("responses"):
            times.append(api.send_response(chat, max_output_tokens=1)["created_at"])
    if can("tools"):
        for _ in range(2):
            tools.ask(api, question, tools.tools(), limit)
    repeated = {name: times for name, times in api.every_id.items() if times > 1}
    required = f"{len(api.every_id)} ids, each once"
    require(not repeated, required, f"{len(repeated)} repeated", evidence=repeated)
    right = all(1_500_000_000 < time < 10_000_000_000 for time in times)
    require(right, "seconds since 1970", "another time", evidence=times)


def usage_equals_the_ids(api: Api) -> None:
    """Usage counts the ids: at a natural end, at the limit, of several prompts and choices."""

    def counts(prompt: str | list[str], options: Json) -> None:
        answer = api.complete(prompt, return_token_ids=True, **options)
        choices, usage = answer["choices"], answer["usage"]
        counted = sum(len(choice["token_ids"]) for choice in choices)
        firsts = [choice for choice in choices if choice["index"] % options.get("n", 1) == 0]
        prompts = sum(len(choice["prompt_token_ids"]) for choice in firsts)
        # The sampled answers may end early: what is observed is steady from run to run.
        off = (usage["prompt_tokens"] - prompts, usage["completion_tokens"] - counted)
        required, about = "usage of the ids of prompts and answers", f"{prompt!r} {options}"
        require(off == (0, 0), required, f"{off} more", about, evidence=f"{usage}")

    texts = (harmony.PROMPT, PROMPT, [PROMPT, "The capital of Japan is"], PROMPT)
    several = {"max_tokens": 6, "n": 2, "temperature": 1.0}
    lengths = ({"max_tokens": 200}, {"max_tokens": 9}, {"max_tokens": 5}, several)
    require_each(counts, texts, lengths)


def usage_of_a_stream_equals_the_ids(api: Api) -> None:
    """The last chunk counts the ids of all chunks."""
    chunks = api.stream_completion(PROMPT, max_tokens=9, return_token_ids=True)
    whole = stream.completion_of(chunks)[0]
    counted = len(whole["token_ids"])
    usage = chunks.chunks[-1].get("usage") or {}
    required = 9 if whole["finish_reason"] == "length" else counted  # it may end by itself before
    same = usage.get("completion_tokens") == counted == required
    require(same, f"{required} ids and usage of as many", f"{counted} ids and {usage}")


def chats_end_in_a_final_message(api: Api, correctness: Correctness) -> None:
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
            require(reasoning and reasoning not in content, "reasoning apart", message, of)

    require_each(ends_well, repeated, answers)


def chats_end_by_themselves(api: Api, correctness: Correctness) -> None:
    """Each chat without a limit has its final message."""

    def is_whole(chat: Chat) -> None:
        choice = api.chat(chat.question)["choices"][0]
        whole = choice["finish_reason"] == "stop" and choice["message"]["content"]
        require(whole, "a whole answer", choice, f"{chat.question!r}")

    require_each(is_whole, correctness.chats)


def chats_are_harmony(api: Api, correctness: Correctness, effort: str) -> None:
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
