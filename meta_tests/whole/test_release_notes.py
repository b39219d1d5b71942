"""The notes of the releases name replacements that work."""

import json
import re
import shlex

from _pytest.config.argparsing import Parser

from meta_tests.folders import ROOT
from sm121 import cli
from sm121.core import described_schema
from sm121.core.profile import Profile
from sm121.plugin import options


def test_what_replaces_a_removed_option_is_accepted():
    """The parsers accept each command and option that the notes name in place of a removed one."""
    (table,) = re.findall(
        r"types instead\n\n(.*?)\n\n",
        (ROOT / "docs" / "evidence" / "before-and-after.md").read_text("utf-8"),
        re.DOTALL,
    )
    notes = " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())
    instead = [row.split("|")[2] for row in table.splitlines()[2:]]
    instead += re.findall(r"\buse ([^()]*)\)", notes)
    typed = re.findall(r"`([^`]+)`", " ".join(instead))
    own = Parser(_ispytest=True)
    options.add(own)
    known_keys = json.dumps(described_schema.json_schema(Profile, "validation"))
    assert len(typed) > 8
    for text in typed:
        words = shlex.split(text)
        if words[0] == "sm121":
            cli.parser().parse_args(words[1:])
        elif words[0].startswith("--"):
            assert not own.parse_known_and_unknown_args(words)[1], text
        else:
            assert all(f'"{key}"' in known_keys for key in text.split(".")), text
