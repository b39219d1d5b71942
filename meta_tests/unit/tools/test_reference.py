"""The generated pages of the documentation: tables whose cells stay whole on GitHub."""

import argparse
import re

import pytest

from meta_tests.folders import ROOT
from sm121 import cli
from tools.reference import commands

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
#: GitHub ends a cell at each bar that no backslash precedes, also inside of code.
_BAR = re.compile(r"(?<!\\)\|")


def torn_rows(text: str) -> list[str]:
    """Return the rows of tables that have more cells than the header of their table."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    torn = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        header, *rows = table.splitlines()
        cells = len(_BAR.findall(header))
        torn += [row for row in rows if len(_BAR.findall(row)) != cells]
    return torn


def test_a_bar_in_an_argument_stays_in_its_cell():
    parser = argparse.ArgumentParser()
    command = parser.add_subparsers().add_parser("box", help="check the machine")
    command.add_argument("target", metavar="URL|FILE", help="a server")
    command.add_argument("--profile", metavar="NAME|PATH", help="name or path")
    page = commands.page(parser)
    assert torn_rows(page) == []
    assert "URL&#124;FILE" in page and "--profile NAME&#124;PATH" in page


def test_a_torn_row_is_noticed():
    table = "| option | meaning |\n|---|---|\n| `--axes A|B` | axes |\n| `a \\| b` | two |\n"
    assert torn_rows(table) == ["| `--axes A|B` | axes |"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_row_has_the_cells_of_its_header(page):
    assert torn_rows(page.read_text("utf-8")) == []


def test_the_page_of_commands_lists_each_command_once_by_its_group():
    """The first table has each group of `sm121 --help`, with a link to each of its commands."""
    parser = cli.parser()
    table = commands.page(parser).partition("\n## ")[0]
    for title, made in parser.groups.items():
        links = ", ".join(f"[{name}](#sm121-{name})" for name in made)
        assert f"| {title} | {links} |" in table, title


def test_each_command_names_the_page_that_explains_it():
    assert set(commands.EXPLAINED) == set(cli.parser().commands)
