"""Check how an answer ends, and how its tokens are counted.

An answer ends by itself, at a limit, or at a stop string or token. A chat ends with a final message
in harmony's format. Each check raises `Unmet` if the requirement is violated.
"""

from collections.abc import Callable
from typing import Any

from sm121.api import harmony, sampling, stream, tools
from sm121.api.client import Api, Json, together
from sm121.api.sdk import PROMPT, Sdk
from sm121.core.level_settings import Chat, Correctness
from sm121.core.unmet import require, require_each

#: The length of the stop strings, which are taken from the middle of an answer, in characters.
_STOP_LENGTH = 4
#: Bounds for plausible Unix times in seconds (2017 and 2286). Times in milliseconds would be far
#: above.
_EARLIEST = 1_500_000_000
_LATEST = 10_000_000_000


def natural_length(api: Api, correctness: Correctness) -> int:
    """Return the number of tokens of an answer to a chat's text that ends by itself.

    Args:
        api: The API of the server.
        correctness: The profile's table. ``chat_format`` has the text, and ``max_answer_tokens`` is
            the limit.

    Raises:
        Unmet: The answer does not end within the limit.
    """
    limit = correctness.max_answer_tokens
    answer = api.complete(correctness.chat_format.prompt, max_tokens=limit)
    finish = answer["choices"][0]["finish_reason"]
    require(finish == "stop", f"an end within {limit} tokens", finish)
    return int(answer["usage"]["completion_tokens"])


def chat_obeys_stop(api: Api, correctness: Correctness, remark: Callable[[str], object]) -> None:
    """Require that nothing follows the stop string of a chat, and that finish_reason is stop.

    Args:
        api: The API of the server.
        correctness: The expected texts. The first chat's text is used as the stop string.
        remark: Called with a remark if the text includes the stop string.

    Raises:
        Unmet: The answer continues after the stop string, or has another finish_reason.
    """
    chat = correctness.chats[0]
    options = {"max_tokens": correctness.max_answer_tokens, "stop": [chat.contains]}
    choice = api.chat(chat.question, **options)["choices"][0]
    _, match, rest = sampling.reasoning_and_content(choice["message"]).partition(chat.contains)
    require(not rest, "no text after it", choice, f"stop {chat.contains!r}")
    require(choice["finish_reason"] == "stop", "finish_reason stop", choice["finish_reason"])
    if match:  # vLLM parses harmony from tokens, and the last token contains the stop string
        remark("a chat's text includes the stop string; OpenAI's API leaves it out")


def stop_string_ends_the_text(api: Api) -> None:
    """Require that texts end before either of two stop strings, with and without streaming.

    Args:
        api: The API of the server.

    Raises:
        Unmet: The text ends elsewhere, or finish_reason is not stop.
    """
    whole = api.complete(PROMPT, max_tokens=24)["choices"][0]["text"]
    start = _first_new_string(whole)
    stop = whole[start : start + _STOP_LENGTH]
    before = whole[:start]
    options: Json = {"max_tokens": 24, "stop": [stop, "no such text"]}
    first = api.complete(PROMPT, **options)["choices"][0]
    options["stop"].reverse()
    second = api.complete(PROMPT, **options)["choices"][0]
    streamed = stream.completion_of(api.stream_completion(PROMPT, **options))[0]

    def stops(choice: Json, case: str) -> None:
        right = choice["text"] == before and choice["finish_reason"] == "stop"
        require(right, f"{before!r} and finish_reason stop", choice, f"stop {stop!r}: {case}")

    require_each(stops, (first, second, streamed), ("first", "second", "streamed"))


def _first_new_string(text: str) -> int:
    """Return the first index (at least 3) of a stop string that does not occur earlier."""
    starts = range(3, len(text))
    return next(i for i in starts if text.index(text[i : i + _STOP_LENGTH]) == i)


def stop_token_ends_the_answer(api: Api) -> None:
    """Require that generation ends at a stop token, even if there is a second one later.

    Args:
        api: The API of the server.

    Raises:
        Unmet: The answer ends elsewhere, or finish_reason is not stop.
    """
    options = {"max_tokens": 12, "return_token_ids": True}
    ids = api.complete(PROMPT, **options)["choices"][0]["token_ids"]
    index = next(i for i in range(2, len(ids)) if ids[i] not in ids[:i])
    never_generated = min(set(range(len(ids) + 1)) - set(ids))
    stops = [never_generated, ids[index]]
    choice = api.complete(PROMPT, stop_token_ids=stops, **options)["choices"][0]
    generated = choice["token_ids"]
    # Engines differ in whether they return the stop token.
    require(generated in (ids[:index], ids[: index + 1]), ids[: index + 1], generated)
    require(choice["finish_reason"] == "stop", "finish_reason stop", choice["finish_reason"])


def special_tokens_are_hidden(api: Api, correctness: Correctness) -> None:
    """Require that texts with a natural end have no special tokens, with and without streaming.

    Args:
        api: The API of the server.
        correctness: ``chat_format`` has a chat's text, and the special tokens.

    Raises:
        Unmet: A text contains a special token.
        NotRun: The engine does not remove special tokens.
    """
    api.capabilities.require("hidden_special_tokens")
    form = correctness.chat_format
    choices = api.complete(form.prompt, max_tokens=60)["choices"][:1]
    choices += stream.completion_of(api.stream_completion(form.prompt, max_tokens=60))
    texts = [choice["text"] for choice in choices]
    leaks = []
    for text in texts:
        leaks += harmony.leaked(text)
        leaks += [special for special in form.special if special in text]
    require(not leaks, "no special token", f"{leaks} in {texts}")


def counts_are_exact(sdk: Sdk, tokens: int) -> None:
    """Require a completion of exactly the requested length, with a correct usage and finish_reason.

    Args:
        sdk: The client of the server.
        tokens: The requested number of tokens.

    Raises:
        Unmet: The number of ids, the usage or the finish_reason differs.
    """
    answer = sdk.exactly(tokens)
    choice = answer.choices[0]
    ids = len(choice.token_ids)
    require(ids == tokens, f"{tokens} token ids", ids)
    counted = answer.usage.completion_tokens
    require(counted == tokens, f"usage of {tokens} tokens", counted)
    prompt = len(choice.prompt_token_ids)
    counted = answer.usage.prompt_tokens
    require(counted == prompt, f"usage of {prompt} prompt tokens", counted)
    reason = choice.finish_reason
    require(reason == "length", "finish_reason length", reason)


def min_tokens_is_kept(api: Api, correctness: Correctness) -> None:
    """Require that an answer does not end before min_tokens.

    The requests have a bias that forces the end token or a stop token, which would end the answer
    at once. With min_tokens, the answer must end right after that number of tokens.

    Args:
        api: The API of the server.
        correctness: The profile's table. ``max_answer_tokens`` is the limit of an answer that ends
            by itself.

    Raises:
        Unmet: An answer has another length.
        NotRun: The engine does not support min_tokens.
    """
    api.capabilities.require("min_tokens")
    can = api.capabilities.can
    ends: list[tuple[int, Json]] = []
    # A model without chats may continue a text without an end, and may have no end token.
    if can("chat"):
        least = natural_length(api, correctness) + 6
        prompt = correctness.chat_format.prompt
        counted = _counted(api, prompt, min_tokens=least, max_tokens=least + 6)
        require(counted >= least, f"at least {least} tokens", counted)
        ends.append((correctness.chat_format.end_token, {}))
    if not can("logit_bias"):
        return
    stop = api.ids(PROMPT)[-1]
    ends.append((stop, {"stop_token_ids": [stop]}))
    for end, options in ends:
        options |= {"max_tokens": 24, "logit_bias": {str(end): 100}}
        without = _counted(api, PROMPT, **options)
        require(without <= 1, "an end at once", f"{without} tokens", f"logit_bias of token {end}")
        for least in (3, 8):
            counted = _counted(api, PROMPT, min_tokens=least, **options)
            required = least + without
            require(counted == required, f"{required} tokens", counted, f"min_tokens {least}")


def ignore_eos_goes_on(api: Api, correctness: Correctness) -> None:
    """Require that generation continues after a chat's end token, up to the limit.

    Args:
        api: The API of the server.
        correctness: ``chat_format`` has the text.

    Raises:
        Unmet: The answer has another length or finish_reason.
        NotRun: The engine does not support ignore_eos.
    """
    api.capabilities.require("ignore_eos")
    limit = natural_length(api, correctness) + 6
    prompt = correctness.chat_format.prompt
    answer = api.complete(prompt, ignore_eos=True, max_tokens=limit)
    ending = (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"])
    require(ending == (limit, "length"), f"{limit} tokens and finish_reason length", ending)


def begins_with_the_channel_token(api: Api, correctness: Correctness) -> None:
    """Require that the log-probabilities of a chat begin with harmony's channel token.

    Args:
        api: The API of the server.
        correctness: The question of its first chat is sent.

    Raises:
        Unmet: The first token is not the channel token, or has no log-probability.
    """
    answer = api.chat(correctness.chats[0].question, max_tokens=3, logprobs=True)
    listed = answer["choices"][0].get("logprobs") or {}
    entries: list[Json] = listed.get("content") or []
    require(entries and entries[0], "a log-probability of the first token", entries)
    first = entries[0].get("token")
    require(first == "<|channel|>", "<|channel|>", repr(first))


def _counted(api: Api, prompt: str, **options: Any) -> int:
    return int(api.complete(prompt, **options)["usage"]["completion_tokens"])


def ids_are_unique(api: Api, correctness: Correctness) -> None:
    """Require unique ids of all answers, items and calls, and creation times in seconds.

    Args:
        api: The API of the server. The ids of its earlier answers count, too.
        correctness: The questions of its first chat and first tool call are sent.

    Raises:
        Unmet: An id was received twice, or a time is not a Unix time in seconds.
    """
    can = api.capabilities.can
    question = ""
    if correctness.chats:
        question = correctness.chats[0].question
    times = []
    for _ in range(3):
        times.append(api.complete(PROMPT, max_tokens=1)["created"])
        api.stream_completion(PROMPT, max_tokens=1)
        if can("chat"):
            times.append(api.send_chat(question, max_tokens=1)["created"])
            api.stream_chat(question, max_tokens=1)
        if can("responses"):
            times.append(api.send_response(question, max_output_tokens=1)["created_at"])
    if can("tools") and correctness.tool_calls:
        for _ in range(2):
            tool_question = correctness.tool_calls[0].question
            tools.ask(api, tool_question, tools.tools(), correctness.max_answer_tokens)
    repeated = {name: count for name, count in api.every_id.items() if count > 1}
    required = f"{len(api.every_id)} ids, each once"
    require(not repeated, required, f"{len(repeated)} repeated", evidence=repeated)
    right = all(_EARLIEST < time < _LATEST for time in times)
    require(right, "seconds since 1970", "another time", evidence=times)


def usage_equals_the_ids(api: Api, correctness: Correctness) -> None:
    """Require that usage equals the number of ids in prompts and answers.

    The requests are: an answer that ends by itself, one that ends at a limit, one with several
    prompts, and one with several choices.

    Args:
        api: The API of the server.
        correctness: ``chat_format`` has a chat's text.

    Raises:
        Unmet: Usage differs from the number of ids.
    """

    def counts(prompt: str | list[str], options: Json) -> None:
        answer = api.complete(prompt, return_token_ids=True, **options)
        choices_each = options.get("n", 1)
        generated = 0
        prompted = 0
        for choice in answer["choices"]:
            generated += len(choice["token_ids"])
            if choice["index"] % choices_each == 0:  # the first choice of its prompt
                prompted += len(choice["prompt_token_ids"])
        usage = answer["usage"]
        # Report the differences, because sampled answers have other lengths in each run.
        off = (usage["prompt_tokens"] - prompted, usage["completion_tokens"] - generated)
        required = "usage that equals the number of ids in prompts and answers"
        about = f"{prompt!r} {options}"
        require(off == (0, 0), required, f"differences of {off}", about, evidence=f"{usage}")

    prompts = (correctness.chat_format.prompt, PROMPT, [PROMPT, "The capital of Japan is"], PROMPT)
    several = {"max_tokens": 6, "n": 2, "temperature": 1.0}
    options_each = ({"max_tokens": 200}, {"max_tokens": 9}, {"max_tokens": 5}, several)
    require_each(counts, prompts, options_each)


def usage_of_a_stream_equals_the_ids(api: Api) -> None:
    """Require that the usage in the last chunk counts the ids of all chunks.

    Args:
        api: The API of the server.

    Raises:
        Unmet: Usage, ids and the limit differ.
    """
    chunks = api.stream_completion(PROMPT, max_tokens=9, return_token_ids=True)
    whole = stream.completion_of(chunks)[0]
    counted = len(whole["token_ids"])
    usage = chunks.chunks[-1].get("usage") or {}
    # An answer may end before the limit.
    required = 9 if whole["finish_reason"] == "length" else counted
    same = usage.get("completion_tokens") == counted == required
    require(same, f"{required} ids and a usage of {required} tokens", f"{counted} ids and {usage}")


def chats_end_in_a_final_message(api: Api, correctness: Correctness) -> None:
    """Require that the content of chats contains the known answer, and that reasoning is separate.

    Args:
        api: The API of the server.
        correctness: ``chats`` has the questions; each is sent ``repeats`` times.

    Raises:
        Unmet: Content is missing, lacks the known answer or contains the reasoning, or
            finish_reason is not stop.
    """
    reasoning_field = api.capabilities.file.reasoning_field
    repeated: list[Chat] = []
    for chat in correctness.chats:
        repeated += [chat] * correctness.repeats
    limit = correctness.max_answer_tokens
    answers = together(lambda chat: api.chat(chat.question, max_tokens=limit), repeated)

    def ends_well(chat: Chat, answer: Json) -> None:
        about = f"{chat.question!r}"
        choice = answer["choices"][0]
        message = choice["message"]
        content = message["content"]
        expected = f"content, with usage {answer['usage']}"
        require(content is not None, expected, message, about)
        require(chat.contains in content, f"content with {chat.contains!r}", message, about)
        require(choice["finish_reason"] == "stop", "finish_reason stop", choice, about)
        if reasoning_field and correctness.chat_format.reasoning:
            reasoning = message.get(reasoning_field)
            apart = reasoning and reasoning not in content
            require(apart, "reasoning outside the content", message, about)

    require_each(ends_well, repeated, answers)


def chats_end_by_themselves(api: Api, correctness: Correctness) -> None:
    """Require that each chat without a limit ends by itself with a final message.

    Args:
        api: The API of the server.
        correctness: ``chats`` has the questions.

    Raises:
        Unmet: Content is missing, or finish_reason is not stop.
    """

    def is_whole(chat: Chat) -> None:
        choice = api.chat(chat.question)["choices"][0]
        whole = choice["finish_reason"] == "stop" and choice["message"]["content"]
        require(whole, "a whole answer", choice, f"{chat.question!r}")

    require_each(is_whole, correctness.chats)


def chats_are_harmony(api: Api, correctness: Correctness, effort: str) -> None:
    """Require that the token ids of a chat are in harmony's format, and that usage counts them.

    Args:
        api: The API of the server.
        correctness: The question of its first chat is sent.
        effort: The reasoning effort: ``low``, ``medium`` or ``high``.

    Raises:
        Unmet: The ids are not well-formed, content is missing at a natural end, or usage differs.
    """
    options = {"max_tokens": correctness.max_answer_tokens, "reasoning_effort": effort}
    answer = api.chat(correctness.chats[0].question, return_token_ids=True, **options)
    choice = answer["choices"][0]
    ids = choice["token_ids"]
    errors = harmony.violations(ids, finished=choice["finish_reason"] == "stop")
    require(not errors, "tokens in harmony's format", f"{'; '.join(errors)} in {ids[:12]}...")
    finished = choice["message"]["content"] or ids[-1] != harmony.RETURN
    require(finished, "content where <|return|> was reached", choice["message"])
    counted = answer["usage"]["completion_tokens"]
    require(counted == len(ids), f"usage of {len(ids)} tokens", counted)
