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
    """Return an anchor for each test, which is the same in every run.

    Args:
        ids: The tests of a run.

    Returns:
        The anchors by the tests' ids.
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
    """Return a kernel's name without its arguments, and without the namespaces that do not fit.

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
    """A name without its brackets, removed from the innermost outwards."""
    while True:
        shorter = _ARGUMENTS.sub("", name)
        if shorter == name:
            return name
        name = shorter
