"""How the sentences of the documentation are counted."""

from data_rows import from_data

from tools import sentences

LONG = "This sentence has " + "many " * 22 + "words."


@from_data
def test_words_of_each_sentence(text, counts):
    assert [sentences.words(each) for each in sentences.sentences(text)] == [*counts]


def test_listed_words_count_outside_of_code():
    used = sentences.used(
        "It is held\nagainst `held against` mended-ness.", ["held against", "mended"]
    )
    assert used == {"held against": 1, "mended": 1}
    texts = [("a.j2", "two runs\nheld  against one"), ("b.py:3", "it is Mended"), ("c", "unheld")]
    lines = sentences.jargon(texts, ["held against", "mended"])
    assert lines == ["a.j2: held against", "b.py:3: mended"]


def test_generated_pages_do_not_count():
    names = [page.name for page in sentences.pages()]
    assert "README.md" in names and "regression.md" in names and "options.md" not in names
