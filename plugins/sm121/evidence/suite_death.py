"""What a server's supervisor writes down when the suite itself was killed."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from sm121.core import files, redaction
from sm121.evidence import cgroup, crash_bundle, failure, kernel_messages, process_snapshot

_LOOK_BACK_S = 600.0


def tell(status: Path, names: Mapping[int, str], main_pid: int, *, suite: str) -> None:
    """Write a bundle beside the server's status file in the report directory, and name it in
    verdict.json. ``names``: of the server's processes, by pid; ``suite``: its pid, or empty."""
    directory = status.parent
    secrets = redaction.secrets_of(os.environ)
    kernel = kernel_messages.since(time.monotonic() - _LOOK_BACK_S)
    named = kernel.killed({int(suite)}) if suite.isdecimal() else []
    says = f"; the kernel says: {named[-1]}" if named else ""
    cause = failure.ended("suite_killed", named[-3:], kernel=says)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    evidence = crash_bundle.Evidence(
        cause=cause,
        what="the suite died",
        log=Path("/proc/self/fd/1").resolve(),  # what the server says goes where we say it
        tree=process_snapshot.snapshot(processes),
        kernel=kernel,
        cgroup_after=cgroup.memory_events(),
        environment=dict(os.environ),
        missing={
            "exits": f"the server (pid {main_pid}, {len(names)} processes) was still running",
            "memory": "the suite kept it in its own memory, and is gone",
            "in_flight": "the suite kept them in its own memory, and is gone",
            "configuration": "the suite is gone; server.log says what was started",
        },
    )
    bundle = crash_bundle.write(
        evidence, directory / crash_bundle.FOLDER, lambda text: redaction.redact(text, secrets)
    )
    if (file := directory / "verdict.json").is_file():
        report = json.loads(file.read_text("utf-8"))
        crash = {**cause.model_dump(include={"kind", "summary", "owner"}), "test": None}
        report["crashes"].append({**crash, "bundle": str(bundle.relative_to(directory))})
        report["reason"] = f"the run has not finished: {cause.summary}"
        files.write_text(json.dumps(report, indent=2) + "\n", file)
