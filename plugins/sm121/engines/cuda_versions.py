"""The CUDA versions of the driver and of the engine's torch."""

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
    """A version of CUDA, such as 13.0."""

    major: int
    minor: int

    def __str__(self) -> str:
        """Return it as NVIDIA writes it."""
        return f"{self.major}.{self.minor}"

    @classmethod
    def of_number(cls, number: int) -> "CudaVersion":
        """Return the version of a number of the driver.

        Args:
            number: 1000 times the major version, and 10 times the minor version: 13000.
        """
        return cls(number // 1000, number % 1000 // 10)


@dataclass(frozen=True)
class CudaVersions:
    """The CUDA versions that must fit each other.

    Attributes:
        driver: The newest CUDA that the driver runs; None if it is not known.
        toolkit: The CUDA that the engine's torch was built with; None if it is not known, or if
            that torch has no CUDA.
    """

    driver: CudaVersion | None = None
    toolkit: CudaVersion | None = None

    @classmethod
    def of(
        cls, engine: protocol.Engine, python: str, environment: Mapping[str, str]
    ) -> "CudaVersions":
        """Return the versions for an engine.

        The driver's library is asked in the engine's environment, so that the library of NVIDIA's
        forward compatibility package counts if the engine loads it. Without such a library, NVML is
        asked.

        Args:
            engine: The engine. One that is a program has no torch.
            python: Its interpreter, or its program.
            environment: Its whole environment.
        """
        if isinstance(engine, protocol.Program):
            return cls()
        source = (files("sm121.core") / "cuda_probe.py").read_text("utf-8")
        try:
            answer = interpreter.ask(python, source, environment)
        except interpreter.NoAnswer:
            return cls()
        built_with = _MAJOR_AND_MINOR.match(answer["toolkit"] or "")
        if built_with is None:
            return cls()
        number = answer["driver"] or _nvml_number()
        driver = None if number is None else CudaVersion.of_number(number)
        return cls(driver, CudaVersion(int(built_with[1]), int(built_with[2])))


def _nvml_number() -> int | None:
    """Return the CUDA version of NVML's driver as its number, or None."""
    import pynvml

    try:
        with opened_nvml():
            return int(pynvml.nvmlSystemGetCudaDriverVersion_v2()) or None
    except pynvml.NVMLError:
        return None
