"""One archive of a run, to attach to an issue (``sm121 bundle``): the report directory, its logs
searched for secrets once more, with a checksum of each file."""

import hashlib
import shutil
import tarfile
import tempfile
from pathlib import Path

from sm121.core import redaction
from sm121.report import stored

SUMS = "SHA256SUMS"
#: A larger file is left out, and named: traces of a profiler and memory dumps.
LARGEST = 32 << 20
#: What an engine wrote. In the suite's own JSON a key that ends in token is no secret's name.
_LOGS = (".log", ".txt")
_EARLIER = "earlier"


def write(directory: Path, output: Path | None = None) -> tuple[Path, list[str]]:
    """Write the archive of a report directory (default: sm121-VERDICT-ARCH-STARTED.tar.gz here);
    its path, and what was left out. Raises UsageError: there is no sound verdict.json."""
    report = stored.read(directory)
    when = "".join(c for c in report.run.started[:19] if c.isalnum())
    verdict, arch = str(report.run.verdict).lower(), report.run.arch or "unknown"
    name = "-".join(("sm121", verdict, arch, when))
    target = output or Path(f"{name}.tar.gz")
    omitted, sums = [], []
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "file"
        with tarfile.open(target, "w:gz") as archive:
            for file in sorted(report.directory.rglob("*")):
                inside = file.relative_to(report.directory).as_posix()
                hidden = inside.startswith((".", f"{_EARLIER}/")) or "/." in inside
                is_plain = file.is_file() and not file.is_symlink()
                if hidden or not is_plain or file.samefile(target):
                    continue
                if (size := file.stat().st_size) > LARGEST:
                    omitted.append(f"{inside} ({size >> 20} MiB)")
                    continue
                shutil.copyfile(file, copied)
                if file.suffix in _LOGS:
                    redaction.redact_file(copied)
                sums.append(f"{hashlib.sha256(copied.read_bytes()).hexdigest()}  {inside}")
                archive.add(copied, f"{name}/{inside}", filter=_plain)
            copied.write_text("\n".join(sums) + "\n", "utf-8")
            archive.add(copied, f"{name}/{SUMS}", filter=_plain)
    return target, omitted


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry
