"""One source, one architecture: compiled by nvcc, and told apart by what came out."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sm121.compilation import child, device_code, rules, sass, toolchain
from sm121.compilation.architecture import CodeArchitecture
from sm121.core.errors import Sm121Error


class BuildOutcome(StrEnum):
    """What came of a compilation. Only the first is fit for use, whatever nvcc's exit status."""

    HARDWARE = "hardware"
    """Compiled, and the instructions that are required are there."""
    REFUSED = "refused"
    """ptxas said that the architecture lacks the instruction."""
    SOFTWARE = "software"
    """Compiled without a word, to something else than the instructions that are required."""
    TRAP = "trap"
    """Compiled without a word, to a kernel that only traps."""
    BROKEN = "broken"
    """Not compiled, for another reason."""


@dataclass(frozen=True)
class Built:
    """A compilation, and what is known of its result."""

    architecture: CodeArchitecture
    outcome: BuildOutcome
    reason: str
    """One line: the finding in the instructions, or the compiler's first error."""
    finding: rules.RuleFinding | None
    """None when nothing was compiled."""


def build(
    source: Path,
    architecture: CodeArchitecture,
    rule: rules.SassRule,
    *,
    refusal: re.Pattern[str],
    tools: toolchain.Tools,
    output: Path,
    arguments: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> Built:
    """Compile the device code of ``source`` (CUDA) for one architecture, without PTX, into the fat
    binary ``output``, and judge its instructions by ``rule``. ``refusal`` matches ptxas' message
    that the architecture lacks an instruction; architectures among ``arguments`` are replaced;
    ``timeout_s`` is wall time. Raises TookTooLong: nvcc took longer; Sm121Error: it made something
    else than it was asked for, or that cannot be read."""
    # -fatbin: device code only, so that neither host compilation nor linking takes part.
    words = [*without_architectures(arguments), "-gencode", architecture.gencode]
    command: list[str | Path] = [tools.compiler.nvcc, "-fatbin", *words, source, "-o", output]
    ended = child.run(command, timeout_s=timeout_s)
    if ended.status != 0:
        match = refusal.search(ended.output)
        outcome = BuildOutcome.REFUSED if match else BuildOutcome.BROKEN
        lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
        lines += [f"exit status {ended.status}, no message"] if not lines else []
        error = next((line for line in lines if "error" in line or "fatal" in line), lines[-1])
        return Built(architecture, outcome, match[0] if match else error[:300], None)
    images = device_code.read(output)
    if images != (device_code.Image("sass", architecture),):
        observed = ", ".join(map(str, images)) or "no device code"
        raise Sm121Error(f"{source.name}: required of nvcc: {architecture}; seen: {observed}")
    finding = rules.examine(rule, sass.disassemble(output, tools.disassembler))
    if finding.holds:
        outcome = BuildOutcome.HARDWARE
    elif finding.only_trapping or any("BPT.TRAP" in text for text in finding.forbidden):
        outcome = BuildOutcome.TRAP
    else:
        outcome = BuildOutcome.SOFTWARE
    return Built(architecture, outcome, str(finding), finding)


def without_architectures(arguments: Sequence[str]) -> list[str]:
    """Arguments of nvcc without those that choose architectures."""
    remaining: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("-gencode", "--generate-code", "-arch", "--gpu-architecture"):
            next(words, None)
        elif not re.match(r"-gencode=|--generate-code=|-arch=|--gpu-architecture=", word):
            remaining.append(word)
    return remaining
