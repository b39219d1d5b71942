"""Compile small sources ("probes") that show whether a compiler generates FP4 code for GB10."""

from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from sm121.compilation.architecture import CodeArchitecture
from sm121.compilation.build import BuildOutcome, Built, build
from sm121.compilation.rules import SassRule
from sm121.compilation.toolchain import Tools
from sm121.core import data_file
from sm121.core.errors import UsageError
from sm121.core.unmet import Fact

Tier = Literal["probes", "headers"]


class Probe(SassRule):
    """A source file, and the required outcome on each architecture."""

    #: The name of the probe, and of its file in ``sources/``.
    name: str = Field(pattern=r"^[a-z0-9_]+$")
    tier: Tier
    #: Arguments of nvcc. Names in braces stand for folders.
    arguments: tuple[str, ...] = ()
    #: The required outcome for each architecture, for example ``121a``.
    outcomes: dict[str, BuildOutcome] = Field(min_length=1)
    source: str = Field(min_length=3)

    @field_validator("outcomes")
    @classmethod
    def _architectures(cls, outcomes: dict[str, BuildOutcome]) -> dict[str, BuildOutcome]:
        for text in outcomes:
            try:
                CodeArchitecture.parse(text)
            except UsageError as error:
                raise ValueError(str(error)) from error
        return outcomes


class ProbeData(data_file.DataTable):
    """The content of ``fixtures/compilation/probes.toml``."""

    #: A pattern for ptxas' message that the architecture lacks an instruction.
    refusal: data_file.Regex
    probe: data_file.Entries[Probe]


def load_probes() -> ProbeData:
    """Return the probes that the suite compiles.

    Raises:
        DataFileError: The file is malformed.
    """
    return data_file.load("compilation/probes.toml", ProbeData)


def names(tier: Tier) -> list[str]:
    """Return the names of the probes of a tier, in the order of the file.

    Args:
        tier: The tier. Probes of the tier ``headers`` include FlashInfer's headers.
    """
    return [probe.name for probe in load_probes().probe if probe.tier == tier]


def probe(name: str) -> Probe:
    """Return the probe with a given name.

    Args:
        name: The name.

    Raises:
        UsageError: The suite has no probe of this name. The message lists the names.
    """
    return data_file.named(load_probes().probe, name, "probe")


def compile_probe(
    chosen: Probe, architecture: CodeArchitecture, tools: Tools, headers: Mapping[str, Path]
) -> Built:
    """Compile a probe for one architecture, and check the result.

    Args:
        chosen: A probe of `load_probes`.
        architecture: The architecture.
        tools: The compiler and the disassembler.
        headers: The folders that replace names in braces in ``arguments``.

    Raises:
        TookTooLong: nvcc exceeds the time limit.
    """
    with as_file(files("sm121.fixtures") / "compilation") as data:
        folders = {"headers": data / "headers", **headers}
        return build(
            data / "sources" / f"{chosen.name}.cu",
            architecture,
            chosen,
            refusal=load_probes().refusal,
            tools=tools,
            output=tools.folder / f"{chosen.name}.{architecture}.fatbin",
            arguments=[argument.format_map(folders) for argument in chosen.arguments],
        )


def contradictions(chosen: Probe, tools: Tools, headers: Mapping[str, Path]) -> list[Fact]:
    """Compile a probe for all its architectures, and compare the outcomes with the required ones.

    Args:
        chosen: A probe of `load_probes`.
        tools: The compiler and the disassembler.
        headers: The folders that replace names in braces in ``arguments``.

    Returns:
        One fact for each architecture whose outcome is not the required one.

    Raises:
        TookTooLong: nvcc exceeds the time limit.
    """
    facts = []
    for text, required in chosen.outcomes.items():
        built = compile_probe(chosen, CodeArchitecture.parse(text), tools, headers)
        if built.outcome is not required:
            about = f"{chosen.name} for {built.architecture}"
            facts.append(Fact(f"{required}", f"{built.outcome}", about, evidence=built.reason))
    return facts
