"""Find the part of the model that a kernel or operator computes, from the kernel's name.

The names are listed in ``fixtures/kernels/names.toml``.
"""

import re
from functools import cache
from typing import Literal, get_args

from pydantic import Field

from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries, Pattern, Regex

Part = Literal["attention", "moe", "dense", "quantise", "other"]
PARTS: tuple[Part, ...] = get_args(Part)

Proof = Literal["layer_pass", "plain", "requantised", "quantised", "fused", "unfused"]
"""What a kernel proves in addition to its part of the model (`sm121.evidence.kernel_proof`).

``layer_pass``: a write into the KV cache, one per layer and forward pass. ``plain``,
``requantised``, ``quantised``: a dense matrix product in BF16, in the checkpoint's MXFP4, or in
another format. ``fused``, ``unfused``: the variant of the experts' first product.
"""


class KernelName(DataTable):
    """The purpose of kernels or operators whose name matches a pattern."""

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    part: Part
    regex: Regex
    #: A pattern for the whole name of the only backend that runs these kernels, ignoring case. None
    #: if several backends run them.
    backend: Pattern | None = None
    proves: Proof | None = None
    #: Whether the pattern depends on the end of the name, so that it cannot apply to truncated
    #: names.
    whole: bool = False
    source: str = Field(min_length=3)

    def belongs_to(self, backend: str) -> bool:
        """Return whether only this backend runs such kernels.

        Args:
            backend: The name of the backend.
        """
        return self.backend is not None and bool(re.fullmatch(self.backend, backend, re.I))


class KernelNames(DataTable):
    """All known names. The first entry that matches a name applies."""

    name: Entries[KernelName]


def load_names() -> KernelNames:
    """Load the known names.

    Raises:
        DataFileError: The file breaks the schema.
    """
    return data_file.load("kernels/names.toml", KernelNames)


@cache
def entry_of(name: str) -> KernelName | None:
    """Return the entry for a kernel or operator, or None if its name is unknown.

    Args:
        name: The name, which may be truncated.
    """
    cut = is_cut(name)
    for entry in load_names().name:
        if cut and entry.whole:
            continue
        if entry.regex.search(name):
            return entry
    return None


def part_of(name: str) -> Part:
    """Return the part of the model that a kernel or operator computes.

    Args:
        name: The name, which may be truncated.

    Returns:
        The part; ``other`` if the name is unknown.
    """
    entry = entry_of(name)
    return "other" if entry is None else entry.part


def is_cut(name: str) -> bool:
    """Return whether a name is truncated, as in the table that nsys prints.

    Args:
        name: The name.
    """
    if name.endswith(("…", "...")):
        return True
    return name.count("(") > name.count(")") or name.count("<") > name.count(">")
