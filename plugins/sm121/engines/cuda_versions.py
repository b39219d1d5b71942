"""The CUDA versions of the driver and of the engine's torch, and the version of cuDNN."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from sm121.core import interpreter
from sm121.core.architecture import opened_nvml
from sm121.engines import protocol

_MAJOR_AND_MINOR = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class CudaVersion:
    """The first two numbers of a version of CUDA or cuDNN, for example 13.0."""

    major: int
    minor: int

    def __str__(self) -> str:
        """Return the version as NVIDIA writes it."""
        return f"{self.major}.{self.minor}"

    @classmethod
    def of_number(cls, number: int) -> "CudaVersion":
        """Return the version for a number that the driver returned.

        Args:
            number: 1000 times the major version plus 10 times the minor version, for example 13000
                for 13.0.
        """
        return cls(number // 1000, number % 1000 // 10)

    @classmethod
    def of_text(cls, text: str) -> "CudaVersion | None":
        """Return the version at the beginning of a text; None if there is none.

        Args:
            text: The text, for example ``13.0`` or ``9.15.1.9``.
        """
        match = _MAJOR_AND_MINOR.match(text)
        if match is None:
            return None
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class CudaVersions:
    """The CUDA versions that must be compatible with each other.

    Attributes:
        driver: The newest CUDA that the driver runs; None if it is not known.
        toolkit: The CUDA that the engine's torch was built with; None if it is not known, or if
            that torch has no CUDA.
        cudnn: The cuDNN of the engine; None if it is not known.
        asked: Whether the engine is a Python package, so that its interpreter was queried.
    """

    driver: CudaVersion | None = None
    toolkit: CudaVersion | None = None
    cudnn: CudaVersion | None = None
    asked: bool = False

    def of_part(self, part: str) -> CudaVersion | None:
        """Return the version of one part.

        Args:
            part: ``driver``, ``toolkit`` or ``cudnn``.

        Returns:
            The version; None if it is not known.
        """
        version: CudaVersion | None = getattr(self, part)
        return version

    @classmethod
    def of(
        cls, engine: protocol.Engine, python: str, environment: Mapping[str, str]
    ) -> "CudaVersions":
        """Find the versions for an engine.

        The driver's library is loaded in the engine's environment, so that the result is right if
        the engine uses the library of NVIDIA's forward compatibility package. If there is no driver
        library, NVML is queried.

        Args:
            engine: The engine. An engine that is an executable has no torch.
            python: The engine's interpreter, or its program.
            environment: The engine's whole environment.
        """
        if isinstance(engine, protocol.Program):
            return cls()
        source = (files("sm121.core") / "cuda_probe.py").read_text("utf-8")
        try:
            answer = interpreter.ask(python, source, environment)
        except interpreter.NoAnswer:
            return cls()
        number = answer["driver"] or _nvml_number()
        driver = None if number is None else CudaVersion.of_number(number)
        toolkit = CudaVersion.of_text(answer["toolkit"] or "")
        return cls(driver, toolkit, CudaVersion.of_text(answer["cudnn"] or ""), asked=True)


def _nvml_number() -> int | None:
    """Return the CUDA version of NVML's driver as its number, or None."""
    import pynvml

    try:
        with opened_nvml():
            return int(pynvml.nvmlSystemGetCudaDriverVersion_v2()) or None
    except pynvml.NVMLError:
        return None
