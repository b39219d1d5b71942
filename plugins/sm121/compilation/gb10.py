"""Compile for GB10 without a GPU, and compare the results with the required ones."""

from dataclasses import dataclass
from pathlib import Path

from sm121.compilation import flashinfer, probes, toolchain
from sm121.compilation.flashinfer import FlashInfer
from sm121.compilation.toolchain import Tools
from sm121.core.unmet import Fact


@dataclass(frozen=True)
class Compilation:
    """The compilers of an engine's environment.

    Attributes:
        tools: The compiler, the disassembler, and the folder for their results.
    """

    tools: Tools
    _python: str

    @property
    def flashinfer(self) -> FlashInfer:
        """The FlashInfer in the engine's environment. Raises NotRun if there is none."""
        return flashinfer.find(self._python)

    def wrong_outcomes(self, probe: str) -> list[Fact]:
        """Compile a probe, and return one fact for each architecture with a wrong outcome.

        Args:
            probe: The name of the probe.

        Raises:
            UsageError: The suite has no probe of this name.
            NotRun: The probe needs FlashInfer, which is not installed.
        """
        chosen = probes.probe(probe)
        headers = {}
        if chosen.tier == "headers":
            headers["flashinfer"] = self.flashinfer.data
        return probes.contradictions(chosen, self.tools, headers)


def find(python: str, folder: Path) -> Compilation:
    """Return the compilers of an interpreter's environment.

    Args:
        python: The interpreter.
        folder: The folder for the results.

    Raises:
        NotRun: nvcc or cuobjdump is missing. The message has the command that installs it.
    """
    packages = toolchain.site_packages(python)
    compiler = toolchain.find_compiler(packages)
    return Compilation(Tools(compiler, toolchain.find_disassembler(packages), folder), python)
