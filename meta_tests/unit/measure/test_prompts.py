"""Texts have the requested number of tokens by the /tokenize of each engine."""

import pytest

from sm121.core.server import NO_KEY, Endpoint
from sm121.measure.prompts import Prompts


@pytest.mark.parametrize("field", ["prompt", "content"], ids=["vllm", "llama-server"])
def test_a_text_has_the_requested_length(timed_server, field):
    """A text has exactly 64 tokens, whichever field of /tokenize the server reads."""
    server = timed_server("--text-field", field)
    prompts = Prompts(Endpoint(server.base_url, NO_KEY, "gpt-oss-120b"), 100, as_text=True)
    assert prompts.can_tokenize()
    assert len(prompts.make(64).split()) == 64
