"""How long the sentences of the documentation are, and how often it has words that strangers do
not know; and where some of these are in what a run shows: the templates, and strings of the package
that are no docstrings. ``python -m tools.sentences`` prints all, and `make lint` fails above the
limits of ``[tool.sm121-words]`` in pyproject.toml. Generated pages, tables, code and titles do not
count."""

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONG = 25
_CODE = re.compile(r"^ *```.*?^ *```|<!--.*?-->", re.M | re.S)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
#: A sentence ends with its mark before a space, a list's item before the next one.
_END = re.compile(
    r"(?<=[.!?])[)\"*_`]*\s+(?=[A-Z`*\[\"(0-9-]|vLLM|llama|gpt-oss|verdict)"
    r"|\n\s*\n|\n\s*(?=[-*] |\d+\. )"
)
_WORD = re.compile(r"[\w'`%./:=@+-]*\w[\w'`%./:=@+-]*")


def pages(root: Path = ROOT) -> list[Path]:
    """The README and the pages of docs/ that people write."""
    every = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [page for page in every if "\nMade by `" not in page.read_text("utf-8")[:600]]


def prose(text: str) -> str:
    """What is read as sentences: without code, comments, tables and headings."""
    lines = _CODE.sub("\n\n", text.partition("<!-- Made by")[0]).splitlines()
    read = ["" if line.lstrip().startswith(("|", "#", "<", "[!")) else line for line in lines]
    return _LINK.sub(r"\1", "\n".join(read))


def sentences(text: str) -> Iterator[str]:
    """Each sentence of a page, in one line."""
    for sentence in _END.split(prose(text)):
        if words(one := " ".join(sentence.split())):
            yield one


def words(sentence: str) -> int:
    """How many words a sentence has; code in backticks is one."""
    return len(_WORD.findall(re.sub(r"`[^`]*`", "code", sentence)))


def used(text: str, listed: list[str]) -> Counter[str]:
    """How often the listed words are in what is read."""
    flat = " ".join(prose(re.sub(r"`[^`]*`", "", text)).lower().split())
    return Counter({word: len(re.findall(rf"\b{re.escape(word)}\b", flat)) for word in listed})


def shown(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """What a run may show: a template or a string of more than one word, and where it is."""
    package = root / "plugins" / "sm121"
    for template in sorted(package.rglob("*.j2")):
        # Without comments, and names of values.
        text = re.sub(r"\{#.*?#\}|\.\w+|\"\w+\":", "", template.read_text("utf-8"), flags=re.S)
        yield f"{template.relative_to(root)}", text
    for module in sorted(package.rglob("*.py")):
        tree = ast.parse(module.read_text("utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or id(node) in alone:
                continue
            if isinstance(node.value, str) and " " in node.value.strip():
                yield f"{module.relative_to(root)}:{node.lineno}", node.value


def jargon(texts: Iterable[tuple[str, str]], listed: Iterable[str]) -> list[str]:
    """Each listed word that is shown, with its place."""
    pattern = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in listed), re.I)
    return [
        f"{place}: {match.group().lower()}"
        for place, text in texts
        for match in pattern.finditer(" ".join(text.split()))
    ]


def main() -> int:
    """Print all counts; 1 where one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="print each long sentence")
    options = parser.parse_args()
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["sm121-words"]
    total, long, found = 0, 0, Counter[str]()
    for page in pages():
        text = page.read_text("utf-8")
        every = [*sentences(text)]
        longer = [sentence for sentence in every if words(sentence) > LONG]
        total, long = total + len(every), long + len(longer)
        found += used(text, [*limits["words"]])
        name = page.relative_to(ROOT)
        print(f"{len(longer):4} of {len(every):4} sentences have more than {LONG} words: {name}")
        for sentence in longer if options.long else ():
            print(f"     {words(sentence)}: {sentence}")
    share = 100 * long / total
    above = [
        f"{word}: {found[word]} times, limit {limit}"
        for word, limit in limits["words"].items()
        if found[word] > limit
    ]
    if share > limits["long_percent"]:
        above.append(f"{share:.1f} % of sentences are long, limit {limits['long_percent']}")
    print(f"{long} of {total}, {share:.1f} % (limit {limits['long_percent']} %)")
    print(", ".join(f"{word} {found[word]}" for word in limits["words"]))
    above += jargon(shown(), limits["never_shown"])
    for line in above:
        print(f"TOO MUCH: {line}", file=sys.stderr)
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
