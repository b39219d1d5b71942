"""Device architectures as nvcc, FlashInfer and fat binaries write them, and which runs where."""

import re
from dataclasses import dataclass

from sm121.core.errors import UsageError

GB10 = 121
"""Compute capability of GB10, without the point."""

_SPELLING = re.compile(
    r"(?:(?:sm|compute)_?)?(?:(?P<major>\d{1,2})\.(?P<minor>\d)|(?P<number>\d{2,3}))"
    r"(?P<suffix>[af]?)"
)


@dataclass(frozen=True, order=True)
class CodeArchitecture:
    """An architecture that code was made for: ``sm_121a`` is number 121, suffix ``a``. Without a
    suffix the code may use only what every later GPU of the generation has, which leaves out
    block-scaled FP4. ``f`` opens the family's instructions, ``a`` those of the one architecture."""

    number: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> "CodeArchitecture":
        """From ``sm_121a``, ``compute_121a``, ``121a`` or ``12.1a``. Raises UsageError: another."""
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"architecture {text!r}: expected the form sm_121a, 121a or 12.1a")
        number = match["number"] or match["major"] + match["minor"]
        return cls(int(number), match["suffix"])

    @property
    def sass(self) -> str:
        """As fat binaries name machine code: ``sm_121a``."""
        return f"sm_{self.number}{self.suffix}"

    @property
    def gencode(self) -> str:
        """The argument of nvcc's ``-gencode`` that makes machine code for it, and no PTX."""
        short = f"{self.number}{self.suffix}"
        return f"arch=compute_{short},code=sm_{short}"

    def sass_runs_on(self, gpu: int) -> bool:
        """True when machine code for it loads on a GPU (121): ``a`` code on its own architecture,
        other code on the same major version from its minor version up."""
        if self.suffix == "a":
            return self.number == gpu
        return self.number // 10 == gpu // 10 and self.number <= gpu

    def ptx_runs_on(self, gpu: int) -> bool:
        """True when the driver can translate PTX for it for a GPU of capability ``gpu``."""
        return self.sass_runs_on(gpu) if self.suffix else self.number <= gpu

    def is_full(self, gpu: int) -> bool:
        """True for machine code that runs on ``gpu`` and may use its FP4 instructions."""
        return bool(self.suffix) and self.sass_runs_on(gpu)

    def __str__(self) -> str:
        return self.sass
