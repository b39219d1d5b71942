"""Modules that an engine compiled at run time: their names, and what their machine code is for.
That a module lies in a cache proves that some run compiled it, not that this one called it. That it
is missing from a cache that was empty before proves that nothing of it ran."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from sm121.compilation import architecture, libraries
from sm121.core import data_file, errors
from sm121.evidence.kernel_profile import Part, part_of

_FOLDERS_OF_ALL = ("cached_ops", "cache", "generated")


class JitModule(data_file.Record):
    """One compiled module."""

    name: str
    part: Part
    """What it is for, by its name."""
    state: str
    """What its code means for the GPU, in the words of ``sm121 path --libraries``."""
    sass: list[str]
    ptx: list[str]
    path: str
    written: float
    """When, in seconds since 1970."""


def read(places: Iterable[Path], gpu: int = architecture.GB10) -> list[JitModule]:
    """The modules under some cache folders, by name. FlashInfer's are shared libraries in a folder
    of their name; Triton's are cubins. Raises UsageError: a place does not exist."""
    chosen = list(places)
    for folder in chosen:
        if not folder.exists():
            raise errors.UsageError(f"{folder}: expected a folder of compiled modules")
    modules: list[JitModule] = []
    for file in libraries.files_of(chosen):
        if file.suffix == ".o":
            continue  # what a library is made of
        report = libraries.judge(file, gpu)
        if report.state is libraries.CodeState.HOST:
            continue
        parent = file.parent.name
        is_named = parent not in ("", *_FOLDERS_OF_ALL) and parent in file.stem
        name = parent if file.suffix == ".so" and is_named else file.name.partition(".")[0]
        modules.append(
            JitModule(
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


def evidence(modules: Sequence[JitModule]) -> dict[str, str]:
    """A line for each module, as evidence beside the kernel path."""
    return {
        f"jit_cache.{module.name}": f"{module.state}: "
        f"{', '.join(module.sass or module.ptx) or 'no code'} ({module.path})"
        for module in modules
    }
