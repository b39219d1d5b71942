"""Compiling for GB10, and holding the result against the data files. Needs no GPU."""

from dataclasses import dataclass
from pathlib import Path

from sm121.compilation import flashinfer, probes, toolchain
from sm121.compilation.flashinfer import FlashInfer
from sm121.compilation.toolchain import Tools
from sm121.core.unmet import Fact


@dataclass(frozen=True)
class Compilation:
    """The tools of an environment, and what is wrong with what they make."""

    tools: Tools
    _python: str

    @property
    def flashinfer(self) -> FlashInfer:
        """FlashInfer of the engine's environment. Raises NotRun when it has none."""
        return flashinfer.find(self._python)

    def wrong_outcomes(self, probe: str) -> list[Fact]:
        """Where a probe comes out otherwise than required, over its architectures."""
        chosen = probes.probe(probe)
        headers = {"flashinfer": self.flashinfer.data} if chosen.tier == "headers" else {}
        return probes.contradictions(chosen, self.tools, headers)


def find(python: str, folder: Path) -> Compilation:
    """The compiler and the reader of SASS of an interpreter's environment; results go to a folder.
    Raises NotRun without nvcc or cuobjdump, with what pip would install."""
    packages = toolchain.site_packages(python)
    compiler = toolchain.find_compiler(packages)
    return Compilation(Tools(compiler, toolchain.find_disassembler(packages), folder), python)
