"""The options: their groups, and that the documentation contains each of them."""

import argparse
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from _pytest.config.argparsing import Parser

from meta_tests.folders import ROOT
from pytest_gpu_arch import plugin as gpu_arch
from sm121 import cli
from sm121.core import errors, own_tests
from sm121.plugin import options
from sm121.regression.ab import parse_sides
from sm121.session import own_options, settings
from tools.reference import options as reference

DOCS = ROOT / "docs"


def parser() -> Parser:
    made = Parser(_ispytest=True)
    gpu_arch.pytest_addoption(made)
    options.add(made)
    return made


def arguments() -> argparse.ArgumentParser:
    """Return the arguments of pytest's parser, which are in another place before pytest 8.4."""
    made = parser()
    return made.optparser if hasattr(made, "optparser") else made._getparser()


def test_help_has_the_groups_and_every_option_and_no_name_that_one_had():
    text = arguments().format_help()
    titles = re.findall(r"^SM121: (.+):$", text, re.M)
    assert titles == ["target", "engine", "checks", "measuring", "comparing", "report"]
    names = set(re.findall(r"--[a-z][a-z-]+", "\n".join(re.findall(r"^  --.*", text, re.M))))
    assert {*own_options.every()} <= names
    with pytest.raises(pytest.UsageError, match="unrecognized arguments: --nsys"):
        arguments().parse_args(["--nsys"])


def test_an_option_is_declared_in_one_place_and_nowhere_else():
    """Each option is declared in exactly one group, and each module ``options`` of a package
    belongs to a group."""
    declared = Counter()
    modules = set()
    for group in own_options.EVERY_GROUP:
        group.add(lambda *names, **_keywords: declared.update(names))
        modules |= {add_options.__module__ for add_options in group.add_options}
    assert {name for name, count in declared.items() if count > 1} == set()
    assert [*declared] == [*own_options.every()]
    package = ROOT / "plugins" / "sm121"
    # The type of options, and options that pytest itself adds.
    own = {"sm121.core.options", "sm121.plugin.options"}
    assert "pytest_gpu_arch.options" in modules
    modules.remove("pytest_gpu_arch.options")
    found = {f"sm121.{file.parent.name}.options" for file in package.glob("*/options.py")}
    assert found - own == modules


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(
            ("--base-ulr", "http://x"),
            "--base-ulr; did you mean --base-url?",
            id="--base-ulr http://x, --base-ulr; did you mean",
        ),
        pytest.param(
            ("--engine-agrs=x",),
            "--engine-agrs; did you mean --engine-args?",
            id="--engine-agrs=x, --engine-agrs; did you mean",
        ),
        pytest.param(
            ("--concurency", "2"),
            "did you mean --concurrency?",
            id="--concurency 2, did you mean --concurrency?",
        ),
    ],
)
def test_a_misspelt_option_is_refused_with_the_one_that_was_meant(words, expected):
    with pytest.raises(pytest.UsageError) as refused:
        options.refuse_misspelt(parser(), words)
    assert expected in str(refused.value)


@pytest.mark.parametrize("words", [["--cov-report", "x"], ["-x", "tests"], ["--depth", "64"]])
def test_an_option_of_others_is_left_to_them(words):
    options.refuse_misspelt(parser(), words)


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        pytest.param(["--nonsense", "tests"], True, id="option"),
        pytest.param(["tests", "--depth", "64"], False, id="path"),
    ],
)
@pytest.mark.parametrize("is_own", [True, False], ids=["sm121 run", "pytest"])
def test_sm121_run_refuses_unknown_options_in_one_line(words, is_refused, is_own):
    inipath = own_tests.settings() if is_own else None
    config = SimpleNamespace(inipath=inipath, rootpath=own_tests.folder() / "elsewhere")
    if not (is_refused and is_own):
        options.refuse_unknown(config, parser(), words)
        return
    with pytest.raises(pytest.UsageError) as refused:
        options.refuse_unknown(config, parser(), words)
    line = "unrecognized arguments: --nonsense. List the options with --help"
    assert str(refused.value) == line


def test_the_own_tests_are_no_value_of_the_last_option():
    """The suite's own tests are not taken as the value of the last option, so `sm121 run
    --benchmark-compare` names no stored run."""
    config = SimpleNamespace(
        inipath=own_tests.settings(), known_args_namespace=SimpleNamespace(file_or_dir=[])
    )
    words = ["--arch", "cpu", "--benchmark-compare"]
    options.name_own_tests(config, words)
    assert words == [str(own_tests.folder() / "tests"), "--arch", "cpu", "--benchmark-compare"]


def test_the_suite_reads_two_words_of_ab_as_pytest_does():
    words = ["--ab", "", "--enforce-eager", "-x", "tests"]
    assert own_options.reader(words)("--ab") == ["", "--enforce-eager"]


def engine_arguments(text, folder):
    """Return the values of --engine-arg=-x and --engine-args."""
    values = vars(arguments().parse_args(["--engine-arg=-x", "--engine-args", text]))
    read = settings.read_settings(lambda name: values[name.lstrip("-").replace("-", "_")], folder)
    return read.engine.arguments


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(
            "--max-model-len 8192 --enforce-eager",
            ("--max-model-len", "8192", "--enforce-eager"),
            id="--max-model-len 8192 --enforce-eager, --max-model-len",
        ),
        pytest.param(
            "--a 'two words' --b=\"x y\"",
            ("--a", "two words", "--b=x y"),
            id="--a 'two words' --b=\"x y\", --a two words --b=x y",
        ),
        pytest.param(
            "--a 1 \\\n  --b $HOME `id` ; ls",
            ("--a", "1", "--b", "$HOME", "`id`", ";", "ls"),
            id="--a 1  --b $HOME `id` ; ls, --a 1 --b $HOME `id` ; ls",
        ),
        pytest.param("", (), id="nothing"),
    ],
)
def test_engine_args_are_words_as_a_recipe_has_them(text, words, tmp_path):
    assert engine_arguments(text, tmp_path) == ("-x", *words)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("--a 'b", "No closing quotation"),
        ("--port 1", "--port is set by the suite itself"),
    ],
)
def test_wrong_engine_args_are_one_line(text, line, tmp_path):
    with pytest.raises(errors.UsageError, match=line):
        engine_arguments(text, tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(
            ("--enforce-eager", "tests/test_regression.py"),
            "got tests/test_regression.py, which is neither of them",
            id="--enforce-eager tests/test_regression.py",
        ),
        pytest.param(
            ("--enforce-eager", "--rounds"),
            "got --rounds, which is an option of the suite",
            id="--enforce-eager --rounds, --rounds is an option of the",
        ),
        pytest.param(
            ("--percentiles", ""),
            "got --percentiles, which is an option of the suite",
            id="--percentiles, --percentiles is an option of the suite",
        ),
        pytest.param(
            ("http://a:1", "tests"),
            "got tests, which is neither of them",
            id="http://a:1 tests, tests is none of them",
        ),
    ],
)
def test_ab_with_one_side_names_the_word_taken_for_the_other(words, expected):
    with pytest.raises(errors.UsageError) as refused:
        parse_sides(words, own_options.every())
    assert expected in str(refused.value) and "--ab '' '--flag'" in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(("--ab", "", "--enforce-eager", "tests"), id="--ab --enforce-eager tests"),
        pytest.param(("--ab", "--enforce-eager", "", "tests"), id="--ab --enforce-eager tests (2)"),
        pytest.param(("tests", "--ab", "", "--enforce-eager"), id="tests --ab --enforce-eager"),
        pytest.param(
            ("tests", "--ab", "", " -q fp8", "--rounds", "3"), id="tests --ab -q fp8 --rounds 3"
        ),
        pytest.param(
            ("--ab", "KEY=1 --x y", "--slow", "tests"), id="--ab KEY=1 --x y --slow tests"
        ),
    ],
)
def test_ab_takes_two_words_also_with_dashes(given):
    parsed = parser().parse([*given])
    start = given.index("--ab") + 1
    assert parsed.ab == [*given[start : start + 2]] and parsed.file_or_dir == ["tests"]
    assert not parsed.slow


@pytest.mark.parametrize("words", [[], ["--enforce-eager"]])
def test_ab_without_its_second_word_gives_one_line(words):
    with pytest.raises(pytest.UsageError, match="--ab: expected 2 arguments"):
        parser().parse(["tests", "--ab", *words])


def test_the_documents_have_every_option_of_pytest():
    rows = (DOCS / "options.md").read_text("utf-8").splitlines()
    for option in reference.declared()[0]:
        named = [row for row in rows if re.match(rf"\| (`|<code>){option.names[0]}\b(?!-)", row)]
        assert len(named) == 1, f"{option.names[0]}: expected one row in docs/options.md"


def test_the_documents_have_every_argument_of_every_command():
    text = (DOCS / "commands.md").read_text("utf-8")
    sections = dict(re.findall(r"^## sm121 (\S+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    commands = cli.parser()._subparsers._group_actions[0].choices
    assert {*sections} == {*commands}
    for name, command in commands.items():
        words = [a for a in command._actions if a.help != argparse.SUPPRESS and a.dest != "help"]
        rows = re.findall(r"^\| (?:`|<code>)(.*?)(?:`|</code>) \|", sections[name], re.M)
        assert len(rows) == len(words), (name, rows)
        named = set()
        for row in rows:
            named.update(re.findall(r"--?[a-z][a-z-]*", row))
        flags = set()
        for argument in words:
            flags.update(argument.option_strings)
        assert flags <= named, name


def test_a_control_of_a_named_configuration_with_itself_is_allowed():
    """A named configuration may be compared with itself.

    A against A shows how much two equal servers differ."""
    one, other = parse_sides(["A=1", "A=1"])
    assert one == other and one.environment == (("A", "1"),)
