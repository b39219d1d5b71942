"""Correctness: the server's answers are right and complete, and the same in every way of asking.
All requests are greedy (temperature 0) unless the test is about sampling."""

from __future__ import annotations

import pytest

from sm121.answers import exam, golden, log_probabilities, oracle_texts, prompts, published
from sm121.api import (
    chat_prompts,
    chats,
    compatibility,
    endings,
    harmony,
    logprobs,
    responses,
    sampling,
    stream,
    streaming,
    structured_output,
    tools,
)
from sm121.api.sdk import PROMPT
from sm121.client.completions import Asker
from sm121.core.level_settings import PRICES
from sm121.core.unmet import require
from sm121.core.verdict import NotRun

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]
contract = pytest.mark.severity("contract")
courtesy = pytest.mark.severity("courtesy")
ONE_WITH_TOOLS = pytest.param(True, marks=pytest.mark.ability("tools"))


def test_known_answers(sdk, profile):
    """The model knows facts that every capable checkpoint of this profile knows."""
    sdk.knows(exam.load(profile.correctness.exam).completions)


@pytest.mark.parametrize("tokens", [1, 7, 32])
def test_token_counts_are_exact(sdk, tokens):
    """The answer has as many tokens as were asked for, and usage gives that number."""
    endings.counts_are_exact(sdk, tokens)


def test_log_probabilities_are_finite(sdk):
    """Every log-probability is finite and not above 0. The chosen token's is there."""
    logprobs.are_finite(sdk)


@contract
def test_same_seed_same_tokens(sdk, attempts):
    """Sampling twice with one seed gives the same tokens. Another seed may differ."""
    sampling.seed_repeats_itself(sdk, attempts)


@contract
def test_seed_is_used(sdk):
    """The seed is used: eight seeds at a high temperature do not all give the same tokens."""
    options = {"max_tokens": 8, "temperature": 2.0, "extra_body": {"ignore_eos": True}}
    different = {tuple(sdk.complete(seed=n, **options).choices[0].token_ids) for n in range(8)}
    require(len(different) > 1, "different seeds can differ", f"{different} eight times")


@contract
def test_what_is_not_sent_is_as_promised(api, server, attempts):
    """What is sampled without parameters is what the checkpoint's, or neutral, ones give."""
    sampling.defaults_hold(api, sampling.defaults_promised(api, server), attempts)


def test_samples_follow_the_temperature(sampler):
    """At two temperatures, tokens come as often as their log-probabilities promise."""
    sampler.follows_the_temperature()


@contract
@pytest.mark.parametrize("cut", ["top_p", "top_k", "min_p"])
def test_samples_keep_the_cut(sampler, cut):
    """With top_p, top_k or min_p, only tokens come that it leaves, each as often as promised."""
    sampler.keeps_the_cut(cut)


@contract
@pytest.mark.parametrize("penalty", ["presence", "frequency", "repetition"])
def test_samples_are_penalised(sampler, penalty):
    """A token that came before loses as much as it should; one of the prompt where that counts."""
    sampler.penalises(f"{penalty}_penalty")


@contract
@pytest.mark.parametrize("parameter", ["bad_words", "allowed_token_ids"])
def test_samples_are_allowed_tokens(sampler, parameter):
    """No token comes that is banned, and those that are allowed come as often as promised."""
    sampler.restricts(parameter)


def test_samples_of_chats_follow_the_temperature(sampler):
    """At a temperature, tokens of chats come as often as their log-probabilities promise."""
    sampler.chats_obey("temperature")


@contract
@pytest.mark.parametrize("cut", ["top_p", "top_k", "min_p"])
def test_samples_of_chats_keep_the_cut(sampler, cut):
    """With top_p, top_k or min_p, only tokens come in chats that it leaves."""
    sampler.chats_obey(cut)


# Compare with the oracle (`sm121 golden`). docs/tables/ablation.md lists the detected defects.


@pytest.mark.ability("oracle")
def test_prompt_log_probabilities_agree_with_the_oracle(asker, reference, remark):
    """Prompt log-probabilities agree with the oracle across the sliding window and KV blocks."""
    remark(f"oracle: {log_probabilities.prompts_agree(asker, reference)}")


@pytest.mark.ability("oracle")
@pytest.mark.parametrize("mistake", oracle_texts.SMALL_MISTAKES)
def test_no_known_small_mistake_is_in_the_log_probabilities(asker, reference, mistake):
    """The server is nearer to gpt-oss than to one with a mistake below the rounding of BF16."""
    log_probabilities.mistake_is_absent(asker, reference, mistake)


@pytest.mark.ability("oracle")
def test_each_part_is_rounded_as_the_kernel_path_says(asker, reference, remark):
    """What is quantised beyond the checkpoint is, by its own rule, and is in all layers."""
    remark(f"oracle: {log_probabilities.roundings_are_absent(asker, reference)}")


@pytest.mark.ability("oracle")
@pytest.mark.parametrize("metric", PRICES)
def test_rounding_costs_what_the_profile_allows(price_of_rounding, metric):
    """The distance from the checkpoint's own mathematics is what its rounding may cost."""
    price_of_rounding(metric)


@pytest.mark.ability("oracle")
def test_generated_log_probabilities_agree_with_the_oracle(asker, reference, remark):
    """Decoding chooses the best token, and all log-probabilities at its place are right."""
    remark(f"oracle: {log_probabilities.generations_agree(asker, reference)}")


@pytest.mark.ability("oracle")
def test_generation_past_the_original_context_agrees_with_the_oracle(asker, reference):
    """Answers agree across YaRN's original 4096 positions, 32 KV blocks and chunked prefill."""
    log_probabilities.generations_agree(asker, reference, [oracle_texts.long_prompt()])


# The same request, sent in another way: equal tokens if the engine guarantees them, or noise.


def test_alone_equals_in_a_batch(continuations):
    """A prompt has one answer alone and in a batch with prompts of other lengths, in any order."""
    continuations.equal_in_a_batch()


def test_cold_equals_a_hit_of_the_prefix_cache(continuations, prefix_cache_hits, caches_prefixes):
    """A prompt has the same answer when its blocks come from the prefix cache."""
    continuations.equal_from_the_prefix_cache(prefix_cache_hits, is_on=caches_prefixes)


def test_a_hit_of_the_prefix_cache_saves_time(continuations, prefix_cache_hits, caches_prefixes):
    """A long prompt whose blocks come from the prefix cache takes at most half as long as cold."""
    continuations.hits_save_time(prefix_cache_hits, is_on=caches_prefixes)


def test_one_prefill_equals_a_chunked_one(continuations):
    """A prompt that is prefilled in chunks has the same answer."""
    continuations.equal_in_chunks()


def test_streamed_ids_equal_those_at_once(continuations):
    """Streaming does not change the tokens, the text, their number or how they end."""
    continuations.equal_streamed()


def test_a_prompt_of_ids_equals_its_text(continuations):
    """A prompt given as token ids has the same answer as its text."""
    continuations.equal_as_token_ids()


def test_a_token_at_a_time_equals_all_at_once(continuations):
    """An answer equals the one whose tokens are asked for one by one."""
    continuations.equal_token_by_token()


def test_repeated_equals_itself(continuations):
    """A request that is repeated has the same answer each time."""
    continuations.equal_repeated()


def test_before_equals_after_an_aborted_request(continuations):
    """Answers are the same after clients hung up, some of them in a batch."""
    continuations.equal_after_aborted_requests()


# Speculative decoding: if the server speculates, it is faster, and nothing else is different.


def test_speculation_keeps_the_targets_tokens(speculation, remark):
    """Each greedy token is the likeliest by a prefill of the same text, which nobody drafts."""
    remark(f"speculation: {speculation.tokens_are_the_targets()}")


def test_speculation_keeps_the_targets_log_probabilities(speculation, remark):
    """What is reported of a token is the target's log-probability, not the drafter's."""
    remark(f"speculation: {speculation.log_probabilities_are_the_targets()}")


def test_speculation_keeps_the_targets_distribution(speculation, remark):
    """The four likeliest tokens are sampled as promised, at a temperature and with top_p too."""
    remark(f"speculation: {speculation.samples_follow_the_target()}")


def test_speculation_ends_an_answer_anywhere(speculation):
    """max_tokens, stop tokens and stop strings end an answer between tokens accepted together."""
    speculation.ends_anywhere()


@contract
def test_speculation_keeps_a_form(speculation):
    """A form that leaves, at any token, what the target would say by itself is kept."""
    speculation.forms_are_kept()


@contract
def test_drafted_and_accepted_tokens_add_up(speculation, remark):
    """The server's counts of drafts and accepted tokens, by position too, make what it answered."""
    remark(f"speculation: {speculation.counts_add_up()}")


def test_drafts_are_accepted(speculation):
    """Some of what is drafted is accepted, at the end of a long answer and in eight at once too."""
    speculation.drafts_are_accepted()


# Sanity checks that need only the server.


def test_texts_go_on_sensibly(continuations):
    """Texts with one obvious continuation go on without loops, `!!!!` or noise."""
    continuations.go_on_sensibly()


@pytest.mark.ability("answer_length")
def test_answers_are_as_long_as_they_should_be(sdk, profile, remark):
    """Answers to fixed questions have the expected mean length, and none is cut off."""
    sdk.answer_lengths_fit(profile, remark)


# Against a trusted run, and on questions with known answers. These need a file from the user.


@pytest.mark.asked_for("--record-golden")
def test_golden_file_is_recorded(recorder, conformance, remark):
    """Two recordings of the same server have the same tokens. The first is kept."""
    first = recorder()
    path = conformance.settings.answers.record_golden
    golden.save_repeated(first, recorder(), path)
    remark(f"golden file: {path} ({len(first.answers)} prompts)")


@pytest.mark.asked_for("--golden")
def test_answers_agree_with_the_golden_file(asker, golden_file, golden_bound, conformance, remark):
    """KL divergence, top-1 agreement and the worst token agree with a trusted run."""
    environment = conformance.run.record.file.environment
    result = golden.compare(golden_file, asker, prompts.continuations(), golden_bound, environment)
    remark(f"golden: {result.summary()}")
    for difference in result.differences:
        remark(f"golden: another environment: {difference}")
    result.hold(golden_bound)


@pytest.mark.slow("starts a server for each of the profile's correctness.same_answers")
@pytest.mark.timeout(1800)
def test_other_configurations_give_the_same_answers(recorder, servers, profile, golden_bound):
    """Eager equals compiled, and speculation equals none, past the sliding window."""
    trusted = recorder()
    for name in profile.correctness.same_answers:
        if name != profile.under_test:
            asker = Asker(servers(name))
            result = golden.compare(trusted, asker, prompts.continuations(), golden_bound, {})
            result.hold(golden_bound, name)


@pytest.mark.asked_for("--scores")
@pytest.mark.timeout(0)  # each score has its own limit
def test_scores_are_as_published(server, profile, conformance, remark):
    """The profile's scores (GPQA, AIME) are near the published ones, by their 95 % intervals."""
    python = conformance.settings.answers.scores
    folder = conformance.run.record.directory / "scores"
    published.judge(profile, python, server.endpoint, folder, remark)


@pytest.mark.slow("asks OpenAI's 30 tool prompts five times, by chat and by Responses")
@pytest.mark.ability("tool_scores")
@pytest.mark.timeout(0)  # each score has its own limit
def test_tools_are_called_as_published(api, profile, conformance, remark):
    """Tools are called in every try of OpenAI's compatibility test, by chat and by Responses."""
    compatibility.judge(api, profile, conformance.run.record.directory / "scores", remark)


# The protocol: parameters are obeyed, and answers say what they are.
# `api` checks each answer against the published schema and the rules for all answers.


@contract
def test_usage_equals_the_ids(api, profile):
    """Usage counts the ids that came: at a natural end, at the limit, and over several choices."""
    endings.usage_equals_the_ids(api, profile.correctness)


@contract
def test_usage_of_a_stream_equals_the_ids(api):
    """Usage in the last chunk of a stream counts the ids of all chunks."""
    endings.usage_of_a_stream_equals_the_ids(api)


@contract
def test_sixteen_tokens_by_default(api):
    """max_tokens of /v1/completions is 16 by default."""
    api.capabilities.require("default_length")
    counted = api.complete(PROMPT, ignore_eos=True)["usage"]["completion_tokens"]
    require(counted == 16, "16 tokens", counted)


@contract
def test_nothing_is_cut_off(api, profile):
    """A chat without a limit ends by itself, with its final message."""
    endings.chats_end_by_themselves(api, profile.correctness)


@contract
def test_a_chat_obeys_temperature_and_seed(sdk, profile, attempts):
    """A high temperature differs from seed to seed. One seed repeats itself."""
    sampling.chat_obeys_temperature_and_seed(sdk, profile.correctness, attempts)


@contract
@pytest.mark.parametrize("form", ["streamed completion", "streamed chat", "response"])
def test_each_form_obeys_temperature_and_top_p(api, form):
    """Answers differ at temperature 1; not at 0, nor where top_p leaves one token."""
    sampling.form_obeys_temperature_and_top_p(api, form)


@contract
def test_a_chat_obeys_stop(api, profile, remark):
    """Nothing follows the stop string, and finish_reason says that the chat ended there."""
    endings.chat_obeys_stop(api, profile.correctness, remark)


@contract
def test_max_completion_tokens_limits_a_chat(api, profile):
    """The limit counts reasoning too, and finish_reason says that it was reached."""
    answer = api.chat(profile.correctness.chats[0].question, max_completion_tokens=5)
    ending = (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"])
    require(ending == (5, "length"), "5 tokens and length", ending)


@contract
def test_min_tokens_is_kept(api, profile):
    """No answer ends before min_tokens, and one that would end anywhere ends right there."""
    endings.min_tokens_is_kept(api, profile.correctness)


@contract
def test_ignore_eos_goes_on(api, profile):
    """The end-of-text token does not end the answer, and no special token is shown."""
    endings.ignore_eos_goes_on(api, profile.correctness)


@contract
def test_a_stop_string_ends_the_text(api):
    """The text stops before the string, also between tokens, streamed or not."""
    endings.stop_string_ends_the_text(api)


@contract
def test_a_stop_token_ends_the_answer(api):
    """Generation ends with the first of the stop tokens."""
    endings.stop_token_ends_the_answer(api)


def test_special_tokens_never_leak(api, profile):
    """No text has a special token, neither at a natural end nor in a stream."""
    endings.special_tokens_are_hidden(api, profile.correctness)


@contract
def test_logit_bias_is_obeyed(api):
    """A bias of -100 bans the likeliest token. A bias of 50 puts another one in its place."""
    sampling.logit_bias_is_obeyed(api)


@contract
def test_log_probabilities_name_the_chosen_token(api):
    """There is one entry a token. The greedy choice is the likeliest of those listed."""
    logprobs.name_the_chosen_token(api)


@pytest.mark.parametrize("in_chats", [False, True], ids=["completions", "chats"])
def test_greedy_takes_the_likeliest_token(api, in_chats):
    """At temperature 0 each token is the likeliest, in open texts and in dozens of chats."""
    logprobs.greedy_is_the_likeliest(api, in_chats=in_chats)


@contract
def test_log_probabilities_of_a_chat_are_whole(api, profile):
    """Each generated token has an entry with the bytes of its text, and is among those listed."""
    logprobs.of_a_chat_are_whole(api, profile.correctness)


@contract
def test_echo_gives_the_prompt_back(api):
    """With echo the text begins with the prompt."""
    text = api.complete(PROMPT, max_tokens=2, echo=True)["choices"][0]["text"]
    whole = text.startswith(PROMPT) and len(text) > len(PROMPT)
    require(whole, "the prompt and more", repr(text))


def test_each_choice_is_its_own(api):
    """n choices have n indices and are sampled separately, streamed or not."""
    options = {"max_tokens": 12, "n": 6, "temperature": 2.0, "seed": 5}
    answer = api.complete(PROMPT, **options)["choices"]
    streamed = stream.completion_of(api.stream_completion(PROMPT, **options))
    for choices in (answer, streamed):
        texts = {choice["text"] for choice in choices}
        require(len(choices) == 6 and len(texts) > 1, "6 that differ", choices)


def test_answers_belong_to_their_prompts(api, profile):
    """Answers come in the order of the prompts, in one request and in several."""
    sampling.answers_belong_to_their_prompts(api, profile.correctness)


# Chat and Responses; for gpt-oss over harmony.


def test_chats_end_in_a_final_message(api, profile):
    """pass^k: the final channel has the answer, the reasoning is apart, the chat ends by itself."""
    endings.chats_end_in_a_final_message(api, profile.correctness)


@pytest.mark.ability("harmony")
@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_tokens_of_a_chat_are_harmony(api, profile, effort):
    """The first token is the channel token, and every message has a begin and an end."""
    endings.chats_are_harmony(api, profile.correctness, effort)


@pytest.mark.ability("harmony")
def test_first_token_is_the_channel_token(api, profile):
    """A chat begins with the channel token. Log-probabilities show it where there are no ids."""
    endings.begins_with_the_channel_token(api, profile.correctness)


# Compare the server's prompt for each chat of fixtures/api/chats.toml with oss-harmony's.


@pytest.mark.ability("harmony")
@pytest.mark.parametrize("chat", chats.load_chats(), ids=str)
def test_a_chat_becomes_its_harmony(api, server_environment, chat):
    """Every part of a chat reaches the model, earlier reasoning does not, and text stays text."""
    chat_prompts.becomes_its_harmony(api, chat, server_environment)


@pytest.mark.ability("harmony")
@pytest.mark.parametrize("chat", chat_prompts.TELLING)
def test_an_answer_is_to_its_chat(api, agreement_bound, server_environment, chat):
    """The answer is the one of the chat's own tokens; without ids, it depends on the chat."""
    chat = chats.find_chat(chat)
    chat_prompts.answer_is_to_the_chat(api, chat, agreement_bound, server_environment)


@pytest.mark.ability("harmony")
@pytest.mark.parametrize("chat", responses.IN_RESPONSES)
def test_a_response_is_to_its_harmony(api, chat):
    """Instructions, turns, calls and results of a response reach the model, as usage counts."""
    responses.becomes_its_harmony(api, chats.find_chat(chat))


@contract
def test_a_response_goes_on_from_another(api, server, profile, remark):
    """With previous_response_id the turns before reach the model."""
    responses.goes_on_from_another(api, profile.correctness, remark, server.configuration)


@contract
@pytest.mark.ability("tools")
def test_tool_calls_are_right_every_time(api, profile):
    """pass^k: one call of the right tool with the right arguments, and no content."""
    tools.called_every_time(api, profile.correctness)


@contract
@pytest.mark.ability("tools")
def test_a_tool_can_be_named(api, profile):
    """tool_choice with a name calls that tool, whatever was asked."""
    tools.named(api, profile.correctness)


@contract
@pytest.mark.ability("tools")
@pytest.mark.parametrize("name", ["get-weather", "weather.get", "mcp__weather-eu__get"])
def test_a_tool_keeps_its_name(api, profile, name):
    """A tool whose name has a hyphen or a dot, as those of MCP servers, is called by that name. A
    server may refuse the dot."""
    tools.named_as_offered(api, profile.correctness, name)


@contract
@pytest.mark.ability("tools")
def test_a_tool_can_be_required(api, profile):
    """tool_choice "required" calls some tool, whatever was asked."""
    tools.required(api, profile.correctness)


@contract
@pytest.mark.ability("tools")
def test_tools_can_be_forbidden(api, profile):
    """tool_choice "none" calls no tool, even if one would help."""
    tools.forbidden(api, profile.correctness)


@contract
@pytest.mark.ability("parallel_tool_calls")
def test_tools_are_called_in_parallel(api, profile):
    """A question about two things is answered by two calls in one turn."""
    tools.called_in_parallel(api, profile.correctness)


@contract
@pytest.mark.ability("tools")
def test_a_tool_result_is_answered(api, profile):
    """After question, call and result, the answer says what the result says."""
    tools.results_are_answered(api, profile.correctness)


@contract
@pytest.mark.parametrize("with_tools", [False, ONE_WITH_TOOLS], ids=["message", "tool call"])
def test_deltas_add_up_to_the_message(api, profile, with_tools):
    """A streamed chat is the same message, with the same usage, as one that is not streamed."""
    streaming.deltas_add_up(api, profile.correctness, with_tools=with_tools)


@contract
@pytest.mark.parametrize("kind", ["completion", "chat", "response"])
def test_a_stream_keeps_every_character(api, kind, attempts):
    """A text beyond ASCII is the same streamed and at once, also where tokens cut characters."""
    streaming.keeps_every_character(api, kind, attempts)


@contract
def test_a_response_has_reasoning_and_message(api, profile):
    """A response has a reasoning item, a message item and the status completed."""
    responses.has_reasoning_and_message(api, profile.correctness)


@contract
def test_a_response_that_was_cut_off_says_so(api, profile):
    """A response that was cut off is incomplete, with the reason, and usage counts to the limit."""
    responses.is_incomplete_at_the_limit(api, profile.correctness)


@contract
@pytest.mark.ability("tools")
def test_a_response_calls_a_tool_and_reads_its_result(api, profile):
    """A response has a function_call item. After its output a message says what the output says."""
    responses.calls_and_reads_the_result(api, profile.correctness)


@contract
def test_events_of_a_response_add_up(api, judge, profile, attempts):
    """The events come in order, and their deltas add up to the response that comes at once."""
    responses.events_add_up(api, judge, profile.correctness, attempts)


# Structured output: every sample is valid, also where the model prefers other text.


@contract
def test_json_schema_is_kept(api, profile):
    """Each sample of a chat has a final message that is JSON by the schema."""
    structured_output.keeps_json_schema(api, profile.correctness)


@contract
def test_regex_is_kept(api):
    """Each sample of a completion matches as a whole."""
    structured_output.keeps(api, "regex", "[A-Z]{3}-[0-9]{2,4}")


@contract
def test_choice_is_kept(api):
    """Each sample of a completion is one of the choices."""
    structured_output.keeps(api, "choice", ["London", "Rome"])


@contract
def test_choice_is_kept_in_a_chat(api, judge, profile):
    """The final message of a chat is one of the choices, and nothing else."""
    structured_output.keeps_choice_in_a_chat(api, judge, profile.correctness)


# The profile's exam (fixtures/exams): each question says what counts as right, each section how
# many may be missed. An answer that is empty, cut off or a loop is never allowed.


@pytest.mark.ability("exam")
def test_facts_are_known(candidate):
    """Asked as chats, as many of the exam's facts are known as it requires."""
    candidate.passes("facts")


@pytest.mark.ability("exam")
def test_dialogues_are_followed(candidate):
    """Over several turns, answers use what was said, corrected, instructed or counted before."""
    candidate.passes("dialogues")


@pytest.mark.ability("exam")
def test_the_right_tools_are_called(candidate):
    """The right tools, or none, are called with right arguments, and answers use the results."""
    candidate.passes("tools")


@pytest.mark.ability("exam")
def test_answers_in_a_form_are_right(candidate):
    """Structured output keeps its form every time, and its content is right."""
    candidate.passes("formats")


@pytest.mark.ability("long_document")
@pytest.mark.timeout(3600)
def test_a_long_chat_with_tools_stays_whole(candidate):
    """In a chat with many calls and 24,000 tokens of results no answer is empty, cut off or a
    loop."""
    candidate.converses(24_000)


@pytest.mark.ability("long_document")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("length", [8_000, 32_000, 100_000])
def test_long_documents_are_read(candidate, length):
    """Facts at five depths of a document are found, one of them only by way of another."""
    candidate.recalls(length)


# API conformance: what the published reference specifies and implies. The rest is a remark.


@contract
def test_models_are_as_published(api):
    """The list of models follows its schema and has the served model."""
    listed = [entry["id"] for entry in api.models()["data"]]
    require(api.model in listed, api.model, listed)


@contract
def test_answers_are_as_published(api, profile):
    """A completion and a chat follow their schema, with log-probabilities and without."""
    question = profile.correctness.chats[0].question
    for options in ({"max_tokens": 3}, {"max_tokens": 3, "logprobs": 2}):
        if "logprobs" not in options or api.capabilities.can("logprobs"):
            api.complete(PROMPT, **options)
    for options in ({}, {"logprobs": True, "top_logprobs": 2}):
        if not options or api.capabilities.can("chat_logprobs"):
            api.chat(question, max_tokens=3, **options)


@contract
def test_the_sdk_reads_what_the_server_says(sdk, profile):
    """The openai package finds text and usage where it looks for them."""
    sdk.finds_text_and_usage(profile.correctness)


@contract
@pytest.mark.parametrize("logprobs", [None, 2], ids=["plain", "with log-probabilities"])
def test_streams_are_as_published(api, logprobs):
    """Chunks follow their schema: one id, one finish_reason, usage in the last, then [DONE]."""
    streaming.is_as_published(api, logprobs)


@courtesy
def test_answers_have_ids_and_times(api, profile):
    """No id of an answer, an item or a call comes twice. Times are Unix times in seconds."""
    endings.are_told_apart(api, profile.correctness)


@contract
def test_a_stream_without_usage_has_none(api):
    """A stream has usage only when the request asked for it."""
    chunks = api.stream_completion(PROMPT, usage=False, max_tokens=3)
    having = [chunk for chunk in chunks.chunks if chunk.get("usage")]
    require(not having, "no usage", having)


@contract
@pytest.mark.api_cases
def test_request(judge, case):
    """A request is served, or refused with a 4xx and an error object; all is then as before."""
    judge(case)


@contract
def test_an_error_of_a_stream_is_an_error(api):
    """A bad streaming request is refused with a status, not with a stream that breaks off."""
    streaming.refuses_with_a_status(api)


@pytest.mark.ability("harmony")
def test_no_harmony_error_in_the_log(server):
    """No request of this level, of which this is the last test, broke harmony's parser."""
    if server.log is None:
        raise NotRun(server.why_no_log)
    lines = harmony.errors_in(server.log)
    evidence = [*lines[:1], server.log]
    require(not lines, "no HarmonyError", len(lines), evidence=evidence)
