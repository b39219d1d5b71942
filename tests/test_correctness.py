"""Correctness: the server's answers are right, complete, and the same however they are asked for.

All requests are greedy (temperature 0) unless the test is about sampling.
"""

from __future__ import annotations

import math

import pytest

from sm121.evidence import log_probabilities

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]

PROMPT = "The capital of France is"


def complete(client, model, prompt=PROMPT, **options):
    """A completion with the token ids that the server generated."""
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    options = {"temperature": 0.0, "max_tokens": 16, **options}
    return client.completions.create(model=model, prompt=prompt, extra_body=extra, **options)


def test_known_answers(client, model, profile):
    """Facts that every capable checkpoint of this profile knows."""
    wrong = []
    for known in profile.correctness.known_answers:
        text = complete(client, model, known.prompt, max_tokens=8).choices[0].text
        if not text.startswith(known.begins):
            wrong.append(f"{known.prompt!r}: required {known.begins!r}, seen {text!r}")
    assert not wrong, "; ".join(wrong)


def test_chats_end_in_a_final_message(client, model, profile):
    """The final channel has the answer, the reasoning is apart, and the message ends by itself."""
    for chat in profile.correctness.chats:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": chat.question}],
            temperature=0.0,
            max_tokens=profile.correctness.max_answer_tokens,
        )
        choice = answer.choices[0]
        content = choice.message.content or ""
        assert chat.contains in content, (
            f"{chat.question!r}: required content with {chat.contains!r}, seen {choice.message}"
        )
        assert choice.finish_reason == "stop", (
            f"{chat.question!r}: required finish_reason stop, seen {choice.finish_reason}"
        )
        assert "<|" not in content, f"required: no special token in the content, seen {content!r}"


@pytest.mark.parametrize("asked", [1, 7, 32])
def test_token_counts_are_exact(client, model, asked):
    """As many tokens as asked for, and usage says how many there are."""
    answer = complete(
        client,
        model,
        max_tokens=asked,
        extra_body={"ignore_eos": True, "min_tokens": asked},
    )
    ids = answer.choices[0].token_ids
    assert len(ids) == asked, f"required: {asked} token ids, seen: {len(ids)}"
    assert answer.usage.completion_tokens == asked, (
        f"required: usage of {asked} tokens, seen: {answer.usage.completion_tokens}"
    )
    prompt_ids = answer.choices[0].prompt_token_ids
    assert answer.usage.prompt_tokens == len(prompt_ids), (
        f"required: usage of {len(prompt_ids)} prompt tokens, seen: {answer.usage.prompt_tokens}"
    )
    assert answer.choices[0].finish_reason == "length", (
        f"required: finish_reason length, seen: {answer.choices[0].finish_reason}"
    )


def test_log_probabilities_are_finite(client, model):
    """Every log-probability is a finite number, none above 0, and the chosen token's is there."""
    answer = complete(
        client, model, max_tokens=32, logprobs=5, extra_body={"ignore_eos": True, "min_tokens": 32}
    )
    found = answer.choices[0].logprobs
    assert len(found.token_logprobs) == 32, (
        f"required: 32 log-probabilities, seen: {len(found.token_logprobs)}"
    )
    every = [*found.token_logprobs, *(v for top in found.top_logprobs for v in top.values())]
    bad = [value for value in every if value is None or not math.isfinite(value) or value > 0.0]
    assert not bad, f"required: finite and at most 0, seen: {bad[:5]}"
    for position, top in enumerate(found.top_logprobs):
        total = math.fsum(math.exp(value) for value in top.values())
        assert total <= 1.0 + 1e-3, (
            f"required: probabilities of position {position} sum to at most 1, seen: {total}"
        )


def test_streaming_equals_not_streaming(client, model):
    """The same tokens, whether they come at once or one by one, with the same usage."""
    options = {"max_tokens": 48, "extra_body": {"ignore_eos": True, "min_tokens": 48}}
    whole = complete(client, model, **options)
    ids: list[int] = []
    text = ""
    usage = None
    stream = complete(client, model, stream=True, stream_options={"include_usage": True}, **options)
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            ids.extend(getattr(choice, "token_ids", None) or [])
            text += choice.text
    expected = whole.choices[0]
    assert ids == expected.token_ids, (
        f"required: token ids {expected.token_ids}, seen in the stream: {ids}"
    )
    assert text == expected.text, f"required: {expected.text!r}, seen in the stream: {text!r}"
    assert usage is not None and usage.completion_tokens == len(ids), (
        f"required: usage of {len(ids)} tokens in the last chunk, seen: {usage}"
    )


def test_same_seed_same_tokens(client, model):
    """Sampling with one seed repeats itself; another seed is free to differ."""
    options = {"max_tokens": 24, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    first, second = (complete(client, model, seed=1234, **options) for _ in range(2))
    assert first.choices[0].token_ids == second.choices[0].token_ids, (
        f"required: the same tokens with the same seed, seen: {first.choices[0].token_ids} "
        f"and {second.choices[0].token_ids}"
    )


def test_seed_is_used(client, model):
    """Of eight seeds at a high temperature, not all may give the same tokens: the seed is read."""
    options = {"max_tokens": 8, "temperature": 2.0, "extra_body": {"ignore_eos": True}}
    answers = {
        tuple(complete(client, model, seed=seed, **options).choices[0].token_ids)
        for seed in range(8)
    }
    assert len(answers) > 1, f"required: different seeds can differ, seen: {answers} eight times"


def test_prompt_log_probabilities_agree_with_the_oracle(client, model, server, profile):
    """The server's mathematics against the reference model in float64, where the model fits.

    The prompts cross the sliding window (127, 128, 129 tokens). How small a defect the tolerance
    catches is in docs/ablation.md.
    """
    dtype, tolerance = log_probabilities.tolerance_for(server, profile)
    for name, ids in log_probabilities.prompts():
        answer = complete(client, model, ids, max_tokens=1, extra_body={"prompt_logprobs": 0})
        seen = log_probabilities.of_prompt(answer, ids)
        expected = log_probabilities.from_oracle(server, ids)
        error = log_probabilities.compare(seen, expected)
        assert error.max_abs <= tolerance.max_abs and error.mean_abs <= tolerance.mean_abs, (
            f"prompt {name} ({len(ids)} tokens, {dtype}): required |difference| at most "
            f"{tolerance.max_abs} and {tolerance.mean_abs} on average, seen {error.max_abs:.2g} "
            f"(at token {error.worst_position}) and {error.mean_abs:.2g}"
        )
