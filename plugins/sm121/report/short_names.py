"""Short forms of long names: anchors of tests, names of kernels."""

import re
from collections.abc import Iterable

_MOST_ANCHOR = 80
#: A kernel's name that is longer is folded.
MOST_KERNEL = 56
_NOT_IN_ANCHOR = re.compile(r"[^a-z0-9]+")
_ARGUMENTS = re.compile(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}")
_SPACES = re.compile(r"\s+")


def anchors(ids: Iterable[str]) -> dict[str, str]:
    """An anchor for each test: the same in every run that has the test."""
    anchor_of: dict[str, str] = {}
    counts: dict[str, int] = {}
    for name in ids:
        path = name.removeprefix("tests/").replace(".py::", "-").removeprefix("test_")
        plain = _NOT_IN_ANCHOR.sub("-", path.lower()).strip("-")[:_MOST_ANCHOR].strip("-")
        anchor = f"test-{plain or 'nameless'}"
        counts[anchor] = counts.get(anchor, 0) + 1
        anchor_of[name] = anchor if counts[anchor] == 1 else f"{anchor}--{counts[anchor]}"
    return anchor_of


def kernel(name: str) -> str:
    """A kernel's name without what it was instantiated with, and what is around it."""
    if len(name) <= MOST_KERNEL:
        return name
    before = None
    while before != name:  # from the innermost outwards
        before, name = name, _ARGUMENTS.sub("", name)
    parts = _SPACES.sub(" ", name).strip().removeprefix("void ").split("::")
    short = parts.pop()
    while parts and len(parts[-1]) + 2 + len(short) <= MOST_KERNEL:
        short = f"{parts.pop()}::{short}"
    return short if len(short) <= MOST_KERNEL else f"{short[: MOST_KERNEL - 1]}…"
