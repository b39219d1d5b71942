"""The crash bundle that a server's supervisor writes after the suite itself was killed."""

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from sm121.core import redaction
from sm121.evidence import (
    cgroup,
    crash_bundle,
    failure,
    kernel_messages,
    process_snapshot,
    stacks,
)

#: Kernel messages that are older than this many seconds are ignored.
_LOOK_BACK_S = 600.0
#: The maximum number of kernel messages in the cause.
_QUOTED = 3


def write_crash_bundle(
    status: Path, names: Mapping[int, str], main_pid: int, *, suite: int | None
) -> Path:
    """Write a bundle into the report directory.

    Args:
        status: The server's status file, which is in the report directory.
        names: The names of the server's processes; the keys are pids.
        main_pid: The pid of the server's first process.
        suite: The pid of the suite; None if it is unknown.

    Returns:
        The folder of the bundle.

    Raises:
        OSError: The bundle cannot be written.
    """
    directory = status.parent
    secrets = redaction.secrets_of(os.environ)
    kernel = kernel_messages.since(time.monotonic() - _LOOK_BACK_S)
    kills: list[str] = []
    if suite is not None:
        kills = kernel.killed({suite})
    by_kernel = f"; the kernel's message: {kills[-1]}" if kills else ""
    cause = failure.ended("suite_killed", kills[-_QUOTED:], kernel=by_kernel)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    evidence = crash_bundle.Evidence(
        cause=cause,
        what="the suite died",
        # The standard output of this process (the supervisor) is the server's log.
        log=Path("/proc/self/fd/1").resolve(),
        processes=crash_bundle.EngineProcesses(
            tree=process_snapshot.snapshot(processes),
            # The temporary folder of this process (the supervisor) is also the server's.
            stacks_folder=stacks.folder_in(Path(tempfile.gettempdir())),
        ),
        kernel=kernel,
        cgroup=crash_bundle.CgroupCounters(after=cgroup.memory_events()),
        setup=crash_bundle.EngineSetup(environment=dict(os.environ)),
        missing={
            "exits": f"the server (pid {main_pid}, {len(names)} processes) was still running",
            "memory": "only the suite had it in memory, and the suite was killed",
            "in_flight": "only the suite had them in memory, and the suite was killed",
            "configuration": "the suite was killed; server.log contains the server's arguments",
        },
    )
    return crash_bundle.write(
        evidence, directory / crash_bundle.FOLDER, lambda text: redaction.redact(text, secrets)
    )
