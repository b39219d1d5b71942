"""FlashInfer as it is installed: what it would compile for GB10, and its headers."""

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

REMEDY = (
    "pip install --no-deps flashinfer-python==0.7.2.post1, and with torch "
    "'apache-tvm-ffi>=0.1.11' packaging requests nvidia-ml-py tqdm numpy filelock"
)
_QUESTION_S = 120.0


class Resolution(data_file.DataTable):
    """What FlashInfer must make of one value of FLASHINFER_CUDA_ARCH_LIST."""

    arch_list: str
    compiled_for: tuple[str, ...] = ()
    error: str | None = None
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _one(self) -> "Resolution":
        if bool(self.compiled_for) == (self.error is not None):
            raise ValueError("exactly one of compiled_for and error is needed")
        return self


def load_resolutions() -> tuple[Resolution, ...]:
    """What is required of FlashInfer. Raises DataFileError when the file is wrong."""
    return data_file.load_key("compilation/flashinfer.toml", "resolution", tuple[Resolution, ...])


@dataclass(frozen=True)
class Unit:
    """One CUDA source of a module, and FlashInfer's own arguments for nvcc."""

    source: Path
    arguments: tuple[str, ...]

    @property
    def compiled_for(self) -> tuple[str, ...]:
        """Architectures among the arguments: ``121a``."""
        text = " ".join(self.arguments)
        return tuple(re.findall(r"code=(?:\[)?sm_(\w+)", text))


@dataclass(frozen=True)
class FlashInfer:
    """The FlashInfer that an interpreter imports."""

    python: str
    folder: Path
    """Of the package."""

    @property
    def data(self) -> Path:
        """Folder of its CUDA sources and headers."""
        return self.folder / "data"

    def targets(self, arch_lists: Sequence[str], compiler: Compiler) -> dict[str, Any]:
        """What it compiles for, by arch list: a list, or an error's text. Raises NotRun."""
        answer = self._ask({"ask": "targets", "values": list(arch_lists)}, compiler, "12.1a")
        return dict(answer["targets"])

    def units(self, module: str, arch_list: str, compiler: Compiler, folder: Path) -> list[Unit]:
        """The CUDA units of a module, generated into ``folder``. Raises NotRun: FlashInfer cannot
        be imported there, or does not have the module."""
        request = {"ask": "units", "module": module, "folder": str(folder)}
        answer = self._ask(request, compiler, arch_list, folder)
        return [Unit(Path(u["source"]), tuple(u["arguments"])) for u in answer["units"]]

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
                # Importing FlashInfer makes its cache folder; the user's own is left alone.
                "FLASHINFER_WORKSPACE_BASE": str(folder or scratch),
                # FlashInfer looks beside the nvcc of PATH, which is often a wrapper.
                "CUDA_HOME": str(compiler.root),
            }
            command = [self.python, str(script), json.dumps(request)]
            ended = child.run(command, timeout_s=_QUESTION_S, environment=variables)
        if ended.status != 0:
            last = ended.output.strip().splitlines()[-1:] or ["no message"]
            evidence = f"{self.python}; remedy: {REMEDY}"
            required = "a FlashInfer that answers what it compiles"
            raise verdict.NotRun(unmet.Fact(required, last[0][:300], evidence=evidence))
        return json.loads(ended.output.strip().splitlines()[-1])


def find(python: str | None = None) -> FlashInfer:
    """The FlashInfer of an interpreter (default: this one). Raises NotRun: none, or no sources."""
    interpreter = python or sys.executable
    origin = imports(interpreter, ("flashinfer",), os.environ).origins["flashinfer"]
    if origin is None:
        raise lacking("flashinfer-python, for its sources", f"none in {interpreter}", REMEDY)
    flashinfer = FlashInfer(interpreter, Path(origin).parent)
    if not (flashinfer.data / "csrc").is_dir():
        raise lacking(f"FlashInfer's sources in {flashinfer.data}", "", REMEDY)
    return flashinfer


def contradictions(flashinfer: FlashInfer, compiler: Compiler) -> list[unmet.Fact]:
    """Where FlashInfer compiles for other architectures than required."""
    required = load_resolutions()
    targets = flashinfer.targets([entry.arch_list for entry in required], compiler)
    lines = []
    for entry in required:
        value = targets[entry.arch_list]
        if entry.error is not None:
            if not (isinstance(value, str) and entry.error in value):
                lines.append(unmet.Fact(f"{entry.error}", f"{value}", f"{entry.arch_list!r}"))
        elif not (isinstance(value, list) and sorted(value) == sorted(entry.compiled_for)):
            expected = ", ".join(entry.compiled_for)
            lines.append(unmet.Fact(f"{expected}", f"{value}", f"{entry.arch_list!r}"))
    return lines
