"""Tests of a project with all three plugins: markers, a server and gates."""

import time

import pytest

_TOKENS = 16


@pytest.mark.sm121
def test_our_kernel_is_built_for_gb10():
    import torch

    assert torch.cuda.get_device_capability() == (12, 1)


@pytest.mark.cpu
def test_the_server_is_ours(llm_client, llm_server):
    assert [model.id for model in llm_client.models.list().data] == [llm_server.model]


def rate(client, model: str) -> float:
    """Return the tokens a second of one answer."""
    began = time.perf_counter()
    answer = client.completions.create(
        model=model, prompt="Hello", max_tokens=_TOKENS, extra_body={"ignore_eos": True}
    )
    return answer.usage.completion_tokens / (time.perf_counter() - began)


def test_decoding_is_fast_enough(gate, llm_client, llm_server):
    rate(llm_client, llm_server.model)  # the first request is slower
    rates = [rate(llm_client, llm_server.model) for _ in range(20)]
    gate("tg16", rates, minimum=1, unit="tok/s", worse_by=0.5)
