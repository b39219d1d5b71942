"""A server is measured with token ids, even if its vocabulary is smaller than the profile's."""

import pytest

from sm121.core.level_settings import Measuring
from sm121.core.server import NO_KEY, Endpoint
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.plan import Plan


@pytest.mark.parametrize("field", ["prompt", "content"], ids=["vllm", "llama-server"])
def test_a_smaller_vocabulary_is_found(timed_server, tmp_path, field):
    """Each engine refuses an id outside of the vocabulary in its own words."""
    server = timed_server("--rate", "2000", "--known-ids", "1024", "--text-field", field)
    endpoint = Endpoint(server.base_url, NO_KEY, "gpt-oss-120b")
    with MeasuredServer.open(endpoint, Plan(64, (16,), (0,), Measuring()), tmp_path) as opened:
        assert (opened.prompts.as_text, opened.prompts.vocabulary) == (False, 900)
