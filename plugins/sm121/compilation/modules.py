"""FlashInfer's JIT modules for gpt-oss: compiled as FlashInfer would, judged by their SASS."""

import functools
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


class Module(rules.SassRule):
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


def load_modules() -> tuple[Module, ...]:
    """The modules that come with the suite. Raises DataFileError when the file is wrong."""
    kind = data_file.Entries[Module]
    return data_file.load_key("compilation/modules.toml", "module", kind)


def names() -> list[str]:
    """Names of the modules, in the order of the file."""
    return [entry.name for entry in load_modules()]


def module(name: str) -> Module:
    """A module by name. Raises UsageError naming those that there are."""
    return data_file.named(load_modules(), name, "module")


def contradictions(chosen: Module, flashinfer: FlashInfer, tools: toolchain.Tools) -> list[Fact]:
    """Compile the CUDA units of a module one after the other; what is not as required. Raises
    NotRun: too little memory, or FlashInfer does not answer; TookTooLong: nvcc does not end."""
    available = psutil.virtual_memory().available / 2**30
    if available < chosen.memory_gib:
        raise verdict.NotRun(
            Fact(
                "memory for the compiler: at least",
                value=available,
                limit=chosen.memory_gib,
                unit="GiB",
                evidence="remedy: stop what holds memory",
            )
        )
    units = flashinfer.units(chosen.name, chosen.arch_list, tools.compiler, tools.folder)
    wrong: list[Fact] = []
    findings: list[rules.RuleFinding] = []
    required = [CodeArchitecture.parse(text) for text in chosen.architectures]
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
            else:
                findings.append(built.finding)
                images = device_code.read(output)
                unacceptable = rules.unacceptable_images(images, GB10)
                wrong.extend(Fact("", line, unit.source.name) for line in unacceptable)
    if not wrong and findings:
        whole = functools.reduce(rules.RuleFinding.joined, findings)
        if not whole.holds:
            wrong.append(Fact("", f"{whole}", chosen.name))
    elif not wrong:
        wrong.append(Fact("CUDA units", about=chosen.name))
    return wrong


def compile_unit(
    unit: Unit, architecture: CodeArchitecture, chosen: Module, tools: toolchain.Tools, output: Path
) -> Built:
    """Compile one unit for one architecture and judge it. Errors as for `contradictions`."""
    with as_file(files("sm121.fixtures") / "compilation" / "headers") as headers:
        return build(
            unit.source,
            architecture,
            chosen,
            refusal=probes.load_probes().refusal,
            tools=tools,
            output=output,
            # Last in the search order: the toolkit's own headers win where it has them.
            arguments=[*unit.arguments, "-isystem", str(headers)],
            timeout_s=chosen.timeout_s,
        )


def _list(architectures: list[CodeArchitecture]) -> str:
    return ", ".join(map(str, architectures)) or "none"
