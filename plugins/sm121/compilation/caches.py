"""The caches that an engine compiles into: where they are, and what was compiled into them lately.
A start that compiles is a cold one, whatever was known of the caches before it."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: Names of processes that compile, or that drive those.
COMPILERS = frozenset({"ninja", "nvcc", "cicc", "ptxas", "fatbinary", "cudafe++", "cc1plus"})
#: Files that only a compiler makes.
_COMPILED = frozenset({".so", ".o", ".cubin"})
#: Kernels written within so many seconds cost a start little, and may be another process'.
_FEW_S = 5.0
_OUTPUT = re.compile(r"^build (\S+\.o):", re.MULTILINE)


@dataclass(frozen=True)
class CompileCaches:
    """Folders; they need not exist."""

    flashinfer: Path
    triton: Path
    vllm: Path
    #: Of torch.compile, where vLLM does not keep it in its own.
    inductor: Path | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "CompileCaches":
        """Those of a process with this environment."""
        home = Path(environment.get("HOME") or Path.home())
        caches = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
        inductor = environment.get("TORCHINDUCTOR_CACHE_DIR")
        return cls(
            Path(environment.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer",
            Path(
                environment.get("TRITON_CACHE_DIR")
                or Path(environment.get("TRITON_HOME") or home) / ".triton" / "cache"
            ),
            Path(environment.get("VLLM_CACHE_ROOT") or caches / "vllm"),
            Path(inductor) if inductor else None,
        )

    def compiled(self, since: float) -> list[str]:
        """What was compiled since then (seconds since 1970), a line for each cache."""
        new = _new(self.flashinfer, since)
        modules = sorted({file.parent.name for file in new if file.suffix == ".so"})
        lines = [f"FlashInfer: {', '.join(modules)}"] if modules else []
        for name, folder in (
            ("Triton", self.triton),
            ("vLLM", self.vllm),
            ("torch.compile", self.inductor),
        ):
            written = [_written(file) for file in _new(folder, since)] if folder is not None else []
            if written and max(written) - min(written) > _FEW_S:
                lines.append(f"{name}: {len(written)} files in {folder}")
        return lines

    def latest(self, since: float) -> float | None:
        """When the latest file was compiled, in seconds since 1970; None: none since then."""
        folders = (self.flashinfer, self.triton, self.vllm, self.inductor)
        files = (file for folder in folders if folder is not None for file in _new(folder, since))
        return max((_written(file) for file in files), default=None)

    def building(self, since: float) -> str | None:
        """The module that FlashInfer compiles now, and what is left of it: of those without a
        library, the one to which a file was added last, since then."""
        modules: list[tuple[float, str]] = []
        for rules in self.flashinfer.glob("*/*/cached_ops/*/build.ninja"):
            folder = rules.parent
            written = max(_written(file) for file in folder.iterdir())
            if written < since or any(folder.glob("*.so")):
                continue
            outputs = [Path(name) for name in _OUTPUT.findall(rules.read_text("utf-8", "replace"))]
            remaining = sum(1 for output in outputs if not output.exists())
            line = f"{folder.name}, {remaining} of {len(outputs)} files left"
            modules.append((written, line))
        return max(modules)[1] if modules else None


def _new(folder: Path, since: float) -> Iterator[Path]:
    for root, _folders, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            if path.suffix in _COMPILED and _written(path) >= since:
                yield path


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # compilers remove their temporary files
        return 0.0
