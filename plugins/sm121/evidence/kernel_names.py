"""The names of kernels and operators, and the part of the model that each computes.

The names are data: ``fixtures/kernels/names.toml``.
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
"""The proof of a kernel beside its part (`sm121.evidence.kernel_proof`).

``layer_pass``: a write into the KV cache, one a layer and pass. ``plain``, ``requantised``,
``quantised``: a dense product in BF16, in the checkpoint's MXFP4, in another format. ``fused``,
``unfused``: the variant of the experts' first product.
"""


class KernelName(DataTable):
    """The purpose of the kernels or operators with a name."""

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    part: Part
    regex: Regex
    #: On the whole name of the only backend that runs it, in any case. None: several backends do.
    backend: Pattern | None = None
    proves: Proof | None = None
    #: Whether the text behind the match matters, so that a cut name is never this one.
    whole: bool = False
    source: str = Field(min_length=3)

    def belongs_to(self, backend: str) -> bool:
        """Return whether only this backend runs such kernels.

        Args:
            backend: The name of the backend.
        """
        return self.backend is not None and bool(re.fullmatch(self.backend, backend, re.I))


class KernelNames(DataTable):
    """All known names. The first entry that matches counts."""

    name: Entries[KernelName]


def load_names() -> KernelNames:
    """Load the names that come with the suite.

    Raises:
        DataFileError: The file breaks the schema.
    """
    return data_file.load("kernels/names.toml", KernelNames)


@cache
def entry_of(name: str) -> KernelName | None:
    """Return the entry of a kernel or operator, or None if its name is not known.

    Args:
        name: The name, perhaps cut.
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
        name: The name, perhaps cut.

    Returns:
        The part; ``other`` if the name is not known.
    """
    entry = entry_of(name)
    return "other" if entry is None else entry.part


def is_cut(name: str) -> bool:
    """Return whether the end of a name is missing, as in the table that nsys prints.

    Args:
        name: The name.
    """
    if name.endswith(("…", "...")):
        return True
    return name.count("(") > name.count(")") or name.count("<") > name.count(">")
