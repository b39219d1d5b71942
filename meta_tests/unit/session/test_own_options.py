"""Each option refuses a wrong value in one line, before a server starts."""

import pytest

from sm121.core.errors import UsageError
from sm121.session import own_options

WRONG = []
for declared in own_options.declarations():
    if declared.value is not None:
        for text in declared.value.wrong:
            WRONG.append(pytest.param(declared, text, id=f"{declared.name} {text[:40]}"))


@pytest.mark.parametrize(("declared", "text"), WRONG)
def test_a_wrong_value_is_refused_in_one_line(declared, text, tmp_path, monkeypatch):
    """Each wrong value of an option is refused in one line.

    The rows are the wrong values that each option's kind of value contains, so a new option also
    has rows."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        declared.value.read(declared.name, text)
    line = str(refused.value)
    assert line.startswith(f"{declared.name} ") and text[:40] in line, line
    assert "expected" in line or "No closing quotation" in line, line
    assert "\n" not in line and len(line) < 300, line


def test_the_default_of_a_parser_is_a_text():
    """A parser keeps texts, so that the fingerprint finds the options that differ from it."""
    for declared in own_options.declarations():
        default = declared.keywords.get("default")
        assert default is None or isinstance(default, str | list), declared.name
