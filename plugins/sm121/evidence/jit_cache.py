"""Modules that an engine has compiled at run time, and the architectures of their machine code.

A module in a cache proves that some run compiled the module, but not that this run called it. If
the cache was empty before a run, and a module is still missing after the run, the run did not call
this module.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from sm121.compilation import architecture, libraries
from sm121.core import data_file, errors
from sm121.evidence.kernel_names import Part, part_of

#: The names of folders in a cache that are not names of modules.
_FOLDERS_OF_ALL = ("", "cached_ops", "cache", "generated")


class CachedModule(data_file.Record):
    """One compiled module."""

    name: str
    part: Part
    """The part of the model that the module computes, derived from the module's name."""
    state: str
    """Whether the module's code can run on the GPU. The values are those of ``sm121 path
    --libraries``."""
    sass: list[str]
    ptx: list[str]
    path: str
    written: float
    """When the module's file was last modified, in seconds since 1970."""


def read_modules(places: Iterable[Path], gpu: int = architecture.GB10) -> list[CachedModule]:
    """Read the modules in some cache folders.

    FlashInfer's modules are shared libraries, in folders of the same name; Triton's are cubins.

    Args:
        places: The folders.
        gpu: The compute capability of the GPU, such as 121.

    Returns:
        The modules, sorted by name. Libraries without device code are left out.

    Raises:
        UsageError: A folder does not exist.
    """
    chosen = list(places)
    for folder in chosen:
        if not folder.exists():
            raise errors.UsageError(
                f"--jit-cache {folder}: expected a folder of compiled modules, got no such path. "
                "By default, FlashInfer uses ~/.cache/flashinfer, and Triton ~/.triton/cache."
            )
    modules: list[CachedModule] = []
    for file in libraries.files_of(chosen):
        if file.suffix == ".o":
            continue  # the library in the same folder contains this code
        report = libraries.check_file(file, gpu)
        if report.state is libraries.CodeState.HOST:
            continue
        name = _name_of(file)
        modules.append(
            CachedModule(
                name=name,
                part=part_of(name),
                state=report.state.value,
                sass=list(report.sass),
                ptx=list(report.ptx),
                path=str(file),
                written=round(file.stat().st_mtime, 3),
            )
        )
    return sorted(modules, key=lambda module: (module.name, module.path))


def _name_of(file: Path) -> str:
    """Return the name of a module: its folder's name if it matches the file's, else the file's."""
    folder = file.parent.name
    if file.suffix == ".so" and folder not in _FOLDERS_OF_ALL and folder in file.stem:
        return folder
    return file.name.partition(".")[0]


def evidence(modules: Sequence[CachedModule]) -> dict[str, str]:
    """Return a line for each module, as evidence of a kernel path.

    Args:
        modules: The modules.

    Returns:
        The lines; the keys are ``jit_cache.<name>``.
    """
    lines: dict[str, str] = {}
    for module in modules:
        code = ", ".join(module.sass or module.ptx) or "no code"
        lines[f"jit_cache.{module.name}"] = f"{module.state}: {code} ({module.path})"
    return lines
