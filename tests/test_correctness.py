"""Correctness: the server's answers are right, complete, and the same however they are asked for.

All requests are greedy (temperature 0) unless the test is about sampling.
"""

from __future__ import annotations

import json
import math
import re
import statistics

import jsonschema
import pytest

from sm121.answers import accuracy, golden, log_probabilities, prompts, sanity
from sm121.api import conversation, harmony, invariants, schema, stream
from sm121.api.client import together
from sm121.client.completions import Asker, Request
from sm121.core.verdict import Inconclusive, NotRun, Verdict

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]

PROMPT = "The capital of France is"
#: Of a logarithm of a softmax in float32 over 200,000 tokens: one that is 0 may come out above it.
ROUNDING = 1e-5


def complete(client, model, prompt=PROMPT, *, ids=True, **options):
    """A completion, by default with the token ids that the server generated."""
    extra = {"return_token_ids": ids, **options.pop("extra_body", {})}
    options = {"temperature": 0.0, "max_tokens": 16, **options}
    return client.completions.create(model=model, prompt=prompt, extra_body=extra, **options)


def first_that(answers, holds):
    """The first answer for which it holds, else the last: each is asked for when it is needed."""
    for answer in answers:
        if holds(answer):
            break
    return answer


def test_known_answers(client, model, profile):
    """Facts that every capable checkpoint of this profile knows."""
    wrong = []
    for known in profile.correctness.known_answers:
        text = complete(client, model, known.prompt, ids=False, max_tokens=8).choices[0].text
        if not text.startswith(known.begins):
            wrong.append(f"{known.prompt!r}: required {known.begins!r}, seen {text!r}")
    assert not wrong, "; ".join(wrong)


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
    bad = [v for v in every if v is None or not math.isfinite(v) or v > ROUNDING]
    assert not bad, f"required: finite and at most 0, seen: {bad[:5]}"
    for position, top in enumerate(found.top_logprobs):
        total = math.fsum(math.exp(value) for value in top.values())
        assert total <= 1.0 + ROUNDING, (
            f"required: probabilities of position {position} sum to at most 1, seen: {total}"
        )


def test_streaming_equals_not_streaming(client, model, attempts):
    """The same tokens, whether they come at once or one by one, with the same usage."""
    options = {"max_tokens": 48, "extra_body": {"ignore_eos": True, "min_tokens": 48}}
    ids: list[int] = []
    text = ""
    usage = finish = None
    stream = complete(client, model, stream=True, stream_options={"include_usage": True}, **options)
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            ids.extend(getattr(choice, "token_ids", None) or [])
            text += choice.text
            finish = choice.finish_reason or finish
    wholes = (complete(client, model, **options).choices[0] for _ in range(attempts))
    expected = first_that(wholes, lambda whole: whole.token_ids == ids)
    assert ids == expected.token_ids, (
        f"required: token ids {expected.token_ids}, seen in the stream: {ids}"
    )
    assert text == expected.text, f"required: {expected.text!r}, seen in the stream: {text!r}"
    assert finish == expected.finish_reason, (
        f"required: finish_reason {expected.finish_reason}, seen in the stream: {finish}"
    )
    assert usage is not None and usage.completion_tokens == len(ids), (
        f"required: usage of {len(ids)} tokens in the last chunk, seen: {usage}"
    )


def test_same_seed_same_tokens(client, model, attempts):
    """Sampling with one seed repeats itself; another seed is free to differ."""
    options = {"max_tokens": 24, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    first = complete(client, model, seed=1234, **options).choices[0].token_ids
    more = (complete(client, model, seed=1234, **options).choices[0] for _ in range(attempts))
    second = first_that(more, lambda choice: choice.token_ids == first).token_ids
    assert first == second, (
        f"required: the same tokens with the same seed, seen: {first} and {second}"
    )


def test_seed_is_used(client, model):
    """Of eight seeds at a high temperature, not all may give the same tokens: the seed is read."""
    options = {"max_tokens": 8, "temperature": 2.0, "extra_body": {"ignore_eos": True}}
    answers = {
        tuple(complete(client, model, seed=seed, **options).choices[0].token_ids)
        for seed in range(8)
    }
    assert len(answers) > 1, f"required: different seeds can differ, seen: {answers} eight times"


# Against the reference model in float64, where the model fits. How small a defect each tolerance
# catches is in docs/ablation.md, and which wrong models these tests were seen failing on in
# docs/model-faults.md.


def test_prompt_log_probabilities_agree_with_the_oracle(asker, reference):
    """The server's mathematics, over prompts that cross the sliding window and KV blocks."""
    seen: list[float] = []
    expected: list[float] = []
    for name, ids in log_probabilities.prompts():
        answer = asker.ask(Request(tuple(ids), 1, prompt_log_probabilities=True))
        values = asker.need(answer.prompt_log_probabilities, "prompt_logprobs")
        right = log_probabilities.from_oracle(reference.checkpoint, ids)
        error = log_probabilities.compare(values, right)
        assert error.max_abs <= reference.tolerance.max_abs, (
            f"prompt {name} ({len(ids)} tokens, {reference.dtype}): required |difference| at most "
            f"{reference.tolerance.max_abs:g}, seen {error.max_abs:.2g} (at token "
            f"{error.worst_position})"
        )
        seen += values
        expected += right
    beyond = log_probabilities.compare(seen, expected).beyond(reference.tolerance)
    assert not beyond, f"{len(seen)} tokens, {reference.dtype}: {'; '.join(beyond)}"


@pytest.mark.parametrize("mistake", log_probabilities.SMALL_MISTAKES)
def test_no_known_small_mistake_is_in_the_log_probabilities(asker, reference, mistake):
    """Nearer to gpt-oss than to gpt-oss with a mistake smaller than the rounding of BF16."""
    variant, name = log_probabilities.SMALL_MISTAKES[mistake]
    ids = dict(log_probabilities.prompts())[name]
    answer = asker.ask(Request(tuple(ids), 1, prompt_log_probabilities=True))
    share = log_probabilities.share_of(
        asker.need(answer.prompt_log_probabilities, "prompt_logprobs"),
        log_probabilities.from_oracle(reference.checkpoint, ids),
        log_probabilities.from_oracle(reference.checkpoint, ids, variant),
    )
    assert abs(share) < 0.5, (
        f"{mistake} (prompt {name}): required a share below 0.5 (0 is gpt-oss, 1 the mistake), "
        f"seen {share:.2f}"
    )


def test_generated_log_probabilities_agree_with_the_oracle(asker, reference):
    """Decoding: every token that is told, at every place, and the best one chosen."""
    prompts = [(name, tuple(ids)) for name, ids in log_probabilities.prompts()]
    answers = asker.ask_together([Request(ids, 12) for _, ids in prompts])
    for (name, ids), answer in zip(prompts, answers, strict=True):
        wrong = oracle_disagrees(asker, reference, ids, answer)
        assert wrong is None, f"prompt {name} ({len(ids)} tokens) and 12 more: {wrong}"


def test_generation_past_the_original_context_agrees_with_the_oracle(asker, reference):
    """Across YaRN's original 4096 positions, 32 KV blocks and prefill in chunks."""
    ids = tuple(log_probabilities.long_prompt())
    answer = asker.ask(Request(ids, 12))
    wrong = oracle_disagrees(asker, reference, ids, answer)
    assert wrong is None, f"prompt of {len(ids)} tokens and 12 more: {wrong}"


def oracle_disagrees(asker, reference, prompt, answer):
    """What the oracle says against generated tokens, None for nothing."""
    return log_probabilities.generation_beyond(
        reference, prompt, asker.ids(answer), asker.positions(answer)
    )


# The same, asked in another way. Tokens are equal where the engine promises it; else they are
# judged within the noise, and both ways are right where two tokens are equally likely.


def test_alone_equals_in_a_batch(asker, continuations):
    """With ragged neighbours, all at once; the order of submission does not matter."""
    chosen = continuations.prompts.prompts
    for how, order in (("in a batch", chosen), ("in a batch in reverse order", chosen[::-1])):
        requests = [Request(p.text, p.tokens, salt=continuations.cold()) for p in order]
        answers = asker.ask_together(requests)
        wrong = [continuations.wrong(p, a, how) for p, a in zip(order, answers, strict=True)]
        assert not any(wrong), next(w for w in wrong if w)


def test_cold_equals_a_hit_of_the_prefix_cache(asker, continuations, prefix_cache_hits):
    """The same answer when the prompt's blocks are taken from the cache."""
    long = [p for p in continuations.prompts.prompts if p.name == "count past two windows"]
    for prompt in long:
        continuations.alone(prompt)
        salt = continuations.cold()
        before = prefix_cache_hits()
        answers = [asker.ask(Request(prompt.text, prompt.tokens, salt=salt)) for _ in range(2)]
        if before is not None and not (prefix_cache_hits() or 0) > before:
            raise NotRun("the prefix cache had no hit: it is off, or its blocks are too large")
        for how, answer in zip(("cold", "from the cache"), answers, strict=True):
            wrong = continuations.wrong(prompt, answer, how)
            assert wrong is None, wrong


def test_one_prefill_equals_a_chunked_one(asker, continuations):
    """Prompts that together exceed a step's budget of tokens are prefilled in pieces."""
    prompt = next(p for p in continuations.prompts.prompts if p.name == "count past two windows")
    continuations.alone(prompt)
    crowd = [Request(prompt.text, prompt.tokens, salt=continuations.cold()) for _ in range(8)]
    for answer in asker.ask_together(crowd):
        wrong = continuations.wrong(prompt, answer, "among eight long prompts")
        assert wrong is None, wrong


def test_streamed_ids_equal_those_at_once(asker, continuations):
    """Streaming changes nothing: neither tokens nor text nor their number."""
    for prompt in continuations.prompts.prompts[:3]:
        alone = continuations.alone(prompt)
        streamed = asker.stream(Request(prompt.text, prompt.tokens, salt=continuations.cold()))
        wrong = continuations.wrong(prompt, streamed, "streamed")
        assert wrong is None, wrong
        if streamed.completion_tokens is not None and streamed.ids is not None:
            assert streamed.completion_tokens == len(streamed.ids), (
                f"{prompt.name!r}: required usage of {len(streamed.ids)} tokens, "
                f"seen {streamed.completion_tokens}"
            )
        if streamed.ids == alone.ids:
            assert streamed.text == alone.text, (
                f"{prompt.name!r}: required the text {alone.text!r}, seen {streamed.text!r}"
            )


def test_a_prompt_of_ids_equals_its_text(asker, continuations):
    """The tokens that the server makes of a text, given as ids."""
    for prompt in continuations.prompts.prompts[:4]:
        ids = asker.need(continuations.alone(prompt).prompt_ids, "the prompt's token ids")
        answer = asker.ask(Request(ids, prompt.tokens, salt=continuations.cold()))
        wrong = continuations.wrong(prompt, answer, "as token ids")
        assert wrong is None, wrong


def test_repeated_equals_itself(asker, continuations):
    """The same request again and again."""
    prompt = continuations.prompts.prompts[1]
    for _ in range(3):
        answer = asker.ask(Request(prompt.text, prompt.tokens, salt=continuations.cold()))
        wrong = continuations.wrong(prompt, answer, "repeated")
        assert wrong is None, wrong


def test_before_equals_after_an_aborted_request(asker, continuations):
    """Clients that hang up, some in a batch, leave nothing behind."""
    prompts = continuations.prompts.prompts
    for prompt in prompts[2:5]:
        continuations.alone(prompt)
        asker.abort(Request(prompt.text, 200, salt=continuations.cold()))
    for prompt in prompts[2:5]:
        answer = asker.ask(Request(prompt.text, prompt.tokens, salt=continuations.cold()))
        wrong = continuations.wrong(prompt, answer, "after an aborted request")
        assert wrong is None, wrong


# Sanity that needs nothing but the server.


def test_texts_go_on_sensibly(continuations):
    """No loops, no `!!!!`, no noise where the text has one obvious continuation."""
    for prompt in continuations.prompts.prompts:
        if prompt.varied:
            alone = continuations.alone(prompt)
            own = alone.positions and [position.log_probability for position in alone.positions]
            seen = sanity.signs(alone.text, alone.ids, own)
            assert not seen, f"{prompt.name!r}: required a text that goes on, seen {seen}"


def test_answers_are_as_long_as_they_should_be(client, model, profile, conformance):
    """The mean length of answers to a fixed set of questions, and none cut off."""
    band = profile.correctness.mean_answer_tokens
    if band is None:
        raise NotRun(f"profile {profile.name} has no correctness.mean_answer_tokens")
    lengths = []
    for question in prompts.questions().questions:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0.0,
            max_tokens=profile.correctness.max_answer_tokens,
        )
        reason = answer.choices[0].finish_reason
        assert reason == "stop", f"{question!r}: required finish_reason stop, seen {reason}"
        assert answer.usage is not None, f"{question!r}: required usage, seen none"
        lengths.append(answer.usage.completion_tokens)
    mean = statistics.fmean(lengths)
    conformance.remark(f"answers have {mean:.1f} tokens on average")
    assert band.low <= mean <= band.high, (
        f"required a mean of {band.low:g} to {band.high:g} tokens, seen {mean:.1f} ({lengths})"
    )


# Against a trusted run, and questions with known answers: where a file was given.


@pytest.mark.asked_for("--record-golden")
def test_golden_file_is_recorded(recorder, conformance):
    """Two recordings of the same server have the same tokens; the first is kept."""
    path = conformance.settings.record_golden
    first, second = recorder(), recorder()
    for one, other in zip(first.answers, second.answers, strict=True):
        assert one.text == other.text, (
            f"prompt {one.name!r}: required the same answer twice, seen {one.text!r} and "
            f"{other.text!r}: this run is not fit to be trusted"
        )
    golden.save(first, path)
    conformance.remark(f"golden file: {path} ({len(first.answers)} prompts)")


@pytest.mark.asked_for("--golden")
def test_answers_agree_with_the_golden_file(asker, golden_file, golden_bound, conformance):
    """KL divergence, top-1 agreement and the worst token, against a trusted run."""
    found = golden.compare(
        golden_file, asker, prompts.continuations(), golden_bound, conformance.file.environment
    )
    conformance.remark(f"golden: {found.summary()}")
    for difference in found.differences:
        conformance.remark(f"golden: another environment: {difference}")
    beyond = found.beyond(golden_bound)
    assert not beyond, f"{'; '.join(beyond)} ({found.summary()})"


@pytest.mark.slow("starts a server for each of the profile's correctness.same_answers")
@pytest.mark.timeout(1800)
def test_other_configurations_give_the_same_answers(recorder, servers, profile, golden_bound):
    """Compiled = eager, with speculation = without, past the sliding window."""
    trusted = recorder()
    for name in profile.correctness.same_answers:
        if name == profile.under_test:
            continue
        asker = Asker(servers(name))
        found = golden.compare(trusted, asker, prompts.continuations(), golden_bound, {})
        beyond = found.beyond(golden_bound)
        assert not beyond, f"{name}: {'; '.join(beyond)} ({found.summary()})"


@pytest.mark.asked_for("--accuracy")
def test_accuracy(client, model, profile, conformance):
    """Exact match on questions of the user, with its 95 % interval; all outputs are kept."""
    questions = accuracy.load(conformance.settings.accuracy)

    def ask(question):
        limit = profile.correctness.max_answer_tokens
        if question.kind == "begins":
            text = complete(client, model, question.prompt, ids=False, max_tokens=16)
            return text.choices[0].text, text.usage and text.usage.completion_tokens
        chat = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question.prompt}],
            temperature=0.0,
            max_tokens=limit,
        )
        return chat.choices[0].message.content or "", chat.usage and chat.usage.completion_tokens

    outputs = accuracy.run(questions, ask)
    kept = conformance.directory / "accuracy.jsonl"
    accuracy.keep(outputs, kept)
    interval = accuracy.interval(outputs)
    conformance.remark(f"accuracy: {interval}; outputs: {kept}")
    if conformance.settings.accuracy_baseline is not None:
        before = accuracy.load_outputs(conformance.settings.accuracy_baseline)
        paired = accuracy.paired(before, outputs)
        conformance.remark(f"accuracy against the baseline: {paired}")
        assert not paired.worse, f"required: no worse than the baseline, seen: {paired} ({kept})"
    required = profile.correctness.accuracy
    if required is None:
        raise NotRun(f"profile {profile.name} has no correctness.accuracy; seen: {interval}")
    verdict = interval.against(required.at_least)
    if verdict is Verdict.INCONCLUSIVE:
        raise Inconclusive(f"required at least {required.at_least:.1%}, seen: {interval} ({kept})")
    assert verdict is Verdict.PASS, (
        f"required at least {required.at_least:.1%}, seen: {interval}; outputs: {kept}"
    )


# The protocol: parameters are obeyed, and answers say what they are.
#
# `api` holds every answer against the published schema, and against what must hold in any answer:
# one id, the model's name, each choice once, usage that adds up, no special token in a text.


def test_usage_equals_the_ids(api):
    """Usage counts the ids that came, at a natural end, at the limit, and over several choices."""
    asked = [
        (conversation.HARMONY_PROMPT, {"max_tokens": 200}),
        (PROMPT, {"max_tokens": 9}),
        ([PROMPT, "The capital of Japan is"], {"max_tokens": 5}),
        (PROMPT, {"max_tokens": 6, "n": 2, "temperature": 1.0}),
    ]
    for prompt, options in asked:
        answer = api.complete(prompt, return_token_ids=True, **options)
        counted = sum(len(choice["token_ids"]) for choice in answer["choices"])
        prompts = [
            c["prompt_token_ids"]
            for c in answer["choices"]
            if c["index"] % options.get("n", 1) == 0
        ]
        usage = answer["usage"]
        required = (sum(map(len, prompts)), counted)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == required, (
            f"{prompt!r} {options}: required: usage of {required} tokens, seen: {usage}"
        )


def test_usage_of_a_stream_equals_the_ids(api):
    """The last chunk of a stream counts the ids of all chunks."""
    seen = api.stream_completion(PROMPT, max_tokens=9, return_token_ids=True)
    counted = len(stream.completion_of(seen)[0]["token_ids"])
    usage = seen.chunks[-1].get("usage") or {}
    finish = stream.completion_of(seen)[0]["finish_reason"]
    required = 9 if finish == "length" else counted  # it may end by itself before
    assert usage.get("completion_tokens") == counted == required, (
        f"required: {required} ids and usage of as many, seen: {counted} ids and {usage}"
    )


def test_sixteen_tokens_by_default(api):
    """max_tokens of /v1/completions is 16 when nothing is said."""
    seen = api.complete(PROMPT, ignore_eos=True)["usage"]["completion_tokens"]
    assert seen == 16, f"required: 16 tokens, seen: {seen}"


def test_top_p_is_kept(api, profile):
    """With hardly any share left, the likeliest token is all that can be sampled."""
    for seed in range(3):
        for known in profile.correctness.known_answers:
            options = {"max_tokens": 8, "temperature": 2.0, "top_p": 1e-4, "seed": seed}
            text = api.complete(known.prompt, **options)["choices"][0]["text"]
            assert text.startswith(known.begins), (
                f"{known.prompt!r} {options}: required: {known.begins!r}, seen: {text!r}"
            )


def test_nothing_is_cut_off(api, profile):
    """A chat without a limit ends by itself, with its final message."""
    for chat in profile.correctness.chats:
        choice = api.chat(chat.question)["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"], (
            f"{chat.question!r}: required: a whole answer, seen: {choice}"
        )


def test_a_chat_obeys_temperature_and_seed(client, model, profile, attempts):
    """Hot sampling differs from seed to seed, and one seed repeats itself."""
    messages = [{"role": "user", "content": profile.correctness.chats[0].question}]

    def sampled(seed):
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=12, temperature=2.0, seed=seed
        )
        return conversation.said(answer.choices[0].message.model_dump())

    texts = {sampled(seed) for seed in range(6)}
    assert len(texts) > 1, f"required: seeds that differ at temperature 2, seen: {texts} six times"
    first = sampled(1234)
    second = first_that((sampled(1234) for _ in range(attempts)), lambda text: text == first)
    assert first == second, (
        f"required: the same text with the same seed, seen: {first!r}, {second!r}"
    )


def test_a_chat_obeys_stop(api, profile, conformance):
    """Nothing follows the stop string, and finish_reason says that it ended there."""
    chat = profile.correctness.chats[0]
    asked = {"max_tokens": profile.correctness.max_answer_tokens, "stop": [chat.contains]}
    choice = api.chat(chat.question, **asked)["choices"][0]
    _, found, rest = conversation.said(choice["message"]).partition(chat.contains)
    assert not rest, f"stop {chat.contains!r}: required: nothing after it, seen: {choice}"
    assert choice["finish_reason"] == "stop", f"required: stop, seen: {choice['finish_reason']}"
    if found:  # vLLM reads harmony from the tokens, of which the last one holds the stop string
        conformance.remark("a chat's text includes the stop string; OpenAI's API leaves it out")


def test_max_completion_tokens_limits_a_chat(api, profile):
    """The limit counts reasoning too, and finish_reason says that it was reached."""
    answer = api.chat(profile.correctness.chats[0].question, max_completion_tokens=5)
    seen = (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"])
    assert seen == (5, "length"), f"required: 5 tokens and length, seen: {seen}"


def tokens_of_a_natural_end(api, profile):
    """How many tokens an answer in harmony has, which ends by itself with a special token."""
    limit = profile.correctness.max_answer_tokens
    answer = api.complete(conversation.HARMONY_PROMPT, max_tokens=limit)
    finish = answer["choices"][0]["finish_reason"]
    assert finish == "stop", f"required: an end within {limit} tokens, seen: {finish}"
    return answer["usage"]["completion_tokens"]


def test_min_tokens_is_kept(api, profile):
    """No end before min_tokens, where the answer would have ended by itself."""
    api.capabilities.require("min_tokens")
    natural = tokens_of_a_natural_end(api, profile)
    answer = api.complete(
        conversation.HARMONY_PROMPT, min_tokens=natural + 6, max_tokens=natural + 12
    )
    seen = answer["usage"]["completion_tokens"]
    assert seen >= natural + 6, f"required: at least {natural + 6} tokens, seen: {seen}"


def test_ignore_eos_goes_on(api, profile):
    """The end-of-text token does not end the answer, and no special token is shown."""
    api.capabilities.require("ignore_eos")
    natural = tokens_of_a_natural_end(api, profile)
    answer = api.complete(conversation.HARMONY_PROMPT, ignore_eos=True, max_tokens=natural + 6)
    seen = (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"])
    assert seen == (natural + 6, "length"), f"required: {natural + 6} and length, seen: {seen}"


def test_a_stop_string_ends_the_text(api):
    """The text stops before the string, wherever that lies between tokens, streamed or not."""
    whole = api.complete(PROMPT, max_tokens=24)["choices"][0]["text"]
    place = next(i for i in range(3, len(whole)) if whole.index(whole[i : i + 4]) == i)
    stop = whole[place : place + 4]
    asked = {"max_tokens": 24, "stop": [stop, "no such text"]}
    at_once = api.complete(PROMPT, **asked)["choices"][0]
    streamed = stream.completion_of(api.stream_completion(PROMPT, **asked))[0]
    for seen in (at_once, streamed):
        assert (seen["text"], seen["finish_reason"]) == (whole[:place], "stop"), (
            f"stop {stop!r}: required: {whole[:place]!r} and stop, seen: {seen}"
        )


def test_a_stop_token_ends_the_answer(api):
    """Generation ends with the first of the stop tokens."""
    ids = api.complete(PROMPT, max_tokens=12, return_token_ids=True)["choices"][0]["token_ids"]
    place = next(i for i in range(2, len(ids)) if ids[i] not in ids[:i])
    seen = api.complete(PROMPT, max_tokens=12, return_token_ids=True, stop_token_ids=[ids[place]])
    choice = seen["choices"][0]
    assert choice["token_ids"][:place] == ids[:place] and len(choice["token_ids"]) <= place + 1, (
        f"required: {ids[: place + 1]}, seen: {choice['token_ids']}"
    )
    assert choice["finish_reason"] == "stop", f"required: stop, seen: {choice['finish_reason']}"


def test_special_tokens_never_leak(api):
    """Texts have none: at a natural end, and in a stream."""
    api.capabilities.require("hidden_special_tokens")
    texts = [
        api.complete(conversation.HARMONY_PROMPT, max_tokens=60)["choices"][0]["text"],
        *(
            choice["text"]
            for choice in stream.completion_of(
                api.stream_completion(conversation.HARMONY_PROMPT, max_tokens=60)
            )
        ),
    ]
    leaks = [found for text in texts for found in harmony.leaked(text)]
    assert not leaks, f"required: no special token, seen: {leaks} in {texts}"


def test_logit_bias_is_obeyed(api):
    """A ban of -100 keeps the likeliest token away; +100 puts another one in its place."""
    first = api.ids(PROMPT + api.complete(PROMPT, max_tokens=1)["choices"][0]["text"])[-1]
    other = api.ids(PROMPT + " London")[-1]
    for bias in ({str(first): -100}, {str(other): 100}):
        seen = api.complete(PROMPT, max_tokens=1, logit_bias=bias, return_token_ids=True)
        token = seen["choices"][0]["token_ids"][0]
        assert token != first and (token == other or str(other) not in bias), (
            f"logit_bias {bias}: required: another token than {first}, seen: {token}"
        )


def test_log_probabilities_name_the_chosen_token(api):
    """One entry a token; the chosen one, greedy, is the likeliest of those listed."""
    answer = api.complete(PROMPT, max_tokens=8, logprobs=2)
    choice, found = answer["choices"][0], answer["choices"][0]["logprobs"]
    count = answer["usage"]["completion_tokens"]
    lengths = {len(found.get(key) or []) for key in ("tokens", "token_logprobs", "top_logprobs")}
    assert lengths == {count}, f"required: {count} of each, seen: {lengths}"
    assert "".join(found["tokens"]) == choice["text"], (
        f"required: the tokens of {choice['text']!r}, seen: {found['tokens']}"
    )
    for token, value, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top.get(token) == value == max(top.values()), (
            f"required: {token!r} with {value} on top, seen: {top}"
        )


def test_log_probabilities_of_a_chat_are_whole(api, profile):
    """An entry for each generated token, its bytes its text, the chosen one among those listed."""
    answer = api.chat(
        profile.correctness.chats[0].question, max_tokens=12, logprobs=True, top_logprobs=2
    )
    entries = answer["choices"][0]["logprobs"]["content"]
    count = answer["usage"]["completion_tokens"]
    assert len(entries) == count, f"required: {count} entries, seen: {len(entries)}"
    for entry in entries:
        listed = [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]
        assert (entry["token"], entry["logprob"]) in listed, (
            f"required: the chosen token among those listed, seen: {entry}"
        )
        bad = [v for _, v in listed if not math.isfinite(v) or v > min(ROUNDING, entry["logprob"])]
        assert not bad, (
            f"required: finite, at most 0, none likelier than the chosen, seen: {bad} in {entry}"
        )
        if entry["bytes"] is not None and "\ufffd" not in entry["token"]:
            text = bytes(entry["bytes"]).decode("utf-8", "replace")
            assert text == entry["token"], (
                f"required: the bytes of {entry['token']!r}, seen: {text}"
            )


def test_echo_gives_the_prompt_back(api):
    """With echo the text begins with the prompt."""
    text = api.complete(PROMPT, max_tokens=2, echo=True)["choices"][0]["text"]
    assert text.startswith(PROMPT) and len(text) > len(PROMPT), (
        f"required: the prompt and more, seen: {text!r}"
    )


def test_each_choice_is_its_own(api):
    """n choices come with n indices, and are sampled apart, streamed or not."""
    asked = {"max_tokens": 12, "n": 4, "temperature": 2.0, "seed": 5}
    answer = api.complete(PROMPT, **asked)["choices"]
    streamed = stream.completion_of(api.stream_completion(PROMPT, **asked))
    for choices in (answer, streamed):
        texts = {choice["text"] for choice in choices}
        assert len(choices) == 4 and len(texts) > 1, f"required: 4 that differ, seen: {choices}"


def test_answers_belong_to_their_prompts(api, profile):
    """In the order of the prompts, in one request and one after the other."""
    known = profile.correctness.known_answers
    for _ in range(2):
        for item in known:
            text = api.complete(item.prompt, max_tokens=8)["choices"][0]["text"]
            assert text.startswith(item.begins), (
                f"{item.prompt!r}: required: {item.begins!r}, seen: {text!r}"
            )
    answer = api.complete([item.prompt for item in known], max_tokens=8)
    for choice in answer["choices"]:
        item = known[choice["index"]]
        assert choice["text"].startswith(item.begins), (
            f"{item.prompt!r}: required: {item.begins!r}, seen: {choice['text']!r}"
        )


# gpt-oss over harmony: chat and Responses.


def test_chats_end_in_a_final_message(api, profile):
    """pass^k: the final channel has the answer, the reasoning is apart, the end is its own."""
    field = api.capabilities.file.reasoning_field
    asked = [chat for chat in profile.correctness.chats for _ in range(profile.correctness.repeats)]
    limit = profile.correctness.max_answer_tokens
    answers = together(lambda chat: api.chat(chat.question, max_tokens=limit), asked)
    for chat, answer in zip(asked, answers, strict=True):
        choice = answer["choices"][0]
        content = choice["message"]["content"]
        seen = f"{chat.question!r}: seen {choice['message']}"
        assert content is not None, f"required: content, with usage {answer['usage']}; {seen}"
        assert chat.contains in content, f"required: content with {chat.contains!r}; {seen}"
        assert choice["finish_reason"] == "stop", f"required: stop; {seen}, {choice}"
        if field:
            reasoning = choice["message"].get(field)
            assert reasoning and reasoning not in content, f"required: reasoning apart; {seen}"


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_tokens_of_a_chat_are_harmony(api, profile, effort):
    """The first token is the channel token, and every message is begun and ended."""
    answer = api.chat(
        profile.correctness.chats[0].question,
        max_tokens=profile.correctness.max_answer_tokens,
        reasoning_effort=effort,
        return_token_ids=True,
    )
    choice = answer["choices"][0]
    ids = choice["token_ids"]
    wrong = harmony.violations(ids, finished=choice["finish_reason"] == "stop")
    assert not wrong, f"required: harmony, seen: {'; '.join(wrong)} in {ids[:12]}..."
    assert choice["message"]["content"] or ids[-1] != harmony.RETURN, (
        f"required: content where <|return|> was reached, seen: {choice['message']}"
    )
    counted = answer["usage"]["completion_tokens"]
    assert counted == len(ids), f"required: usage of {len(ids)} tokens, seen: {counted}"


def test_first_token_is_the_channel_token(api, profile):
    """The same by log-probabilities, for engines that give no ids of a chat."""
    answer = api.chat(profile.correctness.chats[0].question, max_tokens=3, logprobs=True)
    first = answer["choices"][0]["logprobs"]["content"][0]["token"]
    assert first == "<|channel|>", f"required: <|channel|>, seen: {first!r}"


def test_tool_calls_are_right_every_time(api, profile):
    """pass^k: one call of the right tool with the right arguments, and nothing in the content."""
    asked = [
        case for case in profile.correctness.tool_calls for _ in range(profile.correctness.repeats)
    ]
    tools, limit = conversation.tools(), profile.correctness.max_answer_tokens
    api.capabilities.require("tools")
    answers = together(lambda c: api.chat(c.question, tools=tools, max_tokens=limit), asked)
    for case, answer in zip(asked, answers, strict=True):
        choice = answer["choices"][0]
        wrong = conversation.wrong_call(choice["message"].get("tool_calls") or [], case)
        assert not wrong, wrong
        spilled = conversation.spilled(choice["message"])
        assert choice["finish_reason"] == "tool_calls" and not spilled, (
            f"{case.question!r}: required: tool_calls, and nothing of the call in the content, "
            f"seen: {choice}"
        )


def test_a_tool_can_be_named(api, profile):
    """tool_choice with a name calls that tool, whatever was asked."""
    chat, name = profile.correctness.chats[0], conversation.tools()[0]["function"]["name"]
    answer = api.chat(
        chat.question,
        tools=conversation.tools(),
        tool_choice=conversation.forced(name),
        max_tokens=profile.correctness.max_answer_tokens,
    )
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    assert [call["function"]["name"] for call in calls] == [name], (
        f"required: a call of {name}, seen: {answer['choices'][0]['message']}"
    )
    misfit = conversation.misfit(calls[0]["function"]["arguments"], name)
    assert not misfit, misfit


def test_a_tool_can_be_required(api, profile):
    """tool_choice "required" calls some tool, whatever was asked."""
    answer = api.chat(
        profile.correctness.chats[0].question,
        tools=conversation.tools(),
        tool_choice="required",
        max_tokens=profile.correctness.max_answer_tokens,
    )
    choice = answer["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    assert calls and choice["finish_reason"] == "tool_calls", f"required: a call, seen: {choice}"
    for call in calls:
        misfit = conversation.misfit(call["function"]["arguments"], call["function"]["name"])
        assert not misfit, misfit


def test_tools_can_be_forbidden(api, profile):
    """tool_choice "none" calls no tool, though one would help."""
    message = api.chat(
        profile.correctness.tool_calls[0].question,
        tools=conversation.tools(),
        tool_choice="none",
        max_tokens=profile.correctness.max_answer_tokens,
    )["choices"][0]["message"]
    assert not message.get("tool_calls"), f"required: no tool call, seen: {message}"


@pytest.mark.ability("parallel_tool_calls")
def test_tools_are_called_in_parallel(api, profile):
    """A question about two things is answered by two calls in one turn."""
    expected = profile.correctness.parallel_calls
    message = api.chat(
        profile.correctness.parallel_question,
        tools=conversation.tools(),
        max_tokens=profile.correctness.max_answer_tokens,
    )["choices"][0]["message"]
    assert len(message.get("tool_calls") or []) == expected, (
        f"required: {expected} calls, seen: {message}"
    )


def test_a_tool_result_is_answered(api, profile):
    """Question, call, result: then the answer says what the result says."""
    tools, limit = conversation.tools(), profile.correctness.max_answer_tokens
    for case in profile.correctness.tool_calls:
        call = api.chat(case.question, tools=tools, max_tokens=limit)["choices"][0]["message"]
        assert call.get("tool_calls"), f"{case.question!r}: required: a call, seen: {call}"
        messages = conversation.told_the_result(case, call)
        choice = api.chat(messages, tools=tools, max_tokens=limit)["choices"][0]
        assert case.answer_contains in (choice["message"]["content"] or ""), (
            f"{case.question!r}: required: {case.answer_contains!r}, seen: {choice}"
        )


@pytest.mark.parametrize("with_tools", [False, True], ids=["message", "tool call"])
def test_deltas_add_up_to_the_message(api, profile, with_tools):
    """A streamed chat is the same message as one that comes at once, with the same usage."""
    field = api.capabilities.file.reasoning_field
    known = profile.correctness
    options = {"max_tokens": known.max_answer_tokens}
    if with_tools:
        options["tools"] = conversation.tools()
    question = known.tool_calls[0].question if with_tools else known.chats[0].question
    whole = api.chat(question, **options)
    streamed = api.stream_chat(question, **options)
    message = stream.message_of(streamed, field)
    expected = conversation.plain(whole["choices"][0], field)
    wrong = invariants.of_tool_calls(
        [{"id": call["id"], "function": call} for call in message["tool_calls"]], options
    )
    assert not wrong, f"required: well-formed calls, seen: {wrong}"
    assert conversation.without_ids(message) == expected, (
        f"required: {expected}, seen in the stream: {message}"
    )
    usage = streamed.chunks[-1].get("usage")
    if api.capabilities.can("stream_usage"):
        seen = usage["completion_tokens"]
        assert seen == whole["usage"]["completion_tokens"], (
            f"required: usage {whole['usage']}, seen in the stream: {usage}"
        )


def test_a_response_has_reasoning_and_message(api, profile):
    """Responses: an item for the reasoning, one for the message, and the status completed."""
    chat = profile.correctness.chats[0]
    answer = api.respond(chat.question, max_output_tokens=profile.correctness.max_answer_tokens)
    assert answer["status"] == "completed", f"required: completed, seen: {answer['status']}"
    types = [item["type"] for item in answer["output"]]
    assert types == ["reasoning", "message"], f"required: reasoning and message, seen: {types}"
    text = "".join(part["text"] for part in answer["output"][-1]["content"])
    assert chat.contains in text, f"required: {chat.contains!r}, seen: {text!r}"


def test_a_response_that_was_cut_off_says_so(api, profile):
    """The status is incomplete, with the reason."""
    answer = api.respond(profile.correctness.chats[0].question, max_output_tokens=8)
    reason = (answer.get("incomplete_details") or {}).get("reason")
    assert (answer["status"], reason) == ("incomplete", "max_output_tokens"), (
        f"required: incomplete for max_output_tokens, seen: {answer['status']}, {reason}"
    )


def test_a_response_calls_a_tool_and_reads_its_result(api, profile):
    """A function_call item, and after its output a message that says what it says."""
    case, limit = profile.correctness.tool_calls[0], profile.correctness.max_answer_tokens
    tools = conversation.response_tools()
    answer = api.respond(case.question, tools=tools, max_output_tokens=limit)
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    seen = [(call["name"], json.loads(call["arguments"])) for call in calls]
    assert seen == [(case.tool, case.arguments)], (
        f"required: {case.tool}({case.arguments}), seen: {answer['output']}"
    )
    told = conversation.response_told_the_result(case, calls[0])
    after = api.respond(told, tools=tools, max_output_tokens=limit)["output"][-1]
    text = "".join(part["text"] for part in after.get("content") or [])
    assert case.answer_contains in text, f"required: {case.answer_contains!r}, seen: {after}"


def test_events_of_a_response_add_up(api, profile):
    """The events come in order, and their deltas are the text of the response at the end."""
    chat = profile.correctness.chats[0]
    seen = api.stream_response(
        chat.question, max_output_tokens=profile.correctness.max_answer_tokens
    )
    last = seen.chunks[-1]["response"]["output"][-1]
    text = "".join(part["text"] for part in last["content"])
    assert stream.response_text(seen) == text and chat.contains in text, (
        f"required: deltas of {text!r}, seen: {stream.response_text(seen)!r}"
    )
    whole = seen.chunks[-1]["response"]
    wrong = invariants.of_response(whole, {"model": api.model})
    assert not wrong, f"required: a response as specified at the end, seen: {'; '.join(wrong)}"
    told = stream.response_reasoning(seen)
    reasoning = "".join(
        part["text"]
        for item in whole["output"]
        if item["type"] == "reasoning"
        for part in item.get("content") or []
    )
    assert told in (None, reasoning), f"required: deltas of {reasoning!r}, seen: {told!r}"


# Structured output: every sample is valid, also where the model would rather say something else.

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Tokyo", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SAMPLES = 4
# The schema binds the final message only. At 1.0 a small model may end in a call of its own making,
# or with another token that ends a text, and has then said nothing that the schema is about.
CALM = 0.3


def test_json_schema_is_kept(api, profile):
    """Each sample of a chat has a final message, and that is JSON by the schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    options = {"max_tokens": profile.correctness.max_answer_tokens, "temperature": CALM}
    api.capabilities.require("json_schema")
    question = profile.correctness.chats[0].question
    answers = together(
        lambda seed: api.chat(question, response_format=wanted, seed=seed, **options),
        range(SAMPLES),
    )
    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert None not in contents, f"required: a final message in each answer, seen: {answers}"
    for content in contents:
        try:
            jsonschema.validate(json.loads(content), CITY)
        except (ValueError, jsonschema.ValidationError) as error:
            pytest.fail(f"required: JSON by the schema, seen: {content!r} ({error})")


def test_regex_is_kept(api):
    """Each sample of a completion matches, wholly."""
    pattern = "[A-Z]{3}-[0-9]{2,4}"
    body = api.capabilities.structured("regex", pattern)
    answers = together(
        lambda _: api.complete(PROMPT, max_tokens=32, temperature=1.0, **body), range(SAMPLES)
    )
    texts = [answer["choices"][0]["text"] for answer in answers]
    wrong = [text for text in texts if not re.fullmatch(pattern, text)]
    assert not wrong, f"required: a match of {pattern}, seen: {wrong}"


def test_choice_is_kept(api):
    """Each sample of a completion is one of the choices."""
    choices = ["London", "Rome"]
    body = api.capabilities.structured("choice", choices)
    answers = together(
        lambda _: api.complete(PROMPT, max_tokens=32, temperature=1.0, **body), range(SAMPLES)
    )
    texts = [answer["choices"][0]["text"] for answer in answers]
    wrong = [text for text in texts if text not in choices]
    assert not wrong, f"required: one of {choices}, seen: {wrong}"


def test_choice_is_kept_in_a_chat(api, judge, profile):
    """The final message of a chat is one of the choices, and nothing else."""
    choices = ["Paris", "Rome"]
    body = api.capabilities.structured("choice", choices)
    limit = profile.correctness.max_answer_tokens
    exchange = api.send_chat(profile.correctness.chats[0].question, max_tokens=limit, **body)
    content = exchange["choices"][0]["message"]["content"]
    leaks = harmony.leaked(content)
    known = leaks and judge.known("choice-in-a-chat", "special_token", repr(content))
    assert content in choices or known, f"required: one of {choices}, seen: {content!r}"


# API conformance: what the published reference specifies and implies; the rest is a note.


def test_models_are_as_published(api):
    """The list of models by its schema, with the one that is served."""
    listed = [entry["id"] for entry in api.models()["data"]]
    assert api.model in listed, f"required: {api.model}, seen: {listed}"


def test_answers_are_as_published(api, profile):
    """A completion and a chat by their schema, with log-probabilities and without."""
    question = profile.correctness.chats[0].question
    for options in ({"max_tokens": 3}, {"max_tokens": 3, "logprobs": 2}):
        if "logprobs" not in options or api.capabilities.can("logprobs"):
            api.complete(PROMPT, **options)
    for options in ({}, {"logprobs": True, "top_logprobs": 2}):
        if not options or api.capabilities.can("chat_logprobs"):
            api.chat(question, max_tokens=3, **options)


def test_the_sdk_reads_what_the_server_says(client, model, profile):
    """The openai package finds text and usage where it looks for them."""
    question = profile.correctness.chats[0].question
    limit = profile.correctness.max_answer_tokens
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=limit,
    )
    assert chat.choices[0].message.content and chat.usage.total_tokens > 0, (
        f"required: content and usage, seen: {chat}"
    )
    text = client.completions.create(model=model, prompt=PROMPT, max_tokens=4, temperature=0.0)
    assert text.choices[0].text and text.usage.completion_tokens <= 4, (
        f"required: text, seen: {text}"
    )


@pytest.mark.parametrize("logprobs", [None, 2], ids=["plain", "with log-probabilities"])
def test_streams_are_as_published(api, logprobs):
    """Chunks by their schema, one id, one finish_reason, usage in the last, [DONE] at the end."""
    options = {"max_tokens": 6} | ({"logprobs": logprobs} if logprobs else {})
    seen = api.stream_completion(PROMPT, **options)
    if logprobs and api.capabilities.can("stream_usage"):
        values = stream.log_probabilities(seen)
        count = seen.chunks[-1]["usage"]["completion_tokens"]
        assert len(values) == count and all(v is not None and math.isfinite(v) for v in values), (
            f"required: {count} log-probabilities in the stream, seen: {values}"
        )
    options = {"max_tokens": 6} | ({"logprobs": True, "top_logprobs": 2} if logprobs else {})
    api.stream_chat("What is the capital of France?", **options)


def test_answers_have_ids_and_times(api):
    """No two answers have one id, and they were made at a Unix time in seconds."""
    answers = [api.complete(PROMPT, max_tokens=1) for _ in range(3)]
    ids = {answer["id"] for answer in answers}
    assert len(ids) == len(answers), f"required: {len(answers)} ids, seen: {sorted(ids)}"
    made = [answer["created"] for answer in answers]
    assert all(1_500_000_000 < time < 10_000_000_000 for time in made), (
        f"required: seconds since 1970, seen: {made}"
    )


def test_a_stream_without_usage_has_none(api):
    """Usage comes only when it was asked for."""
    seen = api.stream_completion(PROMPT, usage=False, max_tokens=3)
    having = [chunk for chunk in seen.chunks if chunk.get("usage")]
    assert not having, f"required: no usage, seen: {having}"


@pytest.mark.api_cases
def test_request(judge, case):
    """A request is refused with a 4xx and an error object, or served; the server is well after."""
    wrong = judge(case)
    assert not wrong, f"{case.id} ({case.tier}: {case.why}): {wrong}"


def test_an_error_of_a_stream_is_an_error(api):
    """A request that is refused is refused with a status, not with a stream that ends badly."""
    body = {"model": api.model, "prompt": PROMPT, "max_tokens": -1, "stream": True}
    seen = api.send("POST", "/v1/completions", json.dumps(body).encode())
    assert seen.status in range(400, 500) and not schema.violations("error", seen.parsed()), (
        f"required: a 4xx with an error object, seen: {seen.status} {seen.text} {seen.failure}"
    )


def test_no_harmony_error_in_the_log(server):
    """Nothing of what was asked above broke harmony's parser. The last test of the level."""
    if server.log is None:
        raise NotRun("no log of the attached server; give --server-log")
    seen = harmony.errors_in(server.log)
    assert not seen, f"required: no HarmonyError, seen {len(seen)}: {seen[0]} in {server.log}"
