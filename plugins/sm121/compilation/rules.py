"""Check the instructions of compiled code with rules."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import Field

from sm121.compilation import device_code, sass
from sm121.core.data_file import DataTable, Pattern
from sm121.core.printable import some_of

#: The maximum number of texts of a kind that a finding quotes.
_QUOTED = 3
#: The maximum length of each quoted text, in characters.
_QUOTED_LENGTH = 120


class SassRule(DataTable):
    """Regular expressions for instructions with their modifiers, and for names of kernels."""

    #: Each of these patterns must match some instruction.
    must_see: tuple[Pattern, ...] = Field(min_length=1)
    #: None of these patterns may match any instruction.
    must_not_see: tuple[Pattern, ...] = ("^BPT\\.TRAP",)
    #: Each of these patterns must match the mangled name of some kernel.
    must_see_kernel: tuple[Pattern, ...] = ()


@dataclass(frozen=True)
class RuleFinding:
    """The result of a rule for a file. The rule is met if the file has kernels and no faults.

    Attributes:
        missing: Patterns of ``must_see`` and ``must_see_kernel`` without a match.
        forbidden: Instructions that ``must_not_see`` matches, each with its number of occurrences.
        only_trapping: Kernels in which every thread reaches a trap.
        kernels: The number of kernels.
    """

    missing: tuple[str, ...]
    forbidden: tuple[str, ...]
    only_trapping: tuple[str, ...]
    kernels: int

    @property
    def holds(self) -> bool:
        """Whether all required instructions are present, and no forbidden instructions."""
        has_fault = self.missing or self.forbidden or self.only_trapping
        return self.kernels > 0 and not has_fault

    def joined(self, other: "RuleFinding") -> "RuleFinding":
        """Combine the findings for two files.

        A required pattern must match in at least one of them.

        Args:
            other: The finding of the other file.
        """
        return RuleFinding(
            missing=tuple(pattern for pattern in self.missing if pattern in other.missing),
            forbidden=self.forbidden + other.forbidden,
            only_trapping=self.only_trapping + other.only_trapping,
            kernels=self.kernels + other.kernels,
        )

    def __str__(self) -> str:
        if not self.kernels:
            return "no kernel"
        parts = []
        if self.only_trapping:
            parts.append(
                f"{len(self.only_trapping)} of {self.kernels} kernels only trap "
                f"({_some(self.only_trapping)}): the body was compiled out without a message"
            )
        if self.missing:
            parts.append(f"no instruction or kernel like {_some(self.missing)}")
        if self.forbidden:
            parts.append(f"forbidden, but present: {_some(self.forbidden)}")
        return "; ".join(parts) or f"{self.kernels} kernels as required"


def examine(rule: SassRule, kernels: Iterable[sass.SassKernel]) -> RuleFinding:
    """Evaluate a rule on kernels.

    Args:
        rule: The rule.
        kernels: The kernels, which are iterated over once.
    """
    missing = list(dict.fromkeys((*rule.must_see, *rule.must_see_kernel)))
    forbidden: Counter[str] = Counter()
    trapping = []
    count = 0
    for kernel in kernels:
        count += 1
        missing = _without_matches(missing, rule.must_see, kernel.opcodes)
        missing = _without_matches(missing, rule.must_see_kernel, [kernel.name])
        for opcode, times in kernel.opcodes.items():
            if _matches_any(rule.must_not_see, opcode):
                forbidden[opcode] += times
        if kernel.only_traps:
            trapping.append(kernel.name)
    return RuleFinding(
        missing=tuple(missing),
        forbidden=tuple(f"{times} {opcode}" for opcode, times in forbidden.items()),
        only_trapping=tuple(trapping),
        kernels=count,
    )


def _without_matches(
    missing: list[str], patterns: Sequence[str], texts: Iterable[str]
) -> list[str]:
    """Return those patterns of `missing` that match none of the texts."""
    remaining = []
    for pattern in missing:
        is_found = pattern in patterns and any(re.search(pattern, text) for text in texts)
        if not is_found:
            remaining.append(pattern)
    return remaining


def _matches_any(patterns: Sequence[str], text: str) -> bool:
    return any(re.search(pattern, text) for pattern in patterns)


def unacceptable_images(images: Sequence[device_code.Image], gpu: int) -> list[str]:
    """Return a line for each piece of device code that cannot use a GPU's FP4 instructions.

    Args:
        images: The device code.
        gpu: The compute capability. For GB10 (121), ``sm_121a``, ``sm_121f`` and ``sm_120f`` are
            acceptable.

    Returns:
        One line for each image that is not acceptable.
    """
    if not images:
        return ["no device code"]
    lines = []
    for image in images:
        if image.kind == "ptx":
            lines.append(f"{image}: expected machine code, got PTX that the driver must compile")
        elif not image.architecture.sass_runs_on(gpu):
            lines.append(f"{image}: does not run on sm_{gpu}")
        elif not image.architecture.is_full(gpu):
            lines.append(f"{image}: without the suffix a or f it cannot use FP4 instructions")
    return lines


def _some(texts: Sequence[str]) -> str:
    """Quote the first texts, and shorten long ones."""
    return some_of([_shorten(text) for text in texts], _QUOTED)


def _shorten(text: str) -> str:
    if len(text) <= _QUOTED_LENGTH:
        return text
    return f"{text[: _QUOTED_LENGTH - 3]}..."
