"""Short forms of long names: HTML anchors of tests, and shortened names of kernels."""

import re
from collections.abc import Iterable

_MOST_ANCHOR = 80
#: Maximum number of characters of a kernel's name; longer names are shortened.
MOST_KERNEL = 56
_NOT_IN_ANCHOR = re.compile(r"[^a-z0-9]+")
_ARGUMENTS = re.compile(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}")
_SPACES = re.compile(r"\s+")


def anchors(ids: Iterable[str]) -> dict[str, str]:
    """Return an HTML anchor for each test. A test has the same anchor in every run.

    Args:
        ids: The ids of a run's tests.

    Returns:
        The anchors, by the id of the test.
    """
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
    """Shorten a kernel's name: remove its arguments, then the outer namespaces that do not fit.

    Args:
        name: The name as a profiler prints it.
    """
    if len(name) <= MOST_KERNEL:
        return name
    plain = _without_arguments(name)
    parts = _SPACES.sub(" ", plain).strip().removeprefix("void ").split("::")
    short = parts.pop()
    while parts and len(parts[-1]) + 2 + len(short) <= MOST_KERNEL:
        short = f"{parts.pop()}::{short}"
    return short if len(short) <= MOST_KERNEL else f"{short[: MOST_KERNEL - 1]}…"


def _without_arguments(name: str) -> str:
    """Return a name without bracketed parts; nested brackets are removed from the inside out."""
    while True:
        shorter = _ARGUMENTS.sub("", name)
        if shorter == name:
            return name
        name = shorter
