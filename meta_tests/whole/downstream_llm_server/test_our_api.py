"""Tests of a project that uses only the server of the suite."""

import openai
import pytest


def test_an_answer_has_the_tokens_that_were_asked_for(llm_client, llm_server):
    answer = llm_client.completions.create(
        model=llm_server.model, prompt="The capital of France is", max_tokens=1
    )
    assert answer.usage.completion_tokens == 1


@pytest.fixture(scope="module")
def short_server(llm_server_factory):
    with llm_server_factory(arguments=["--max-model-len", "64"]) as server:
        yield server


def test_a_prompt_that_is_too_long_is_refused(short_server):
    with short_server.client() as client, pytest.raises(openai.BadRequestError):
        client.completions.create(model=short_server.model, prompt="one two " * 100)
