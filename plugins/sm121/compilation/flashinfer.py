"""Find the installed FlashInfer, the sources that it would compile for GB10, and its headers."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from sm121.compilation import child
from sm121.compilation.toolchain import Compiler, lacking
from sm121.core import data_file, unmet, verdict
from sm121.core.interpreter import imports

#: The command that installs a FlashInfer for the compile tests.
REMEDY = (
    "pip install --no-deps flashinfer-python==0.7.2.post1, and with torch "
    "'apache-tvm-ffi>=0.1.11' packaging requests nvidia-ml-py tqdm numpy filelock"
)
#: The time limit of a request to FlashInfer, in seconds.
_REQUEST_S = 120.0


class Resolution(data_file.DataTable):
    """What FlashInfer must do with one value of FLASHINFER_CUDA_ARCH_LIST.

    It must either compile for the listed architectures, or fail with the listed error.
    """

    arch_list: str
    #: The names of machine code, for example ``121a``.
    compiled_for: tuple[str, ...] = ()
    #: A part of the text of the required error.
    error: str | None = None
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _one(self) -> "Resolution":
        if bool(self.compiled_for) == (self.error is not None):
            raise ValueError("exactly one of compiled_for and error is needed")
        return self


def load_resolutions() -> tuple[Resolution, ...]:
    """Return the requirements on FlashInfer.

    Raises:
        DataFileError: The file is malformed.
    """
    return data_file.load_key("compilation/flashinfer.toml", "resolution", tuple[Resolution, ...])


@dataclass(frozen=True)
class Unit:
    """One CUDA source of a module.

    Attributes:
        source: The file.
        arguments: FlashInfer's own arguments for nvcc.
    """

    source: Path
    arguments: tuple[str, ...]

    @property
    def compiled_for(self) -> tuple[str, ...]:
        """The architectures among the arguments, such as ``121a``."""
        text = " ".join(self.arguments)
        return tuple(re.findall(r"code=(?:\[)?sm_(\w+)", text))


@dataclass(frozen=True)
class FlashInfer:
    """The FlashInfer that an interpreter imports.

    Attributes:
        python: The interpreter.
        folder: The folder of the package.
    """

    python: str
    folder: Path

    @property
    def data(self) -> Path:
        """The folder of its CUDA sources and headers."""
        return self.folder / "data"

    def targets(self, arch_lists: Sequence[str], compiler: Compiler) -> dict[str, Any]:
        """Return the architectures for which FlashInfer compiles.

        Args:
            arch_lists: Values of FLASHINFER_CUDA_ARCH_LIST.
            compiler: The compiler.

        Returns:
            For each value, a list of architectures, or the text of an error.

        Raises:
            NotRun: The interpreter cannot import FlashInfer.
        """
        answer = self._ask({"ask": "targets", "values": list(arch_lists)}, compiler, "12.1a")
        return dict(answer["targets"])

    def units(self, module: str, arch_list: str, compiler: Compiler, folder: Path) -> list[Unit]:
        """Return the CUDA units of a module.

        Args:
            module: The name of the module, as in ``in_flashinfer/sm121_units.py``.
            arch_list: The value of FLASHINFER_CUDA_ARCH_LIST.
            compiler: The compiler.
            folder: The folder for generated sources.

        Raises:
            NotRun: The interpreter cannot import FlashInfer, or FlashInfer lacks the module.
        """
        request = {"ask": "units", "module": module, "folder": str(folder)}
        answer = self._ask(request, compiler, arch_list, folder)
        units = []
        for unit in answer["units"]:
            units.append(Unit(Path(unit["source"]), tuple(unit["arguments"])))
        return units

    def _ask(
        self,
        request: Mapping[str, Any],
        compiler: Compiler,
        arch_list: str,
        folder: Path | None = None,
    ) -> Any:
        with (
            tempfile.TemporaryDirectory() as scratch,
            as_file(files("sm121.compilation") / "in_flashinfer" / "sm121_units.py") as script,
        ):
            variables = {
                **os.environ,
                "FLASHINFER_CUDA_ARCH_LIST": arch_list,
                # Importing FlashInfer creates its cache folder, which must not be the user's.
                "FLASHINFER_WORKSPACE_BASE": str(folder or scratch),
                # Without this variable, FlashInfer searches beside the nvcc on PATH, which is often
                # a wrapper.
                "CUDA_HOME": str(compiler.root),
            }
            command = [self.python, str(script), json.dumps(request)]
            ended = child.run(command, timeout_s=_REQUEST_S, environment=variables)
        if ended.status != 0:
            last = ended.output.strip().splitlines()[-1:] or ["no message"]
            evidence = f"{self.python}; remedy: {REMEDY}"
            required = "a FlashInfer that reports what it compiles"
            raise verdict.NotRun(unmet.Fact(required, last[0][:300], evidence=evidence))
        return json.loads(ended.output.strip().splitlines()[-1])


def find(python: str | None = None) -> FlashInfer:
    """Return the FlashInfer of an interpreter.

    Args:
        python: The interpreter; None for that of this process.

    Raises:
        NotRun: The interpreter has no FlashInfer, or a FlashInfer without sources.
    """
    interpreter = python or sys.executable
    origin = imports(interpreter, ("flashinfer",), os.environ).origins["flashinfer"]
    if origin is None:
        raise lacking("flashinfer-python, for its sources", f"none in {interpreter}", REMEDY)
    flashinfer = FlashInfer(interpreter, Path(origin).parent)
    if not (flashinfer.data / "csrc").is_dir():
        raise lacking(f"FlashInfer's sources in {flashinfer.data}", "", REMEDY)
    return flashinfer


def contradictions(flashinfer: FlashInfer, compiler: Compiler) -> list[unmet.Fact]:
    """Compare the architectures for which FlashInfer compiles with the required ones.

    Args:
        flashinfer: The installed FlashInfer.
        compiler: The compiler.

    Returns:
        One fact for each value of FLASHINFER_CUDA_ARCH_LIST whose result is not the required one.

    Raises:
        NotRun: FlashInfer cannot be imported.
    """
    resolutions = load_resolutions()
    targets = flashinfer.targets([entry.arch_list for entry in resolutions], compiler)
    facts = []
    for entry in resolutions:
        value = targets[entry.arch_list]
        if entry.error is not None:
            required = entry.error
            holds = isinstance(value, str) and entry.error in value
        else:
            required = ", ".join(entry.compiled_for)
            holds = isinstance(value, list) and sorted(value) == sorted(entry.compiled_for)
        if not holds:
            facts.append(unmet.Fact(required, f"{value}", f"{entry.arch_list!r}"))
    return facts
