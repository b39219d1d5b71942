"""Write the files that pip and FlashInfer install, with the content that the suite reads."""

import time
from collections.abc import Callable
from pathlib import Path


def dist_info(site: Path, name: str, version: str, package: str | None = None) -> None:
    """Write a package as pip does: its name, its version, and its first file.

    `package` is the import name, if it differs from the name."""
    module = package or name.replace("-", "_")
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text(f"{module}/__init__.py,,\n")
    (folder / "top_level.txt").write_text(f"{module}\n")


def compiled(
    folder: Path, name: str, files: int, work: Callable[[], object] = lambda: time.sleep(1)
) -> None:
    """Write FlashInfer's module into its cache as ninja does, one file per second.

    If the module exists already, all files are written at once."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / f"{name}.so").exists():
        return
    outputs = [folder / f"{number}.cuda.o" for number in range(files)]
    rules = [f"build {output}: cuda_compile x.cu" for output in outputs]
    rules.append(f"build {folder}/{name}.so: link {' '.join(map(str, outputs))}")
    (folder / "build.ninja").write_text("\n".join(rules))
    for output in outputs:
        work()
        output.touch()
    (folder / f"{name}.so").touch()
