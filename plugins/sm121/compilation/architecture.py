"""Device architectures, as nvcc, FlashInfer and fat binaries write them."""

import re
from dataclasses import dataclass

from sm121.core.errors import UsageError

#: Compute capability of GB10, without the point.
GB10 = 121

_SPELLING = re.compile(
    r"(?:(?:sm|compute)_?)?(?:(?P<major>\d{1,2})\.(?P<minor>\d)|(?P<number>\d{2,3}))"
    r"(?P<suffix>[af]?)"
)


@dataclass(frozen=True, order=True)
class CodeArchitecture:
    """An architecture that code was made for: ``sm_121a`` is number 121, suffix ``a``.

    Code without a suffix may use only the instructions that every later GPU of the generation has,
    which leaves out block-scaled FP4. With ``f`` it may use the family's instructions, with ``a``
    those of the one architecture.

    Attributes:
        number: The compute capability, without the point.
        suffix: ``a``, ``f`` or empty.
    """

    number: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> "CodeArchitecture":
        """Return the architecture of a name.

        Args:
            text: The name: ``sm_121a``, ``compute_121a``, ``121a`` or ``12.1a``.

        Raises:
            UsageError: The name has another form.
        """
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"architecture {text!r}: expected the form sm_121a, 121a or 12.1a")
        number = match["number"] or match["major"] + match["minor"]
        return cls(int(number), match["suffix"])

    @property
    def sass(self) -> str:
        """The name of machine code in fat binaries: ``sm_121a``."""
        return f"sm_{self.number}{self.suffix}"

    @property
    def gencode(self) -> str:
        """The argument of nvcc's ``-gencode`` for machine code without PTX."""
        short = f"{self.number}{self.suffix}"
        return f"arch=compute_{short},code=sm_{short}"

    def sass_runs_on(self, gpu: int) -> bool:
        """Return whether machine code for it loads on a GPU.

        Code with ``a`` loads on its own architecture, other code on the same major version from its
        minor version up.

        Args:
            gpu: The compute capability, such as 121.
        """
        if self.suffix == "a":
            return self.number == gpu
        return self.number // 10 == gpu // 10 and self.number <= gpu

    def ptx_runs_on(self, gpu: int) -> bool:
        """Return whether the driver can translate its PTX for a GPU.

        Args:
            gpu: The compute capability, such as 121.
        """
        if self.suffix:
            return self.sass_runs_on(gpu)
        return self.number <= gpu

    def is_full(self, gpu: int) -> bool:
        """Return whether its machine code runs on a GPU and may use the FP4 instructions.

        Args:
            gpu: The compute capability, such as 121.
        """
        return bool(self.suffix) and self.sass_runs_on(gpu)

    def __str__(self) -> str:
        return self.sass
