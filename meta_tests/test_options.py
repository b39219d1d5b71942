"""The options: their groups, their former names, and that the documents have each."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import certificate_tricks
import pytest
from _pytest.config.argparsing import Parser

from sm121 import cli
from sm121.core import own_options
from sm121.core.errors import UsageError
from sm121.plugin import options, reporting
from sm121.regression.ab import parse_sides
from sm121.run.fingerprint import Fingerprint
from tools.reference import options as reference

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FORMER = [
    (former.name, option) for option in own_options.every().values() for former in option.formerly
]


def parser() -> Parser:
    made = Parser(_ispytest=True)
    options.add(made)
    return made


def test_help_has_the_groups_and_no_former_name():
    shown = parser().optparser.format_help()
    titles = re.findall(r"^SM121: (.+):$", shown, re.M)
    assert titles == ["target", "engine", "what is asked", "measuring", "comparing", "report"]
    names = set(re.findall(r"--[a-z][a-z-]+", "\n".join(re.findall(r"^  --.*", shown, re.M))))
    assert {*own_options.every()} <= names
    assert len(FORMER) > 5 and not names & {name for name, _ in FORMER}


@pytest.mark.parametrize(("name", "option"), FORMER, ids=[name for name, _ in FORMER])
def test_a_former_name_does_what_the_option_does(name, option):
    (former,) = (each for each in option.formerly if each.name == name)
    takes = former.value is None and option.action != "store_true"
    value = former.value or (option.choices or ("some/file",))[-1]
    now = [option.name, value] if takes or former.value else [option.name]
    given = [name, value] if takes else [name]
    assert vars(parser().parse(given)) == vars(parser().parse(now))
    assert vars(parser().parse(given)) != vars(parser().parse([])), "it does something"
    said = own_options.words_as_now(given)
    assert vars(parser().parse(said)) == vars(parser().parse(now)), "as a run again says it"
    stored = Fingerprint(options={name: value if takes else "True"})
    asked = Fingerprint(options={option.name: value if takes or former.value else "True"})
    assert stored.differences(asked) == [], "both asked the same"
    assert stored.differences(Fingerprint()) != []


def test_a_value_of_a_former_name_is_checked(capsys):
    with pytest.raises(pytest.UsageError, match="--profile-kernels: invalid choice: 'sometimes'"):
        parser().parse(["--profile-kernels", "sometimes"])


@pytest.mark.parametrize(
    "command",
    [["pytest", "-n1"], ["sm121", "run"], ["sm121", "plan"]],
    ids=["workers", "run", "plan"],
)
def test_a_former_name_is_said_once_with_the_name_of_today(command, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", *command, "-p", "no:cacheprovider"),
            *("--nsys", "--beside-others", "--arch", "cpu"),
            *("--base-url", "http://127.0.0.1:9", "--report-dir", str(tmp_path / "report")),
            *("--collect-only", "meta_tests/scenarios/verdicts.py"),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    for line in (
        "--nsys is now called --kernel-trace nsys",
        "--beside-others is now called --share-machine",
    ):
        assert (done.stdout + done.stderr).count(line) == 1, done.stdout + done.stderr


def test_run_again_has_the_names_of_today():
    given = ("tests", "--profile-kernels", "off", "--nsys", "--accuracy=a.jsonl", "--accuracy-x")
    config = SimpleNamespace(invocation_params=SimpleNamespace(args=given), inipath=None)
    assert reporting._arguments(config) == [
        "tests", "--kernel-trace", "off", "--kernel-trace=nsys", "--questions=a.jsonl",
        "--accuracy-x",
    ]  # fmt: skip


def test_a_certificate_takes_a_former_name_for_the_option():
    refused, harmless = certificate_tricks.tried(
        [
            certificate_tricks.Trick("nsys", ("--nsys",), ""),
            certificate_tricks.Trick("tails", ("--tails",), ""),
        ]
    )
    assert refused.status == 4 and "--certify with --kernel-trace nsys" in refused.said
    assert harmless.status == 0, harmless


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--enforce-eager", "tests/test_regression.py"), "tests/test_regression.py is none of"),
        (("--enforce-eager", "--rounds"), "--rounds is an option of the suite"),
        (("--tails", ""), "--tails is an option of the suite"),
        (("http://a:1", "tests"), "tests is none of them"),
    ],
)
def test_one_word_of_two_is_refused_with_what_was_taken_for_the_other(words, expected):
    with pytest.raises(UsageError) as refused:
        parse_sides(words)
    assert expected in str(refused.value) and "--ab '' '--flag'" in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        ["--ab", "", "--enforce-eager", "tests"],
        ["--ab", "--enforce-eager", "", "tests"],
        ["tests", "--ab", "", "--enforce-eager"],
        ["tests", "--ab", "", " -q fp8", "--rounds", "3"],
        ["--ab", "KEY=1 --x y", "--slow", "tests"],
    ],
)
def test_two_words_are_taken_whatever_they_begin_with(given):
    found = parser().parse(given)
    start = given.index("--ab") + 1
    assert found.ab == given[start : start + 2] and found.file_or_dir == ["tests"]
    assert not found.slow


@pytest.mark.parametrize("words", [[], ["--enforce-eager"]])
def test_a_word_that_is_missing_is_one_line(words):
    with pytest.raises(pytest.UsageError, match="argument --ab: expected 2 arguments"):
        parser().parse(["tests", "--ab", *words])


def test_the_documents_have_every_option_of_pytest():
    rows = (DOCS / "options.md").read_text("utf-8").splitlines()
    for option in reference.declared()[0]:
        named = [row for row in rows if re.match(rf"\| (`|<code>){option.names[0]}\b(?!-)", row)]
        assert len(named) == 1, f"{option.names[0]}: expected one row in docs/options.md"


def test_the_documents_have_every_former_name():
    text = (DOCS / "options.md").read_text("utf-8")
    for name, now in reference.former().items():
        assert f"| `{name}` | `{now}` |" in text


def test_the_documents_have_every_argument_of_every_command():
    text = (DOCS / "commands.md").read_text("utf-8")
    sections = dict(re.findall(r"^## sm121 (\S+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    commands = cli.parser()._subparsers._group_actions[0].choices
    assert {*sections} == {*commands}
    for name, command in commands.items():
        shown = [a for a in command._actions if a.help != argparse.SUPPRESS and a.dest != "help"]
        rows = re.findall(r"^\| `(.*?)` \|", sections[name], re.M)
        assert len(rows) == len(shown), (name, rows)
        named = {word for row in rows for word in re.findall(r"--?[a-z][a-z-]*", row)}
        assert {flag for argument in shown for flag in argument.option_strings} <= named, name
