"""FlashInfer's JIT modules for gpt-oss: compiled as FlashInfer would, judged by their SASS."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

import psutil
from pydantic import Field

from sm121.compilation import device_code
from sm121.compilation.architecture import GB10, CodeArchitecture
from sm121.compilation.build import Built, build
from sm121.compilation.flashinfer import FlashInfer, Unit
from sm121.compilation.probes import load_probes
from sm121.compilation.rules import RuleFinding, SassRule, Table, unacceptable_images
from sm121.compilation.toolchain import Compiler, Disassembler
from sm121.core import data_file
from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun


class Module(SassRule):
    """A JIT module and what its device code must be."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    arch_list: str
    """Value of FLASHINFER_CUDA_ARCH_LIST for the build."""
    architectures: tuple[str, ...] = Field(min_length=1)
    """What FlashInfer must compile it for, such as ``sm_121a``."""
    timeout_s: float = Field(gt=0)
    """For each unit, in seconds."""
    memory_gib: float = Field(gt=0)
    """What one compiler needs at its peak."""
    source: str = Field(min_length=3)


class ModuleData(Table):
    """The content of ``fixtures/compilation/modules.toml``."""

    module: tuple[Module, ...] = Field(min_length=1)


@cache
def load_modules() -> tuple[Module, ...]:
    """The modules that come with the suite. Raises DataFileError when the file is wrong."""
    name = "modules.toml"
    text = (files("sm121.fixtures") / "compilation" / name).read_text(encoding="utf-8")
    return data_file.parse(text, ModuleData, name).module


def names() -> list[str]:
    """Names of the modules, in the order of the file."""
    return [entry.name for entry in load_modules()]


def module(name: str) -> Module:
    """A module by name. Raises UsageError naming those that there are."""
    found = next((entry for entry in load_modules() if entry.name == name), None)
    if found is None:
        raise UsageError(f"module {name!r}: expected one of {', '.join(names())}")
    return found


@dataclass(frozen=True)
class ModuleResult:
    """A module that was compiled."""

    wrong: tuple[str, ...]
    """What is not as required, a line each."""
    units: int
    seconds: float
    """Wall time of nvcc, all units."""


def compile_module(
    chosen: Module,
    *,
    flashinfer: FlashInfer,
    compiler: Compiler,
    disassembler: Disassembler,
    folder: Path,
) -> ModuleResult:
    """Compile a module's CUDA units one after the other, and judge them as one.

    Args:
        chosen: of `load_modules`.
        flashinfer: generates the sources and the arguments.
        compiler: an nvcc.
        disassembler: reads what it made.
        folder: where sources are generated and results written.

    Raises:
        NotRun: the machine has too little memory for the compiler, or FlashInfer does not answer.
        sm121.compilation.child.TookTooLong: nvcc does not end.
    """
    available = psutil.virtual_memory().available / 2**30
    if available < chosen.memory_gib:
        raise NotRun(
            f"required: {chosen.memory_gib:.0f} GiB of memory for the compiler; seen: "
            f"{available:.1f} GiB available; remedy: stop what holds memory"
        )
    units = flashinfer.units(chosen.name, chosen.arch_list, compiler, folder)
    wrong: list[str] = []
    findings: list[RuleFinding] = []
    seconds = 0.0
    required = [CodeArchitecture.parse(text) for text in chosen.architectures]
    for number, unit in enumerate(units):
        seen = sorted(CodeArchitecture.parse(text) for text in unit.compiled_for)
        if seen != sorted(required):
            wrong.append(f"{unit.source.name}: required {_list(required)}, seen {_list(seen)}")
            continue
        for architecture in required:
            output = folder / f"{chosen.name}.{number}.{architecture}.fatbin"
            built = compile_unit(unit, architecture, chosen, compiler, disassembler, output)
            seconds += built.seconds
            if built.finding is None:
                wrong.append(f"{unit.source.name} for {architecture}: {built.reason}")
            else:
                findings.append(built.finding)
                images = device_code.read(output)
                unacceptable = unacceptable_images(images, GB10)
                wrong.extend(f"{unit.source.name}: {line}" for line in unacceptable)
    if not wrong and findings:
        whole = functools.reduce(RuleFinding.joined, findings)
        if not whole.holds:
            wrong.append(f"{chosen.name}: {whole}")
    elif not wrong:
        wrong.append(f"{chosen.name}: required: CUDA units; seen: none")
    return ModuleResult(tuple(wrong), len(units), seconds)


def compile_unit(
    unit: Unit,
    architecture: CodeArchitecture,
    chosen: Module,
    compiler: Compiler,
    disassembler: Disassembler,
    output: Path,
) -> Built:
    """Compile one unit for one architecture, whatever FlashInfer would have chosen, and judge it.

    Errors as for `compile_module`.
    """
    with as_file(files("sm121.fixtures") / "compilation" / "headers") as headers:
        return build(
            unit.source,
            architecture,
            chosen,
            refusal=re.compile(load_probes().refusal),
            compiler=compiler,
            disassembler=disassembler,
            output=output,
            # Last in the search order: the toolkit's own headers win where it has them.
            arguments=[*unit.arguments, "-isystem", str(headers)],
            timeout_s=chosen.timeout_s,
        )


def _list(architectures: list[CodeArchitecture]) -> str:
    return ", ".join(map(str, architectures)) or "none"
