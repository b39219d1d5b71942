"""Known secrets are redacted, and so are their pieces in a text that pytest has shortened."""

import pytest
from _pytest._io.saferepr import saferepr

from sm121.core.redaction import redact, redact_known

KEY = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGH"
OTHER = "the answer of 40 tokens..."


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"the key is {KEY}", id="whole"),
        pytest.param(saferepr(KEY, maxsize=31), id="cut"),
        pytest.param(saferepr({"Authorization": f"Bearer {KEY}"}, maxsize=31), id="cut in a dict"),
        pytest.param(saferepr(f"{KEY}1", maxsize=31), id="cut with more behind it"),
        pytest.param(f"assert {saferepr(KEY, maxsize=31)} == {KEY[:9]}...", id="cut twice"),
    ],
)
@pytest.mark.parametrize("function", [redact, redact_known])
def test_no_piece_of_a_key_is_shown(function, text):
    clean = function(f"{OTHER} {text} {OTHER}", [KEY])
    assert clean.startswith(OTHER) and clean.endswith(OTHER) and "[redacted]" in clean
    pieces = [KEY[start : start + 6] for start in range(len(KEY) - 5)]
    assert [piece for piece in pieces if piece in clean] == []


def test_other_texts_stay():
    text = f"{OTHER} abc...FGH {KEY[:8]} ...a..."
    assert redact_known(text, [KEY]) == text


def test_a_short_secret_is_only_replaced_as_a_word():
    assert redact_known("the next text is x", ["x"]) == "the next text is [redacted]"
