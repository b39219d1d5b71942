"""Names of tokens in the log-probabilities of sampled completions."""

import pytest

from sm121.api import sample_source
from sm121.core.unmet import Unmet


def test_a_token_is_named_by_its_id():
    assert sample_source.id_of("token_id:17") == 17


@pytest.mark.parametrize("text", [" the", "12:30", ""])
def test_a_token_that_is_named_by_its_text_is_no_id(text):
    """A text is never read as an id, even if it ends with a number."""
    with pytest.raises(Unmet, match="tokens of log-probabilities named by their ids"):
        sample_source.id_of(text)
