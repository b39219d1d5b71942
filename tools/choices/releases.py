"""Get releases of vLLM and FlashInfer from their published wheels: the Python code only."""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

#: Wheels of vLLM 0.24 to 0.33 for x86-64; those for aarch64 hold the same Python code.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_35_x86_64", "manylinux_2_31_x86_64", "any")
_COMPILED = "COMPILED"
_WHEEL = "WHEEL_USED"


@dataclass(frozen=True)
class Unpacked:
    """The Python code of one wheel."""

    version: str
    folder: Path
    wheel: str
    #: Modules that are compiled files in the wheel.
    compiled: list[str]

    def requires(self, distribution: str) -> str | None:
        """Return the version to which the wheel pins another distribution, read from its metadata.

        Args:
            distribution: The other distribution, for example ``flashinfer-python``.

        Returns:
            The version; None if the wheel pins none.
        """
        metadata = next(self.folder.glob("*.dist-info/METADATA")).read_text("utf-8")
        found = re.search(rf"^Requires-Dist: {distribution}==(\S+?)(;|$)", metadata, re.M)
        if found:
            return found[1]
        return None

    def arguments_in(self) -> str:
        """Return the module with the command line of the release's server."""
        for part in ("common", "launchers", "openai"):  # vLLM since 0.33, since 0.29, and before
            if (self.folder / f"vllm/entrypoints/{part}/cli_args.py").is_file():
                return f"vllm.entrypoints.{part}.cli_args"
        raise SystemExit(f"{self.wheel}: expected cli_args.py in vllm/entrypoints/*")


def published(since: Version, distribution: str = "vllm") -> list[Version]:
    """Return the releases of a distribution on the package index, oldest first.

    Args:
        since: The oldest release to return.
        distribution: The name of the distribution.

    Raises:
        SystemExit: pip printed no list of versions.
    """
    text = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", distribution],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    listed = re.search(r"Available versions: (.*)", text)
    if listed is None:
        raise SystemExit(
            f"pip index versions {distribution}: expected a list of versions, got {text!r}"
        )
    return sorted(v for v in map(Version, listed[1].split(", ")) if v >= since)


def unpack(distribution: str, version: str, cache: Path) -> Unpacked:
    """Download a wheel once, keep its Python code, and delete the wheel.

    Args:
        distribution: The name of the distribution.
        version: Its version.
        cache: The folder in which the code is kept.
    """
    folder = cache / f"{distribution}-{version}"
    if not (folder / _WHEEL).is_file():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            platforms = []
            for name in PLATFORMS:
                for word in ("--platform", name):
                    platforms.append(word)
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "-q",
                    "--no-deps",
                    "--only-binary",
                    ":all:",
                    "--python-version",
                    "3.12",
                    *platforms,
                    "-d",
                    scratch,
                    f"{distribution}=={version}",
                ],
                check=True,
            )
            wheel = next(Path(scratch).glob("*.whl"))
            shutil.rmtree(folder, ignore_errors=True)
            with zipfile.ZipFile(wheel) as archive:
                names = archive.namelist()
                wanted = [n for n in names if n.endswith(".py") or ".dist-info/" in n]
                archive.extractall(folder, wanted)
            modules = []
            for n in names:
                if n.endswith(".so"):
                    modules.append(n.split(".")[0].replace("/", "."))
            (folder / _COMPILED).write_text("\n".join(modules), encoding="utf-8")
            (folder / _WHEEL).write_text(wheel.name, encoding="utf-8")
    compiled = (folder / _COMPILED).read_text("utf-8").split()
    return Unpacked(version, folder, (folder / _WHEEL).read_text("utf-8").strip(), compiled)
