"""Find the caches of an engine's compiled code, and recently compiled files in them.

A start that compiles counts as a cold start, even if the caches were not empty before.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: The names of compilers, and of programs that start compilers.
COMPILERS = frozenset({"ninja", "nvcc", "cicc", "ptxas", "fatbinary", "cudafe++", "cc1plus"})
#: The suffixes of files that only compilers write.
_COMPILED = frozenset({".so", ".o", ".cubin"})
#: If all new kernels were written within this many seconds, they are ignored, because they hardly
#: delay a start, and another process may have compiled them.
_FEW_S = 5.0
#: A rule of ninja that builds an object file.
_OUTPUT = re.compile(r"^build (\S+\.o):", re.MULTILINE)


@dataclass(frozen=True)
class CompileCaches:
    """The folders of an engine's caches, which may not exist.

    Attributes:
        flashinfer: FlashInfer's modules.
        triton: Triton's kernels.
        vllm: vLLM's compiled graphs.
        inductor: torch.compile's cache, if it is not inside vLLM's own cache.
    """

    flashinfer: Path
    triton: Path
    vllm: Path
    inductor: Path | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "CompileCaches":
        """Return the caches of a process.

        Args:
            environment: The environment of the process.
        """
        home = Path(environment.get("HOME") or Path.home())
        caches = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
        flashinfer_base = Path(environment.get("FLASHINFER_WORKSPACE_BASE") or home)
        triton_home = Path(environment.get("TRITON_HOME") or home)
        inductor = environment.get("TORCHINDUCTOR_CACHE_DIR")
        return cls(
            flashinfer=flashinfer_base / ".cache" / "flashinfer",
            triton=Path(environment.get("TRITON_CACHE_DIR") or triton_home / ".triton" / "cache"),
            vllm=Path(environment.get("VLLM_CACHE_ROOT") or caches / "vllm"),
            inductor=Path(inductor) if inductor else None,
        )

    def compiled(self, since: float) -> list[str]:
        """Describe the files that were compiled since a time.

        Args:
            since: The time, in seconds since 1970.

        Returns:
            One line for each cache with such files.
        """
        lines = []
        modules = set()
        for file in _new_files(self.flashinfer, since):
            if file.suffix == ".so":
                modules.add(file.parent.name)
        if modules:
            lines.append(f"FlashInfer: {', '.join(sorted(modules))}")
        for name, folder in (
            ("Triton", self.triton),
            ("vLLM", self.vllm),
            ("torch.compile", self.inductor),
        ):
            if folder is None:
                continue
            times = [_written(file) for file in _new_files(folder, since)]
            if times and max(times) - min(times) > _FEW_S:
                lines.append(f"{name}: {len(times)} files in {folder}")
        return lines

    def latest(self, since: float) -> float | None:
        """Return the time at which the latest file was compiled, in seconds since 1970.

        Args:
            since: Only files that were written after this time count, in seconds since 1970.

        Returns:
            The time, or None if there is no such file.
        """
        times: list[float] = []
        for folder in (self.flashinfer, self.triton, self.vllm, self.inductor):
            if folder is not None:
                times.extend(_written(file) for file in _new_files(folder, since))
        return max(times, default=None)

    def building(self, since: float) -> str | None:
        """Describe the module that FlashInfer is compiling.

        Args:
            since: Modules in which no file was written since this time are ignored, in seconds
                since 1970.

        Returns:
            A text with the most recently changed module that has no library yet, and the number of
            files that have not been compiled yet; None if there is no such module.
        """
        modules: list[tuple[float, str]] = []
        for rules in self.flashinfer.glob("*/*/cached_ops/*/build.ninja"):
            folder = rules.parent
            written = max(_written(file) for file in folder.iterdir())
            if written < since or any(folder.glob("*.so")):
                continue
            outputs = _OUTPUT.findall(rules.read_text("utf-8", "replace"))
            remaining = [output for output in outputs if not Path(output).exists()]
            line = f"{folder.name}, {len(remaining)} of {len(outputs)} files left"
            modules.append((written, line))
        if not modules:
            return None
        _, latest = max(modules)
        return latest


def _new_files(folder: Path, since: float) -> Iterator[Path]:
    """Yield the compiled files below a folder that were written since a time."""
    for root, _folders, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            if path.suffix in _COMPILED and _written(path) >= since:
                yield path


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # compilers remove their temporary files meanwhile
        return 0.0
