"""Correctness: the server's answers are right and complete, however a request is sent.

All requests are greedy (temperature 0) unless the test is about sampling.
"""

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
CHATS = pytest.mark.ability("chats")
FORMS = [
    "streamed completion",
    pytest.param("streamed chat", marks=CHATS),
    pytest.param("response", marks=CHATS),
]
KINDS = ["completion", pytest.param("chat", marks=CHATS), pytest.param("response", marks=CHATS)]


def test_known_answers(sdk, profile):
    """The model gives the known answers to the profile's prompts."""
    sdk.knows(exam.load(profile.correctness.exam).completions)


@pytest.mark.parametrize("tokens", [1, 7, 32])
def test_token_counts_are_exact(sdk, tokens):
    """An answer has exactly the requested number of tokens, and usage reports that number."""
    endings.counts_are_exact(sdk, tokens)


def test_log_probabilities_are_finite(sdk):
    """Each log-probability is finite and at most 0, and the chosen token has one."""
    logprobs.are_finite(sdk)


@contract
def test_same_seed_same_tokens(sdk, attempts):
    """Two samples with the same seed have the same tokens. Another seed may give other tokens."""
    sampling.seed_repeats_itself(sdk, attempts)


@contract
def test_seed_is_used(sdk):
    """Eight seeds at a high temperature do not all give the same tokens."""
    options = {"max_tokens": 8, "temperature": 2.0, "extra_body": {"ignore_eos": True}}
    different = {tuple(sdk.complete(seed=n, **options).choices[0].token_ids) for n in range(8)}
    require(len(different) > 1, "answers that differ by the seed", f"{different} eight times")


@contract
def test_what_is_not_sent_is_as_promised(api, server, attempts):
    """Without sampling parameters, the engine uses the default values that it documents."""
    sampling.defaults_hold(api, sampling.documented_defaults(api, server), attempts)


def test_samples_follow_the_temperature(sampler):
    """At two temperatures, each token appears as often as its log-probability predicts."""
    sampler.follows_the_temperature()


@contract
@pytest.mark.parametrize("cut", ["top_p", "top_k", "min_p"])
def test_samples_keep_the_cut(sampler, cut):
    """With top_p, top_k or min_p, only allowed tokens appear, each as often as predicted."""
    sampler.keeps_the_cut(cut)


@contract
@pytest.mark.parametrize("penalty", ["presence", "frequency", "repetition"])
def test_samples_are_penalised(sampler, penalty):
    """A penalty lowers a token's probability by the right amount."""
    sampler.penalises(f"{penalty}_penalty")


@contract
@pytest.mark.parametrize("parameter", ["bad_words", "allowed_token_ids"])
def test_samples_are_allowed_tokens(sampler, parameter):
    """No banned token appears, and each allowed token appears as often as predicted."""
    sampler.restricts(parameter)


@CHATS
def test_samples_of_chats_follow_the_temperature(sampler):
    """In chats, each token appears as often as its log-probability predicts."""
    sampler.chats_obey("temperature")


@contract
@CHATS
@pytest.mark.parametrize("cut", ["top_p", "top_k", "min_p"])
def test_samples_of_chats_keep_the_cut(sampler, cut):
    """In chats with top_p, top_k or min_p, no excluded token appears."""
    sampler.chats_obey(cut)


# Compare with the oracle (`sm121 golden`). docs/tables/ablation.md lists the detected defects.


@pytest.mark.ability("oracle")
@pytest.mark.parametrize("mistake", oracle_texts.SMALL_MISTAKES)
def test_no_known_small_mistake_is_in_the_log_probabilities(asker, reference, mistake):
    """The log-probabilities show no known small fault whose effect is below BF16 rounding."""
    log_probabilities.mistake_is_absent(asker, reference, mistake)


@pytest.mark.ability("oracle")
def test_each_part_is_rounded_as_the_kernel_path_says(asker, reference, remark):
    """Each part of the model is rounded in the format that the kernel path shows, in all layers."""
    remark(f"oracle: {log_probabilities.roundings_are_absent(asker, reference)}")


@pytest.mark.ability("oracle")
@pytest.mark.parametrize("metric", PRICES)
def test_rounding_costs_what_the_profile_allows(price_of_rounding, metric):
    """The server's rounding costs no more accuracy than the profile allows."""
    price_of_rounding(metric)


@pytest.mark.ability("oracle")
def test_generated_log_probabilities_agree_with_the_oracle(asker, reference, remark):
    """Generated tokens and their log-probabilities agree with the oracle."""
    remark(f"oracle: {log_probabilities.generations_agree(asker, reference)}")


@pytest.mark.ability("oracle")
def test_generation_past_the_original_context_agrees_with_the_oracle(asker, reference):
    """Answers agree with the oracle beyond YaRN's original 4096 positions."""
    log_probabilities.generations_agree(asker, reference, [oracle_texts.long_prompt()])


# Send the same request in another way. Tokens must be equal, or within the engine's noise.


def test_alone_equals_in_a_batch(continuations):
    """A prompt has the same answer alone and in a batch with prompts of other lengths."""
    continuations.equal_in_a_batch()


def test_cold_equals_a_hit_of_the_prefix_cache(continuations, prefix_cache_hits, caches_prefixes):
    """A prompt has the same answer if its blocks come from the prefix cache."""
    continuations.equal_from_the_prefix_cache(prefix_cache_hits, is_on=caches_prefixes)


def test_a_hit_of_the_prefix_cache_saves_time(continuations, prefix_cache_hits, caches_prefixes):
    """A long prompt takes at most half the time if its beginning is in the prefix cache."""
    continuations.hits_save_time(prefix_cache_hits, is_on=caches_prefixes)


def test_one_prefill_equals_a_chunked_one(continuations):
    """A prompt has the same answer if it is prefilled in chunks."""
    continuations.equal_in_chunks()


def test_streamed_ids_equal_those_at_once(continuations):
    """A streamed answer has the tokens, text, count and finish reason of the plain answer."""
    continuations.equal_streamed()


def test_a_prompt_of_ids_equals_its_text(continuations):
    """A prompt that is sent as token ids has the same answer as its text."""
    continuations.equal_as_token_ids()


def test_a_token_at_a_time_equals_all_at_once(continuations):
    """Requesting one token at a time gives the same answer as one request for all tokens."""
    continuations.equal_token_by_token()


def test_repeated_equals_itself(continuations):
    """A repeated request has the same answer each time."""
    continuations.equal_repeated()


def test_before_equals_after_an_aborted_request(continuations):
    """Answers do not change after clients disconnected, some of them in a batch."""
    continuations.equal_after_aborted_requests()


# Speculative decoding must make the server faster, and must not change an answer.


def test_speculation_keeps_the_targets_tokens(speculation, remark):
    """With speculation, greedy tokens are the likeliest ones if the text is sent as a prompt."""
    remark(f"speculation: {speculation.tokens_are_the_targets()}")


def test_speculation_keeps_the_targets_log_probabilities(speculation, remark):
    """With speculation, log-probabilities are the target model's, not the drafter's."""
    remark(f"speculation: {speculation.log_probabilities_are_the_targets()}")


def test_speculation_keeps_the_targets_distribution(speculation, remark):
    """With speculation, the four likeliest tokens are sampled as the target model predicts."""
    remark(f"speculation: {speculation.samples_follow_the_target()}")


def test_speculation_ends_an_answer_anywhere(speculation):
    """With speculation, an answer can end between tokens accepted in the same step."""
    speculation.ends_anywhere()


@contract
def test_speculation_keeps_a_form(speculation):
    """With speculation, structured output is valid even if the drafts contain other tokens."""
    speculation.forms_are_kept()


@contract
def test_drafted_and_accepted_tokens_add_up(speculation, remark):
    """The counters of drafted and accepted tokens add up to the tokens of the answers."""
    remark(f"speculation: {speculation.counts_add_up()}")


def test_drafts_are_accepted(speculation):
    """Drafted tokens are accepted, also late in a long answer and in concurrent answers."""
    speculation.drafts_are_accepted()


# Sanity checks that need only the server.


def test_texts_go_on_sensibly(continuations):
    """Texts with an obvious continuation are continued without loops, `!!!!` or noise."""
    continuations.go_on_sensibly()


@pytest.mark.ability("answer_length")
def test_answers_are_as_long_as_they_should_be(sdk, profile, remark):
    """Answers to fixed questions have the expected mean length, and none is truncated."""
    sdk.answer_lengths_fit(profile, remark)


# Comparisons with a golden file and with published scores. They need a file from the user.


@pytest.mark.asked_for("--record-golden")
def test_golden_file_is_recorded(recorder, conformance, remark):
    """Two recordings of one server have the same tokens. The golden file contains the first one."""
    first = recorder()
    path = conformance.settings.answers.record_golden
    golden.save_repeated(first, recorder(), path)
    remark(f"golden file: {path} ({len(first.answers)} prompts)")


@pytest.mark.asked_for("--golden")
def test_answers_agree_with_the_golden_file(asker, golden_file, golden_bound, conformance, remark):
    """The differences from the golden file are within the profile's limits."""
    environment = conformance.run.record.file.environment
    result = golden.compare(golden_file, asker, prompts.continuations(), golden_bound, environment)
    remark(f"golden: {result.summary()}")
    for difference in result.differences:
        remark(f"golden: another environment: {difference}")
    result.hold(golden_bound)


@pytest.mark.slow("starts a server for each of the profile's correctness.same_answers")
@pytest.mark.timeout(1800)
def test_other_configurations_give_the_same_answers(recorder, servers, profile, golden_bound):
    """Answers are the same in eager and compiled mode, with and without speculation."""
    trusted = recorder()
    for name in profile.correctness.same_answers:
        if name != profile.under_test:
            asker = Asker(servers(name))
            result = golden.compare(trusted, asker, prompts.continuations(), golden_bound, {})
            result.hold(golden_bound, name)


@pytest.mark.asked_for("--scores")
@pytest.mark.timeout(0)  # each score has its own time limit
def test_scores_are_as_published(server, profile, conformance, remark):
    """The 95 % intervals of the profile's scores (GPQA, AIME) reach the required values."""
    python = conformance.settings.answers.scores
    folder = conformance.run.record.directory / "scores"
    published.judge_scores(profile, python, server.endpoint, folder, remark)


@pytest.mark.slow("asks OpenAI's 30 tool prompts five times, by chat and by Responses")
@pytest.mark.ability("tool_scores")
@pytest.mark.timeout(0)  # each score has its own time limit
def test_tools_are_called_as_published(api, profile, conformance, remark):
    """The model calls the right tool in each try of OpenAI's compatibility test."""
    compatibility.judge_scores(api, profile, conformance.run.record.directory / "scores", remark)


# The protocol: the server obeys parameters, and each answer is described correctly.
# `api` checks each answer against the published schema and the rules for all answers.


@contract
def test_usage_equals_the_ids(api, profile):
    """The token counts in usage equal the number of ids, for each finish_reason and with n > 1."""
    endings.usage_equals_the_ids(api, profile.correctness)


@contract
def test_usage_of_a_stream_equals_the_ids(api):
    """Usage in the last chunk of a stream equals the number of ids in all chunks."""
    endings.usage_of_a_stream_equals_the_ids(api)


@contract
def test_sixteen_tokens_by_default(api):
    """The default of max_tokens in /v1/completions is 16."""
    api.capabilities.require("default_length")
    counted = api.complete(PROMPT, ignore_eos=True)["usage"]["completion_tokens"]
    require(counted == 16, "16 tokens", counted)


@contract
@CHATS
def test_nothing_is_cut_off(api, profile):
    """A chat without a token limit ends by itself, with its final message."""
    endings.chats_end_by_themselves(api, profile.correctness)


@contract
@CHATS
def test_a_chat_obeys_temperature_and_seed(sdk, profile, attempts):
    """At a high temperature, chats are equal with the same seed, and differ with other seeds."""
    sampling.chat_obeys_temperature_and_seed(sdk, profile.correctness, attempts)


@contract
@pytest.mark.parametrize("form", FORMS)
def test_each_form_obeys_temperature_and_top_p(api, form):
    """Answers differ at temperature 1, but not at 0, and not if top_p allows only one token."""
    sampling.form_obeys_temperature_and_top_p(api, form)


@contract
@CHATS
def test_a_chat_obeys_stop(api, profile, remark):
    """A chat ends at its stop string, and finish_reason is `stop`."""
    endings.chat_obeys_stop(api, profile.correctness, remark)


@contract
@CHATS
def test_max_completion_tokens_limits_a_chat(api, profile):
    """max_completion_tokens also counts reasoning, and at the limit finish_reason is `length`."""
    answer = api.chat(profile.correctness.chats[0].question, max_completion_tokens=5)
    ending = (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"])
    require(ending == (5, "length"), "5 tokens and length", ending)


@contract
def test_min_tokens_is_kept(api, profile):
    """With min_tokens, a stop token ends the answer only after that number of tokens."""
    endings.min_tokens_is_kept(api, profile.correctness)


@contract
@CHATS
def test_ignore_eos_goes_on(api, profile):
    """With ignore_eos, an answer continues after its end token, without special tokens."""
    endings.ignore_eos_goes_on(api, profile.correctness)


@contract
def test_a_stop_string_ends_the_text(api):
    """The text ends before the stop string, also if the stop string begins inside a token."""
    endings.stop_string_ends_the_text(api)


@contract
def test_a_stop_token_ends_the_answer(api):
    """The answer ends at the first stop token."""
    endings.stop_token_ends_the_answer(api)


def test_special_tokens_never_leak(api, profile):
    """No text contains a special token, neither at a natural end nor in a stream."""
    endings.special_tokens_are_hidden(api, profile.correctness)


@contract
def test_logit_bias_is_obeyed(api):
    """A bias of -100 excludes a token, and a bias of 50 makes a token the likeliest."""
    sampling.logit_bias_is_obeyed(api)


@contract
def test_log_probabilities_name_the_chosen_token(api):
    """Each generated token has one entry, in which the greedy choice is the likeliest token."""
    logprobs.name_the_chosen_token(api)


@pytest.mark.parametrize(
    "in_chats", [False, pytest.param(True, marks=CHATS)], ids=["completions", "chats"]
)
def test_greedy_takes_the_likeliest_token(api, in_chats):
    """At temperature 0 each token is the likeliest one, in completions and in dozens of chats."""
    logprobs.greedy_is_the_likeliest(api, in_chats=in_chats)


@contract
@CHATS
def test_log_probabilities_of_a_chat_are_whole(api, profile):
    """Each token of a chat has an entry with its bytes, and is one of the entry's top tokens."""
    logprobs.of_a_chat_are_whole(api, profile.correctness)


@contract
def test_echo_gives_the_prompt_back(api):
    """With echo, the text begins with the prompt."""
    text = api.complete(PROMPT, max_tokens=2, echo=True)["choices"][0]["text"]
    whole = text.startswith(PROMPT) and len(text) > len(PROMPT)
    require(whole, "the prompt and more", repr(text))


def test_each_choice_is_its_own(api):
    """The n choices have n different indices and are sampled independently, streamed or not."""
    options = {"max_tokens": 12, "n": 6, "temperature": 2.0, "seed": 5}
    answer = api.complete(PROMPT, **options)["choices"]
    streamed = stream.completion_of(api.stream_completion(PROMPT, **options))
    for choices in (answer, streamed):
        texts = {choice["text"] for choice in choices}
        require(len(choices) == 6 and len(texts) > 1, "6 that differ", choices)


def test_answers_belong_to_their_prompts(api, profile):
    """Answers have the order of their prompts, in one request and in several."""
    sampling.answers_belong_to_their_prompts(api, profile.correctness)


# The APIs Chat Completions and Responses, which render harmony for gpt-oss.


@CHATS
def test_chats_end_in_a_final_message(api, profile):
    """Each of k answers to a chat ends by itself, with reasoning and a final message (pass^k)."""
    endings.chats_end_in_a_final_message(api, profile.correctness)


@pytest.mark.ability("harmony")
@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_tokens_of_a_chat_are_harmony(api, profile, effort):
    """A chat's first token is the channel token, and each message has a start and an end."""
    endings.chats_are_harmony(api, profile.correctness, effort)


@pytest.mark.ability("harmony")
def test_first_token_is_the_channel_token(api, profile):
    """A chat's first token is the channel token, according to its log-probabilities."""
    endings.begins_with_the_channel_token(api, profile.correctness)


# Compare the server's prompt for each chat of fixtures/api/chats.toml with oss-harmony's.


@pytest.mark.ability("harmony")
@pytest.mark.parametrize("chat", chats.load_chats(), ids=str)
def test_a_chat_becomes_its_harmony(api, server_environment, chat):
    """The harmony prompt contains each part of the chat, without reasoning of earlier turns."""
    chat_prompts.prompt_is_harmony(api, chat, server_environment)


@pytest.mark.ability("harmony")
@pytest.mark.parametrize("chat", chat_prompts.TELLING)
def test_an_answer_is_to_its_chat(api, agreement_bound, server_environment, chat):
    """A chat has the same answer as its harmony tokens sent as a completion."""
    chat = chats.find_chat(chat)
    chat_prompts.answer_is_to_the_chat(api, chat, agreement_bound, server_environment)


@pytest.mark.ability("harmony")
@pytest.mark.parametrize("chat", responses.IN_RESPONSES)
def test_a_response_is_to_its_harmony(api, chat):
    """The prompt of a response contains its instructions, earlier turns, calls and call results."""
    responses.usage_counts_harmony(api, chats.find_chat(chat))


@contract
@CHATS
def test_a_response_goes_on_from_another(api, server, profile, remark):
    """With previous_response_id, the prompt contains the earlier turns."""
    responses.goes_on_from_another(api, profile.correctness, remark, server.configuration)


@contract
@pytest.mark.ability("tools")
def test_tool_calls_are_right_every_time(api, profile):
    """Each of k answers is only one call of the right tool, with the right arguments (pass^k)."""
    tools.called_every_time(api, profile.correctness)


@contract
@pytest.mark.ability("tools")
def test_a_tool_can_be_named(api, profile):
    """tool_choice with a name calls this tool, whatever the question is."""
    tools.named(api, profile.correctness)


@contract
@pytest.mark.ability("tools")
@pytest.mark.parametrize("name", ["get-weather", "weather.get", "mcp__weather-eu__get"])
def test_a_tool_keeps_its_name(api, profile, name):
    """A tool is called by its name, also if the name has a hyphen or a dot."""
    tools.named_as_offered(api, profile.correctness, name)


@contract
@pytest.mark.ability("tools")
def test_a_tool_can_be_required(api, profile):
    """tool_choice `required` calls a tool, whatever the question is."""
    tools.required(api, profile.correctness)


@contract
@pytest.mark.ability("tools")
def test_tools_can_be_forbidden(api, profile):
    """tool_choice `none` calls no tool, even if one would help."""
    tools.forbidden(api, profile.correctness)


@contract
@pytest.mark.ability("parallel_tool_calls")
def test_tools_are_called_in_parallel(api, profile):
    """A question about two things leads to two tool calls in one turn."""
    tools.called_in_parallel(api, profile.correctness)


@contract
@pytest.mark.ability("tools")
def test_a_tool_result_is_answered(api, profile):
    """After a question, a tool call and its result, the answer contains the result."""
    tools.results_are_answered(api, profile.correctness)


@contract
@pytest.mark.parametrize(
    "with_tools", [pytest.param(False, marks=CHATS), ONE_WITH_TOOLS], ids=["message", "tool call"]
)
def test_deltas_add_up_to_the_message(api, profile, with_tools):
    """A streamed chat has the same message and the same usage as the chat without streaming."""
    streaming.deltas_add_up(api, profile.correctness, with_tools=with_tools)


@contract
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_keeps_every_character(api, kind, attempts):
    """A stream contains every character of the text, also if a token ends inside one."""
    streaming.keeps_every_character(api, kind, attempts)


@contract
@CHATS
def test_a_response_has_reasoning_and_message(api, profile):
    """A response has a reasoning item, a message item and the status `completed`."""
    responses.has_reasoning_and_message(api, profile.correctness)


@contract
@CHATS
def test_a_response_that_was_cut_off_says_so(api, profile):
    """A response at its token limit is `incomplete` with the reason; usage equals the limit."""
    responses.is_incomplete_at_the_limit(api, profile.correctness)


@contract
@pytest.mark.ability("tools")
def test_a_response_calls_a_tool_and_reads_its_result(api, profile):
    """A response calls a tool, and the next message contains the tool's output."""
    responses.calls_and_reads_the_result(api, profile.correctness)


@contract
@CHATS
def test_events_of_a_response_add_up(api, judge, profile, attempts):
    """The events of a response are in order, and add up to the response without streaming."""
    responses.events_add_up(api, judge, profile.correctness, attempts)


# Structured output: each sample is valid, even if the model prefers another text.


@contract
@CHATS
def test_json_schema_is_kept(api, profile):
    """Each sampled chat has a final message that is valid JSON according to the schema."""
    structured_output.keeps_json_schema(api, profile.correctness)


@contract
def test_regex_is_kept(api):
    """Each sampled completion matches the regex completely."""
    structured_output.keeps(api, "regex", "[A-Z]{3}-[0-9]{2,4}")


@contract
def test_choice_is_kept(api):
    """Each sampled completion is one of the choices."""
    structured_output.keeps(api, "choice", ["London", "Rome"])


@contract
@CHATS
def test_choice_is_kept_in_a_chat(api, judge, profile):
    """The final message of a chat is one of the choices and nothing else."""
    structured_output.keeps_choice_in_a_chat(api, judge, profile.correctness)


# The exam (fixtures/exams) has a rule for each answer, and allowed misses for each section.
# An answer that is empty, truncated or a loop always fails.


@pytest.mark.ability("exam")
def test_facts_are_known(candidate):
    """Enough of the exam's questions about facts are answered correctly, each in its own chat."""
    candidate.passes("facts")


@pytest.mark.ability("exam")
def test_dialogues_are_followed(candidate):
    """In a dialogue, answers obey earlier statements, corrections, instructions and counts."""
    candidate.passes("dialogues")


@pytest.mark.ability("exam")
def test_the_right_tools_are_called(candidate):
    """The model calls the right tools with the right arguments, and uses the results."""
    candidate.passes("tools")


@pytest.mark.ability("exam")
def test_answers_in_a_form_are_right(candidate):
    """Each structured answer is valid, and its content is right."""
    candidate.passes("formats")


@pytest.mark.ability("long_document")
@pytest.mark.timeout(3600)
def test_a_long_chat_with_tools_stays_whole(candidate):
    """In a chat with many tool calls, no answer is empty, truncated or a loop."""
    candidate.converses(24_000)


@pytest.mark.ability("long_document")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("length", [8_000, 32_000, 100_000])
def test_long_documents_are_read(candidate, length):
    """The model finds facts at five depths of a document, and combines two of them."""
    candidate.recalls(length)


# API conformance: only violations of the published reference fail. Others are remarks.


@contract
def test_models_are_as_published(api):
    """The list of models is valid according to its schema and contains the served model."""
    listed = [entry["id"] for entry in api.models()["data"]]
    require(api.model in listed, api.model, listed)


@contract
def test_answers_are_as_published(api, profile):
    """A completion and a chat follow their schemas, with and without log-probabilities."""
    for options in ({"max_tokens": 3}, {"max_tokens": 3, "logprobs": 2}):
        if "logprobs" not in options or api.capabilities.can("logprobs"):
            api.complete(PROMPT, **options)
    if not api.capabilities.can("chat"):
        return
    question = profile.correctness.chats[0].question
    for options in ({}, {"logprobs": True, "top_logprobs": 2}):
        if not options or api.capabilities.can("chat_logprobs"):
            api.chat(question, max_tokens=3, **options)


@contract
def test_the_sdk_reads_what_the_server_says(sdk, profile):
    """The openai package finds the text and the usage in the server's answers."""
    sdk.finds_text_and_usage(profile.correctness)


@contract
@pytest.mark.parametrize("logprobs", [None, 2], ids=["plain", "with log-probabilities"])
def test_streams_are_as_published(api, logprobs):
    """Chunks follow their schema; the last one contains the usage, and [DONE] comes after it."""
    streaming.is_as_published(api, logprobs)


@courtesy
def test_answers_have_ids_and_times(api, profile):
    """The ids of answers, items and calls are unique. Times are Unix times in seconds."""
    endings.ids_are_unique(api, profile.correctness)


@contract
def test_a_stream_without_usage_has_none(api):
    """A stream contains usage only if the request asks for it."""
    chunks = api.stream_completion(PROMPT, usage=False, max_tokens=3)
    having = [chunk for chunk in chunks.chunks if chunk.get("usage")]
    require(not having, "no usage", having)


@contract
@pytest.mark.api_cases
def test_request(judge, case):
    """The server answers or refuses the case's request as required, and then works as before."""
    judge(case)


@contract
def test_an_error_of_a_stream_is_an_error(api):
    """An invalid streaming request is refused with a status 4xx before a stream begins."""
    streaming.refuses_with_a_status(api)


@pytest.mark.ability("oracle")  # late, because plan quick computes beside the tests above
def test_prompt_log_probabilities_agree_with_the_oracle(asker, prompt_reference, remark):
    """Log-probabilities of prompt tokens agree with the oracle, also past the sliding window."""
    remark(f"oracle: {log_probabilities.prompts_agree(asker, prompt_reference)}")


@pytest.mark.ability("harmony")
def test_no_harmony_error_in_the_log(server):
    """The log has no error of harmony's parser after all requests. This test runs last."""
    if server.log is None:
        raise NotRun(server.why_no_log)
    lines = harmony.errors_in(server.log)
    evidence = [*lines[:1], server.log]
    require(not lines, "no HarmonyError", len(lines), evidence=evidence)
