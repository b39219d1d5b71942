"""Adds the crash bundle of a killed suite to verdict.json.

Arguments: ``REPORT_DIR BUNDLE``. The supervisor of a server (`sm121.engines.supervisor`) runs this
module after it has written the bundle (`sm121.evidence.suite_death`).
"""

import sys
from pathlib import Path

from sm121.core.files import cause_of
from sm121.core.printable import printable
from sm121.evidence import crash_bundle
from sm121.run import verdict_file
from sm121.run.machine_report import CrashReport


def add_crash(directory: Path, bundle: Path) -> None:
    """Add a crash to verdict.json, if the file exists.

    Args:
        directory: The report directory.
        bundle: The folder of the crash bundle, in the report directory.

    Raises:
        OSError: One of the files cannot be read or written.
        ValueError: One of the files is damaged.
    """
    path = directory / verdict_file.NAME
    if not path.is_file():
        return
    index = crash_bundle.read_index(bundle)
    crash = CrashReport(
        kind=index.kind,
        summary=printable(index.summary),
        owner=index.owner,
        happened=index.what,
        bundle=str(bundle.relative_to(directory)),
    )
    file = verdict_file.read(path)
    file.crashes.append(crash)
    file.reason = f"{verdict_file.UNFINISHED}: {crash.summary}"
    verdict_file.write(file, path)


def main(arguments: list[str]) -> int:
    """Add the crash, or print why that is not possible.

    Args:
        arguments: The report directory and the folder of the bundle.

    Returns:
        The exit status.
    """
    directory, bundle = map(Path, arguments)
    try:
        add_crash(directory, bundle)
    except (OSError, ValueError) as error:
        path = directory / verdict_file.NAME
        sys.stderr.write(f"{path}: cannot be changed: {cause_of(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
