"""How the sentences of the documentation are counted."""

import pytest

from tools import sentences

LONG = "This sentence has " + "many " * 22 + "words."


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (f"# A title\n\n{LONG} vLLM is short.\n", [26, 3]),
        ("- one item\n- another `--with code of five words`, and more\n", [2, 4]),
        (f"| {LONG} |\n\n```console\n$ {LONG}\n```\n<!-- {LONG} -->\n", []),
        ('It is at 0.5 of [a link](https://x.y/z?a=b). "Yes." Or\nno.', [7, 1, 2]),
    ],
)
def test_words_of_each_sentence(text, counts):
    assert [sentences.words(each) for each in sentences.sentences(text)] == counts


def test_listed_words_count_outside_of_code():
    used = sentences.used(
        "It is held\nagainst `held against` mended-ness.", ["held against", "mended"]
    )
    assert used == {"held against": 1, "mended": 1}


def test_listed_words_are_not_shown():
    texts = [("a.j2", "two runs\nheld  against one"), ("b.py:3", "it is Mended"), ("c", "unheld")]
    places = sentences.jargon(texts, ["held against", "mended"])
    assert places == ["a.j2: held against", "b.py:3: mended"]


def test_generated_pages_do_not_count():
    names = [page.name for page in sentences.pages()]
    assert "README.md" in names and "regression.md" in names and "options.md" not in names
