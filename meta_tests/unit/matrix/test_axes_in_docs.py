"""The examples of axes files in docs/."""

import re

import pytest

from meta_tests.folders import ROOT
from sm121.matrix import axes

_BLOCK = re.compile(r"```\w+\n(.*?)```", re.S)
EXAMPLES = {}
for page in sorted((ROOT / "docs").glob("*.md")):
    for number, block in enumerate(_BLOCK.findall(page.read_text("utf-8"))):
        if "[axes." in block:
            EXAMPLES[f"{page.stem}-{number}"] = block


def test_two_pages_have_an_example():
    assert {name.rpartition("-")[0] for name in EXAMPLES} == {"extending", "matrix"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_is_an_axes_file(name, tmp_path):
    """Each example of an axes file in the docs can be read.

    Rewrapping the lines of docs/matrix.md once made its example unreadable."""
    file = tmp_path / "axes.toml"
    file.write_text(EXAMPLES[name], "utf-8")
    assert axes.load(str(file)).axes
