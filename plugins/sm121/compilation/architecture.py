"""Architectures of device code, in the notations of nvcc, FlashInfer and fat binaries."""

import re
from dataclasses import dataclass

from sm121.core.errors import UsageError

#: The compute capability of GB10, without the point.
GB10 = 121

_SPELLING = re.compile(
    r"(?:(?:sm|compute)_?)?(?:(?P<major>\d{1,2})\.(?P<minor>\d)|(?P<number>\d{2,3}))"
    r"(?P<suffix>[af]?)"
)


@dataclass(frozen=True, order=True)
class CodeArchitecture:
    """The target architecture of device code. ``sm_121a`` has the number 121 and the suffix ``a``.

    Code without a suffix may use only instructions that all later GPUs of the generation have,
    which excludes block-scaled FP4. Code with ``f`` may also use the instructions of the family,
    and code with ``a`` all instructions of this one architecture.

    Attributes:
        number: The compute capability, without the point.
        suffix: ``a``, ``f`` or empty.
    """

    number: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> "CodeArchitecture":
        """Parse the name of an architecture.

        Args:
            text: The name, for example ``sm_121a``, ``compute_121a``, ``121a`` or ``12.1a``.

        Raises:
            UsageError: The name does not have one of these forms.
        """
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"architecture {text!r}: expected the form sm_121a, 121a or 12.1a")
        number = match["number"] or match["major"] + match["minor"]
        return cls(int(number), match["suffix"])

    @property
    def sass(self) -> str:
        """The name of machine code in fat binaries, for example ``sm_121a``."""
        return f"sm_{self.number}{self.suffix}"

    @property
    def gencode(self) -> str:
        """The argument of nvcc's ``-gencode`` for machine code without PTX."""
        short = f"{self.number}{self.suffix}"
        return f"arch=compute_{short},code=sm_{short}"

    def sass_runs_on(self, gpu: int) -> bool:
        """Return whether machine code for this architecture loads on a GPU.

        Code with ``a`` loads only on its own architecture. Other code loads on GPUs with the same
        major version, and the same or a higher minor version.

        Args:
            gpu: The compute capability, such as 121.
        """
        if self.suffix == "a":
            return self.number == gpu
        return self.number // 10 == gpu // 10 and self.number <= gpu

    def ptx_runs_on(self, gpu: int) -> bool:
        """Return whether the driver can compile PTX for this architecture to code for a GPU.

        Args:
            gpu: The compute capability, such as 121.
        """
        if self.suffix:
            return self.sass_runs_on(gpu)
        return self.number <= gpu

    def is_full(self, gpu: int) -> bool:
        """Return whether machine code for this architecture runs on a GPU and can use its FP4.

        Args:
            gpu: The compute capability, such as 121.
        """
        return bool(self.suffix) and self.sass_runs_on(gpu)

    def __str__(self) -> str:
        return self.sass
