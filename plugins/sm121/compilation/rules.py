"""What must and must not be among the instructions of compiled code, as data, and the judging."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import Field

from sm121.compilation import device_code, sass
from sm121.core.data_file import DataTable, Pattern
from sm121.core.printable import some_of


class SassRule(DataTable):
    """Regular expressions; the first two on an instruction with its modifiers."""

    must_see: tuple[Pattern, ...] = Field(min_length=1)
    must_not_see: tuple[Pattern, ...] = ("^BPT\\.TRAP",)
    must_see_kernel: tuple[Pattern, ...] = ()
    """On the mangled name of a kernel."""


@dataclass(frozen=True)
class RuleFinding:
    """What a rule found in a file's instructions. Empty lists: the rule holds."""

    missing: tuple[str, ...]
    """Patterns of ``must_see`` and ``must_see_kernel`` that nothing matches."""
    forbidden: tuple[str, ...]
    """Instructions that ``must_not_see`` matches, with their number."""
    only_trapping: tuple[str, ...]
    """Kernels in which every thread runs into a trap."""
    kernels: int

    @property
    def holds(self) -> bool:
        """True when all that must be there is, and nothing that must not."""
        return not (self.missing or self.forbidden or self.only_trapping) and self.kernels > 0

    def joined(self, other: "RuleFinding") -> "RuleFinding":
        """Of two files as one: what one of them has need not be in the other."""
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
                f"({_some(self.only_trapping)}): the body was compiled out without a word"
            )
        if self.missing:
            parts.append(f"no instruction or kernel like {_some(self.missing)}")
        if self.forbidden:
            parts.append(f"must not be there: {_some(self.forbidden)}")
        return "; ".join(parts) or f"{self.kernels} kernels as required"


def examine(rule: SassRule, kernels: Iterable[sass.Kernel]) -> RuleFinding:
    """Hold a rule against kernels, which are read once."""
    missing = dict.fromkeys((*rule.must_see, *rule.must_see_kernel))
    forbidden: dict[str, int] = {}
    trapping = []
    count = 0
    for kernel in kernels:
        count += 1
        for opcode, times in kernel.opcodes.items():
            for pattern in [p for p in rule.must_see if p in missing and re.search(p, opcode)]:
                del missing[pattern]
            if any(re.search(pattern, opcode) for pattern in rule.must_not_see):
                forbidden[opcode] = forbidden.get(opcode, 0) + times
        for pattern in rule.must_see_kernel:
            if pattern in missing and re.search(pattern, kernel.name):
                del missing[pattern]
        if kernel.only_traps:
            trapping.append(kernel.name)
    return RuleFinding(
        missing=tuple(missing),
        forbidden=tuple(f"{times} {opcode}" for opcode, times in forbidden.items()),
        only_trapping=tuple(trapping),
        kernels=count,
    )


def unacceptable_images(images: Sequence[device_code.Image], gpu: int) -> list[str]:
    """What of a file's device code is not machine code that may use ``gpu``'s FP4 instructions, a
    line each. For GB10 (121) acceptable are ``sm_121a``, ``sm_121f`` and ``sm_120f``."""
    if not images:
        return ["no device code"]
    wrong = []
    for image in images:
        if image.kind == "ptx":
            wrong.append(f"{image}: machine code is required, this is for the driver to translate")
        elif not image.architecture.sass_runs_on(gpu):
            wrong.append(f"{image}: does not run on sm_{gpu}")
        elif not image.architecture.is_full(gpu):
            wrong.append(f"{image}: without the suffix a or f it cannot use FP4 instructions")
    return wrong


def _some(texts: Sequence[str]) -> str:
    return some_of([text if len(text) <= 120 else f"{text[:117]}..." for text in texts], 3)
