"""Tokens are counted: as many come as were asked for, and usage says how many there are."""

from __future__ import annotations

from sm121.api import harmony, stream
from sm121.api.client import Api
from sm121.api.sdk import PROMPT, Sdk
from sm121.core.verdict import require


def counts_are_exact(sdk: Sdk, asked: int) -> None:
    """A completion has the number of tokens that was asked for; usage and finish_reason agree."""
    answer = sdk.exactly(asked)
    choice, usage = answer.choices[0], answer.usage
    ids, counted = len(choice.token_ids), usage.completion_tokens
    require(ids == asked, f"{asked} token ids", ids)
    require(counted == asked, f"usage of {asked} tokens", counted)
    prompt, counted = len(choice.prompt_token_ids), usage.prompt_tokens
    require(counted == prompt, f"usage of {prompt} prompt tokens", counted)
    reason = choice.finish_reason
    require(reason == "length", "finish_reason length", reason)


def usage_equals_the_ids(api: Api) -> None:
    """Usage counts the ids: at a natural end, at the limit, of several prompts and choices."""
    for prompt, options in (
        (harmony.PROMPT, {"max_tokens": 200}),
        (PROMPT, {"max_tokens": 9}),
        ([PROMPT, "The capital of Japan is"], {"max_tokens": 5}),
        (PROMPT, {"max_tokens": 6, "n": 2, "temperature": 1.0}),
    ):
        answer = api.complete(prompt, return_token_ids=True, **options)
        choices, usage = answer["choices"], answer["usage"]
        counted = sum(len(choice["token_ids"]) for choice in choices)
        firsts = [choice for choice in choices if choice["index"] % options.get("n", 1) == 0]
        required = (sum(len(choice["prompt_token_ids"]) for choice in firsts), counted)
        seen = (usage["prompt_tokens"], usage["completion_tokens"])
        require(seen == required, f"usage of {required} tokens", usage, f"{prompt!r} {options}: ")


def usage_of_a_stream_equals_the_ids(api: Api) -> None:
    """The last chunk counts the ids of all chunks."""
    seen = api.stream_completion(PROMPT, max_tokens=9, return_token_ids=True)
    whole = stream.completion_of(seen)[0]
    counted = len(whole["token_ids"])
    usage = seen.chunks[-1].get("usage") or {}
    required = 9 if whole["finish_reason"] == "length" else counted  # it may end by itself before
    require(
        usage.get("completion_tokens") == counted == required,
        f"{required} ids and usage of as many",
        f"{counted} ids and {usage}",
    )
