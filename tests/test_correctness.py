"""Correctness: the server's answers are right, complete, and the same however they are asked for.

All requests are greedy (temperature 0) unless the test is about sampling.
"""

from __future__ import annotations

import math
import statistics

import pytest

from sm121.answers import accuracy, golden, prompts, sanity
from sm121.answers.request import Asker, Request
from sm121.evidence import log_probabilities
from sm121.verdict import Inconclusive, NotRun, Verdict

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
            text = complete(client, model, question.prompt, max_tokens=16)
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
