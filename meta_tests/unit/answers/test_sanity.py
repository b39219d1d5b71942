"""The detectors find broken texts, and do not report good ones."""

import pytest

from sm121.answers import prompts, sanity

GOOD = (
    (
        "The capital of France is Paris. It lies on the Seine, and more than two "
        "million people live in it; ten million more live around it. Its oldest "
        "bridge is called the new bridge."
    ),
    (
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, "
        "21, 22, 23, 24, 25, 26"
    ),
    "Wait!!! Really?! Yes... no!",
    ("for (int i = 0; i < 10; ++i) { a[i] = b[i] + c[i]; }\nreturn a[0] + a[1] + a[2] + a[3];"),
    "yes yes yes, no no no, and then again yes yes yes",
    "",
)


@pytest.mark.parametrize("text", GOOD)
def test_good_texts_have_no_finding(text):
    assert sanity.signs(text) == []
    assert sanity.signs(text, list(text.split()), [-0.1] * len(text.split())) == []


def test_a_list_of_numbers_is_no_loop():
    """A list of numbers is not a loop.

    A comma, a space and a number, a hundred times: two of every three tokens repeat."""
    tokens = []
    for n in range(100):
        tokens += [",", " ", n]
    assert sanity.signs("", tokens, [-1e-4] * len(tokens)) == []


# For the second to last row, twenty tokens are too few.
@pytest.mark.parametrize(
    ("sign", "broken", "harmless"),
    [
        pytest.param(
            sanity.junk,
            ("!!!!!!!!", "Paris is!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!"),
            ("!!!!!!!",),
            id="sanity.junk, !!!!!!!! Paris",
        ),
        pytest.param(
            sanity.junk,
            ("????????", "Paris is????????????????????????????????????????"),
            ("???????",),
            id="sanity.junk, ???????? Paris",
        ),
    ],
)
def test_a_broken_text_is_seen(sign, broken, harmless):
    assert all(map(sign, broken)) and not any(map(sign, harmless))


def test_the_shipped_prompts_cross_the_window():
    texts = prompts.continuations()
    lengths = [len(prompt.text) for prompt in texts.prompts]
    assert min(lengths) < 30 and max(lengths) > 400
    assert len(texts.sha256) == 64 and texts.sha256 == prompts.continuations().sha256
    assert len(prompts.questions().questions) >= 4
