"""An archive of a run, to attach to an issue (``sm121 bundle``).

It contains the report directory with a checksum of each file. Secrets are removed from the logs
again.
"""

import hashlib
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sm121.core import redaction
from sm121.core.verdict import Verdict
from sm121.report import stored
from sm121.run import directory, stored_run, verdict_file
from sm121.run.verdict_file import VerdictFile

SUMS = "SHA256SUMS"
#: Larger files (profiler traces, memory dumps) are left out of the archive, and listed in it.
LARGEST = 32 << 20
#: Suffixes of engines' output, from which secrets are removed. The suite's own JSON is excluded:
#: its keys that end with "token" are no secrets.
_LOGS = (".log", ".txt")
_MIB = 1 << 20


@dataclass(frozen=True)
class ChosenRun:
    """The run that a path refers to.

    Attributes:
        directory: The run's report directory.
        run: The run.
        is_newest: Whether it is the newest run in the report directory.
        newest: The newest run; None if that has no report, such as after a refused certificate.
    """

    directory: Path
    run: VerdictFile
    is_newest: bool
    newest: VerdictFile | None


def choose(path: Path) -> ChosenRun:
    """Return the newest run of a report directory that has results.

    Args:
        path: The report directory; or its verdict.json, for exactly that run.

    Returns:
        The newest run with results; if no run has results, the newest run.

    Raises:
        UsageError: There is no valid verdict.json.
    """
    folder = stored_run.folder_of(path)
    newest = None
    if folder != path or (folder / verdict_file.NAME).is_file():
        newest = stored_run.file_of(folder)
        if folder != path or _has_answers(newest):
            return ChosenRun(folder, newest, is_newest=True, newest=newest)
    for earlier in directory.earlier_reports(folder):
        run = stored_run.file_of(earlier)
        if _has_answers(run):
            return ChosenRun(earlier, run, is_newest=False, newest=newest)
    return ChosenRun(folder, newest or stored_run.file_of(folder), is_newest=True, newest=newest)


def _has_answers(run: VerdictFile) -> bool:
    is_without = run.verdict is Verdict.NOT_RUN and not run.crashes
    return not is_without or any(test.executed for test in run.tests)


def write(report_dir: Path, output: Path | None = None) -> tuple[Path, list[str]]:
    """Write the archive of a report directory.

    Args:
        report_dir: The report directory.
        output: The archive's path; by default sm121-VERDICT-ARCH-STARTED.tar.gz in the current
            folder.

    Returns:
        The archive's path, and one line per file that is too large.

    Raises:
        UsageError: There is no valid verdict.json.
    """
    report = stored.read(report_dir)
    name = _name(report.run)
    target = output or Path(f"{name}.tar.gz")
    too_large = []
    sums = []
    with tempfile.TemporaryDirectory() as folder, tarfile.open(target, "w:gz") as archive:
        copied = Path(folder) / "file"
        for file in sorted(report.directory.rglob("*")):
            inside = file.relative_to(report.directory).as_posix()
            if _is_hidden(inside) or not file.is_file() or file.is_symlink():
                continue
            if file.samefile(target):
                continue
            size = file.stat().st_size
            if size > LARGEST:
                too_large.append(f"{inside} ({size // _MIB} MiB)")
                continue
            shutil.copyfile(file, copied)
            if file.suffix in _LOGS:
                redaction.redact_file(copied)
            sums.append(f"{hashlib.sha256(copied.read_bytes()).hexdigest()}  {inside}")
            archive.add(copied, f"{name}/{inside}", filter=_without_owner)
        copied.write_text("\n".join(sums) + "\n", "utf-8")
        archive.add(copied, f"{name}/{SUMS}", filter=_without_owner)
    return target, too_large


def _name(run: VerdictFile) -> str:
    started = "".join(character for character in run.started[:19] if character.isalnum())
    verdict = str(run.verdict).lower()
    return f"sm121-{verdict}-{run.arch or 'unknown'}-{started}"


def _is_hidden(inside: str) -> bool:
    """Whether a path is hidden, or belongs to another run in the same directory."""
    others = (f"{directory.EARLIER}/", f"{directory.NOT_RUN}/")
    return inside.startswith((".", *others)) or "/." in inside


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = 0
    entry.gid = 0
    entry.uname = ""
    entry.gname = ""
    entry.mode = 0o644
    return entry
