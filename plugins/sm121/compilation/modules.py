"""Compile FlashInfer's JIT modules for gpt-oss as FlashInfer does, and check their SASS."""

import functools
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

import psutil
from pydantic import Field

from sm121.compilation import device_code, probes, rules, toolchain
from sm121.compilation.architecture import GB10, CodeArchitecture
from sm121.compilation.build import Built, build
from sm121.compilation.flashinfer import FlashInfer, Unit
from sm121.core import data_file, verdict
from sm121.core.unmet import Fact

_GIB = 1 << 30


class Module(rules.SassRule):
    """A JIT module, and the requirements on its device code."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    #: The value of FLASHINFER_CUDA_ARCH_LIST for the build.
    arch_list: str
    #: The architectures for which FlashInfer must compile the module, such as ``sm_121a``.
    architectures: tuple[str, ...] = Field(min_length=1)
    #: The time limit of each unit, in seconds.
    timeout_s: float = Field(gt=0)
    #: The peak memory of one compiler, in GiB.
    memory_gib: float = Field(gt=0)
    source: str = Field(min_length=3)


def load_modules() -> tuple[Module, ...]:
    """Return the modules that the suite compiles.

    Raises:
        DataFileError: The file is malformed.
    """
    kind = data_file.Entries[Module]
    return data_file.load_key("compilation/modules.toml", "module", kind)


def names() -> list[str]:
    """Return the names of the modules, in the order of the file."""
    return [entry.name for entry in load_modules()]


def module(name: str) -> Module:
    """Return the module with a given name.

    Args:
        name: The name.

    Raises:
        UsageError: The suite has no module of this name. The message lists the names.
    """
    return data_file.named(load_modules(), name, "module")


def contradictions(chosen: Module, flashinfer: FlashInfer, tools: toolchain.Tools) -> list[Fact]:
    """Compile the CUDA units of a module, one after the other, and check their instructions.

    Args:
        chosen: The module.
        flashinfer: The installed FlashInfer.
        tools: The compiler, the disassembler, and the folder for the results.

    Returns:
        One fact for each requirement that is not met.

    Raises:
        NotRun: There is too little memory, or FlashInfer cannot be imported.
        TookTooLong: nvcc exceeds the time limit.
    """
    _require_memory(chosen)
    units = flashinfer.units(chosen.name, chosen.arch_list, tools.compiler, tools.folder)
    required = [CodeArchitecture.parse(text) for text in chosen.architectures]
    wrong: list[Fact] = []
    findings: list[rules.RuleFinding] = []
    for number, unit in enumerate(units):
        observed = sorted(CodeArchitecture.parse(text) for text in unit.compiled_for)
        if observed != sorted(required):
            wrong.append(Fact(_list(required), _list(observed), unit.source.name))
            continue
        for architecture in required:
            output = tools.folder / f"{chosen.name}.{number}.{architecture}.fatbin"
            built = compile_unit(unit, architecture, chosen, tools, output)
            if built.finding is None:
                wrong.append(Fact("", built.reason, f"{unit.source.name} for {architecture}"))
                continue
            findings.append(built.finding)
            for line in rules.unacceptable_images(device_code.read_device_code(output), GB10):
                wrong.append(Fact("", line, unit.source.name))
    if wrong:
        return wrong
    if not findings:
        return [Fact("CUDA units", about=chosen.name)]
    whole = functools.reduce(rules.RuleFinding.joined, findings)
    if not whole.holds:
        return [Fact("", f"{whole}", chosen.name)]
    return []


def _require_memory(chosen: Module) -> None:
    available = psutil.virtual_memory().available / _GIB
    if available < chosen.memory_gib:
        raise verdict.NotRun(
            Fact(
                "memory for the compiler: at least",
                value=available,
                limit=chosen.memory_gib,
                unit="GiB",
                evidence="remedy: stop other processes that use memory",
            )
        )


def compile_unit(
    unit: Unit, architecture: CodeArchitecture, chosen: Module, tools: toolchain.Tools, output: Path
) -> Built:
    """Compile one unit for one architecture, and check its instructions.

    Args:
        unit: The unit.
        architecture: The architecture.
        chosen: The module, with the required instructions.
        tools: The compiler and the disassembler.
        output: The file of the fat binary.

    Raises:
        TookTooLong: nvcc exceeds the time limit.
    """
    with as_file(files("sm121.fixtures") / "compilation" / "headers") as headers:
        return build(
            unit.source,
            architecture,
            chosen,
            refusal=probes.load_probes().refusal,
            tools=tools,
            output=output,
            # Searched last, so that the toolkit's own headers take precedence.
            arguments=[*unit.arguments, "-isystem", str(headers)],
            timeout_s=chosen.timeout_s,
        )


def _list(architectures: Sequence[CodeArchitecture]) -> str:
    return ", ".join(str(architecture) for architecture in architectures) or "none"
