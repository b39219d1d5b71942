"""Compile one source for one architecture with nvcc, and check the resulting instructions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sm121.compilation import child, device_code, rules, sass, toolchain
from sm121.compilation.architecture import CodeArchitecture
from sm121.core.errors import Sm121Error

#: The options of nvcc that choose architectures.
_ARCHITECTURE_OPTIONS = ("-gencode", "--generate-code", "-arch", "--gpu-architecture")
#: The maximum length of a compiler's error message, in characters.
_ERROR_LENGTH = 300


class BuildOutcome(StrEnum):
    """The outcome of a compilation. Only HARDWARE is usable, even if nvcc's exit status is 0."""

    #: The source was compiled to the required instructions.
    HARDWARE = "hardware"
    #: ptxas reported that the architecture lacks the instruction.
    REFUSED = "refused"
    #: The source was compiled without a message, but not to the required instructions.
    SOFTWARE = "software"
    #: The source was compiled without a message, but to a kernel that only traps.
    TRAP = "trap"
    #: The compilation failed for another reason.
    BROKEN = "broken"


@dataclass(frozen=True)
class Built:
    """The result of a compilation.

    Attributes:
        architecture: The architecture.
        outcome: The outcome.
        reason: The result of the rule, or the compiler's first error, in one line.
        finding: The result of the rule on the instructions; None if nothing was compiled.
    """

    architecture: CodeArchitecture
    outcome: BuildOutcome
    reason: str
    finding: rules.RuleFinding | None


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
    """Compile the device code of a source for one architecture, without PTX, and check it.

    Args:
        source: The CUDA source.
        architecture: The architecture.
        rule: The rule with the required instructions.
        refusal: A pattern for ptxas' message that the architecture lacks an instruction.
        tools: The compiler and the disassembler.
        output: The file of the fat binary.
        arguments: Arguments of nvcc. Options that choose architectures are replaced.
        timeout_s: The limit of wall-clock time, in seconds.

    Raises:
        TookTooLong: nvcc took longer.
        Sm121Error: nvcc generated code for other architectures, or code that cannot be read.
    """
    # -fatbin: device code only, without host compilation and linking.
    words = [*without_architectures(arguments), "-gencode", architecture.gencode]
    command: list[str | Path] = [tools.compiler.nvcc, "-fatbin", *words, source, "-o", output]
    ended = child.run(command, timeout_s=timeout_s)
    if ended.status != 0:
        match = refusal.search(ended.output)
        if match is not None:
            return Built(architecture, BuildOutcome.REFUSED, match[0], None)
        return Built(architecture, BuildOutcome.BROKEN, _first_error(ended), None)
    images = device_code.read_device_code(output)
    if images != (device_code.Image("sass", architecture),):
        observed = ", ".join(map(str, images)) or "no device code"
        raise Sm121Error(
            f"{source.name}: expected code for {architecture} from nvcc, got {observed}"
        )
    finding = rules.examine(rule, sass.disassemble(output, tools.disassembler))
    return Built(architecture, _outcome_of(finding), str(finding), finding)


def _first_error(ended: child.ProcessResult) -> str:
    """Return the first line with an error, or the last line of the compiler's output."""
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    for line in lines:
        if "error" in line or "fatal" in line:
            return line[:_ERROR_LENGTH]
    if lines:
        return lines[-1][:_ERROR_LENGTH]
    return f"exit status {ended.status}, no message"


def _outcome_of(finding: rules.RuleFinding) -> BuildOutcome:
    if finding.holds:
        return BuildOutcome.HARDWARE
    if finding.only_trapping or any("BPT.TRAP" in text for text in finding.forbidden):
        return BuildOutcome.TRAP
    return BuildOutcome.SOFTWARE


def without_architectures(arguments: Sequence[str]) -> list[str]:
    """Return arguments of nvcc without those that choose architectures.

    Args:
        arguments: The arguments. An option's value may be in the same word or in the next one.
    """
    joined = tuple(f"{option}=" for option in _ARCHITECTURE_OPTIONS)
    remaining: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in _ARCHITECTURE_OPTIONS:
            next(words, None)  # skip the option's value
        elif not word.startswith(joined):
            remaining.append(word)
    return remaining
