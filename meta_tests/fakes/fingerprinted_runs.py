"""Runs with constructed fingerprints."""

from typing import Any

from sm121.run.fingerprint import Fingerprint
from sm121.run.verdict_file import (
    EngineReport,
    TestReport,
    VerdictFile,
)

#: The value that stands for a removed field.
TAKEN_OUT = None
ASKED = Fingerprint(
    profile="p1", profile_shipped=True, provider="torch", configuration="cutlass", model="m1",
    arguments=["--moe-backend", "marlin"], sources={"vllm": "0.33.0 abc"}, machine={"gpu": "GB10"},
)  # fmt: skip


def run(**changed: Any) -> VerdictFile:
    """Return a judged run that has one kernel test."""
    fingerprint = ASKED.model_copy(update=changed.pop("asked", {}))
    fields: dict[str, Any] = {
        "arch": "sm121", "profile": "gb10", "started": "2026-11-20T10:00:00+00:00",
        "engine": EngineReport(name="vllm", version="0.33.0", managed=True, model="m"),
        "tests": [TestReport(id="one", level="kernel", verdict="PASS")],
        "finished": True, "fingerprint": fingerprint, "reason": "held", **changed,
    }  # fmt: skip
    file = VerdictFile(**fields)
    file.judge()
    return file
