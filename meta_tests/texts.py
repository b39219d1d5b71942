"""The texts of ``data/texts/``: scripts, logs and answers that tests write to files."""

from meta_tests.folders import DATA

TEXTS = DATA / "texts"


def text_file(name: str) -> str:
    """Return the content of ``data/texts/NAME``."""
    return (TEXTS / name).read_text("utf-8")
