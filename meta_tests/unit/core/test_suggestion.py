"""Suggestions for a misspelt word."""

import pytest

from sm121.core.suggestion import did_you_mean

FORMS = ("text", "markdown", "llama-benchy")


@pytest.mark.parametrize(
    ("word", "names", "meant"),
    [
        pytest.param("qick", ("quick", "merge", "full"), "quick", id="a letter is missing"),
        pytest.param("SM121", ("sm120", "sm121", "smoke"), "sm121", id="capital letters"),
        pytest.param("md", FORMS, "markdown", id="an abbreviation"),
        pytest.param("Float32", ("Float32x", "bf16"), "Float32x", id="the name as it is written"),
    ],
)
def test_a_misspelt_word_has_a_suggestion(word, names, meant):
    assert did_you_mean(word, names) == f"; did you mean {meant}?"


@pytest.mark.parametrize(
    ("word", "names"),
    [
        pytest.param("json", FORMS, id="far from all"),
        pytest.param("m", FORMS, id="one letter"),
        pytest.param("", FORMS, id="nothing"),
        pytest.param("mt", ("markdown-text", "many-texts"), id="an abbreviation of two"),
    ],
)
def test_an_unrelated_word_has_no_suggestion(word, names):
    assert did_you_mean(word, names) == ""
