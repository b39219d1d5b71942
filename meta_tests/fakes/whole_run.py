"""A run with everything that a certificate needs, and waivers."""

import datetime
from pathlib import Path
from typing import Any

from sm121.core import profile, verdict
from sm121.core.profile import Profile
from sm121.core.profile_fields import Gate
from sm121.evidence.kernel_path import KernelPath
from sm121.run.machine_report import BoxReport
from sm121.run.verdict_file import EngineReport, MetricReport, TestReport, VerdictFile
from sm121.session import certification

CPU = profile.load("cpu-tiny-gpt-oss")
PATH = KernelPath(attention="CPU_ATTN", moe="CPU", kv_layout="NHD")


def gated(*metrics: str) -> Profile:
    """Return the CPU profile with gates of 52 tok/s and a soak."""
    gates = tuple(
        Gate(metric=metric, unit="tok/s", minimum=52.0, source="meta tests") for metric in metrics
    )
    performance = CPU.performance.model_copy(update={"gates": gates})
    certify = CPU.certify.model_copy(update={"soak_s": 1800.0})
    return CPU.model_copy(update={"performance": performance, "certify": certify})


def whole(target: Profile = CPU, **changed: Any) -> VerdictFile:
    """Return a run with everything that a certificate of the profile needs."""
    arch = {target.arch, "gpu"} if target.arch != "cpu" else {"cpu"}
    tests = []
    for level, named in certification.inventory().items():
        for name, applies_to in named.items():
            if arch & {*applies_to}:
                tests.append(TestReport(id=name, level=level, verdict="PASS"))
    for name, level in ((certification._GOLDEN, "correctness"), (certification.SOAK, "stress")):
        tests.append(TestReport(id=name, level=level, verdict="PASS"))
    metrics = {
        gate.metric: MetricReport(
            value=60.0, unit=gate.unit, minimum=gate.minimum, at_most=gate.at_most, verdict="PASS"
        )
        for gate in target.performance.gates
    }
    fields = {"arch": target.arch, "profile": target.name, "tests": tests, "metrics": metrics,
              "started": "now", "finished": True,
              "box": BoxReport(state="QUALIFIED", reason="fit"),
              "engine": EngineReport(name="vllm", managed=True, model="m", path=PATH),
              **changed}  # fmt: skip
    file = VerdictFile(**fields)
    judge(file)
    return file


def judge(file: VerdictFile) -> None:
    """Compute the verdict of a run from its tests, as the suite does at the end of a run."""
    file.judge()
    file.reason = file.why()


def waive(file: VerdictFile, *names: str, severity: str = "blocker") -> None:
    """Let the tests whose names contain these texts fail, with waivers."""
    for test in file.tests:
        if any(name in test.id for name in names):
            test.verdict = verdict.Verdict.FAIL
            test.waived = True
            test.severity = verdict.Severity(severity)
    judge(file)


def waiver_file(folder: Path, *names: str, days: int = 1, more: str = "") -> Path:
    """Write a file with a waiver for each test, which expires in this many days, with further lines
    in each."""
    expires = datetime.date.today() + datetime.timedelta(days=days)
    rest = f'reason = "known"\nissue = "https://example.org/1"\nexpires = {expires}\n{more}\n'
    file = folder / "waivers.toml"
    file.write_text("".join(f'[[waiver]]\ntest = "{name}"\n{rest}' for name in names))
    return file
