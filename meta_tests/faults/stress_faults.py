"""Run the stress level on every fault under load.

Check the class of its crash bundle, and that nothing is left behind.

    python -m meta_tests.faults.stress_faults --output docs/tables/stress-faults.md [NAME ...]
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from meta_tests.fakes import sample_bundle
from meta_tests.fakes.warm_pytest import Template, WarmPytest, WarmRun
from meta_tests.faults import catalogue_rows
from meta_tests.folders import DATA, FAKES, ROOT
from sm121.engines.process_tree import marked
from sm121.machine import machine_lock

MARK = "SM121_META_TEST"
LEVEL = "tests/test_stress.py"
SUSTAINED = (f"{LEVEL}::test_sustained_load",)


@dataclass(frozen=True)
class Case:
    """A fault and the expected result of the stress level."""

    name: str
    text: str
    #: The class of the first bundle; empty if there must be no bundle.
    kind: str
    tests: Sequence[str] = SUSTAINED
    #: The fault of the stress server. If None, the server is the real vLLM.
    fault: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    profile: dict[str, str] = field(default_factory=dict)
    #: What another process does to the run.
    special: str = ""
    #: A text that must be in the summary or the bundle.
    says: str = ""


#: Files of the temporary directory that may remain: a bundle that could not be written into the
#: report, compiled kernels, and the lock of the machine.
KEPT = ("sm121-crash-", "torchinductor_", machine_lock.name())
CASES = {
    name: Case(name, **row)
    for name, row in tomllib.loads((DATA / "stress-faults.toml").read_text("utf-8")).items()
}


@dataclass
class Outcome:
    """The result of the stress level with a fault."""

    case: str
    status: int
    verdict: str
    kinds: list[str]
    summary: str
    owner: str
    #: The deviations from the expected outcome.
    wrong: list[str]
    seconds: float
    line: str = ""
    bundles: list[str] = field(default_factory=list)


def profile_text(changes: dict[str, str]) -> str:
    """Return the CPU profile with time limits for a server that answers in milliseconds."""
    text = (ROOT / "fixtures/profiles/cpu-tiny-gpt-oss.toml").read_text("utf-8")
    values = {"stalled_after_s": "8", "request_within_s": "40", "ready_within_s": "60", **changes}
    begin = text.index("[stress]")
    head = text[:begin]
    stress = text[begin:]

    def changed(part: str, name: str, value: str) -> str:
        return re.sub(rf"^({name} = \{{ value = )[\d.]+", rf"\g<1>{value}", part, flags=re.M)

    for name, value in values.items():
        if name == "ready_within_s":
            head = changed(head, name, value)
        else:
            stress = changed(stress, name, value)
    if "disk_gib" in changes:
        head = re.sub(r"^disk_gib = .*", f"disk_gib = {changes['disk_gib']}", head, flags=re.M)
    if "stress" in changes:
        stress = re.sub(r"^stress = \d+", f"stress = {changes['stress']}", stress, flags=re.M)
    return head + stress


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 3) -> Iterator[bool]:
    """Mount a file system of the given size in MB. Return False if none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def segments() -> set[str]:
    """Return shared memory segments that no living process maps.

    Segments in use may belong to another run."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or may not be read
            used += maps.read_text("utf-8", "replace")
    return {path.name for path in Path("/dev/shm").glob("psm_*") if path.name not in used}


def run(case: Case, template: WarmPytest, *, keep: Path | None = None) -> Outcome:
    """Run one fault in a fork of the template process."""
    with tempfile.TemporaryDirectory(prefix="meta-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        temporary = folder / "t"
        temporary.mkdir()
        disk = folder / "disk"
        report = folder / "report"
        if case.special == "tmpfs":
            if not stack.enter_context(small_disk(disk)):
                return Outcome(
                    case.name, -1, "", [], "no tmpfs can be mounted here", "", ["not run"], 0
                )
            report = disk / "report"
        profile = folder / "profile.toml"
        # The real vLLM takes a minute to start, and seconds for a prompt.
        patient = {"ready_within_s": "300", "stalled_after_s": "30"} if case.fault is None else {}
        profile.write_text(profile_text({**case.profile, **patient}), "utf-8")
        return _run(case, template, folder, temporary, report, profile, keep)


def _run(
    case: Case,
    template: WarmPytest,
    folder: Path,
    temporary: Path,
    report: Path,
    profile: Path,
    keep: Path | None,
) -> Outcome:
    mark = uuid.uuid4().hex
    before = segments()
    started = time.monotonic()
    output = folder / "output.txt"
    status = _status(case, template, output, temporary, report, profile, mark)
    processes = _left(mark)
    if case.fault == "cgroup":  # this program created the group, so it must remove it
        for group in Path("/sys/fs/cgroup").glob("**/sm121-[0-9]*"):
            with contextlib.suppress(OSError):
                group.rmdir()
    seconds = round(time.monotonic() - started, 1)
    text = output.read_text("utf-8", "replace")
    verdict = _verdict(report, temporary)
    crashes = verdict.get("crashes", [])
    wrong = [f"processes left: {processes}"] if processes else []
    wrong += _remains(before, temporary, text)
    wrong += _judge(case, status, verdict, crashes, report, text)
    first = crashes[0] if crashes else {}
    line = next((item for item in text.splitlines() if "] crash: " in item), "")
    if keep is not None and crashes:
        sample_bundle.keep(report / crashes[0]["bundle"], keep)
    if wrong:
        (Path(tempfile.gettempdir()) / f"sm121-meta-{case.name}.txt").write_text(text, "utf-8")
    return Outcome(
        case.name, status, verdict.get("verdict", "none"), [c["kind"] for c in crashes],
        first.get("summary", ""), first.get("owner", ""), wrong, seconds, line,
    )  # fmt: skip


def _status(
    case: Case,
    template: WarmPytest,
    output: Path,
    temporary: Path,
    report: Path,
    profile: Path,
    mark: str,
) -> int:
    """Return the exit status of the run."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    variables |= {MARK: mark, "TMPDIR": str(temporary), **case.variables}
    arguments = ["-p", "no:cacheprovider", "--arch", "cpu", f"--profile={profile}",
                 f"--report-dir={report}", *case.tests]  # fmt: skip
    if case.fault is not None:
        variables["SM121_META_PYTHON"] = sys.executable
        variables["SM121_META_FAULT"] = case.fault
        variables["SM121_META_FILL"] = str(report)
        python = str(FAKES / "fake_python.py")
        arguments += ["--engine-python", python, "--kernel-trace", "off"]
    output.touch()
    process = template.start(arguments, output, variables)
    try:
        if case.special in ("kill", "interrupt"):
            number = signal.SIGKILL if case.special == "kill" else signal.SIGINT
            _signal_under_load(process, output, number)
        return process.wait(400)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _remains(before: set[str], temporary: Path, output: str) -> list[str]:
    """Return the shared memory, the files and the ports that a run left behind."""
    wrong = []
    fresh = segments() - before
    if fresh:  # another server on this machine may be creating its files
        time.sleep(5.0)
        fresh &= segments()
    if fresh:
        wrong.append(f"shared memory left: {sorted(fresh)}")
    if scratch := [p.name for p in temporary.iterdir() if not p.name.startswith(KEPT)]:
        wrong.append(f"temporary files left: {scratch}")
    listening = {c.laddr.port for c in psutil.net_connections() if c.status == "LISTEN"}
    ports = set(re.findall(r"ready after .* on port (\d+)", output))
    return wrong + [f"port {port} is still taken" for port in ports if int(port) in listening]


def _signal_under_load(process: WarmRun, output: Path, number: signal.Signals) -> None:
    deadline = time.monotonic() + 120
    while "ready after" not in output.read_text("utf-8", "replace"):
        assert process.poll() is None and time.monotonic() < deadline, output.read_text("utf-8")
        time.sleep(0.1)
    time.sleep(4.0 if number == signal.SIGKILL else 22.0)
    os.kill(process.pid, number)


def _left(mark: str, within_s: float = 30.0) -> list[str]:
    deadline = time.monotonic() + within_s
    while processes := marked(MARK, mark):
        if time.monotonic() > deadline:
            names = [str(process) for process in processes]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return names
        time.sleep(0.2)
    return []


def _verdict(report: Path, temporary: Path) -> dict:
    verdict: dict = {}
    with contextlib.suppress(OSError, ValueError):
        verdict = json.loads((report / "verdict.json").read_text("utf-8"))
    if verdict.get("crashes"):
        return verdict
    # If the disk is full, the bundle is in another folder.
    for index in sorted(temporary.glob("sm121-crash-*/*/bundle.json")):
        bundle = json.loads(index.read_text("utf-8"))
        entry = {"kind": bundle["class"], "summary": bundle["summary"], "owner": bundle["owner"]}
        return {"verdict": "not written", "crashes": [{**entry, "bundle": str(index.parent)}]}
    return verdict


def _judge(
    case: Case, status: int, verdict: dict, crashes: list[dict], report: Path, output: str
) -> list[str]:
    if case.special == "interrupt":
        wrong = [f"a crash without a fault: {crashes[0]}"] if crashes else []
        soak = json.loads((report / "soak.json").read_text("utf-8"))
        if status != 2 or soak["state"] != "an interrupt" or not soak["requests"]:
            wrong.append(f"expected status 2 and a report, got {status}, {soak}")
        return wrong
    if not case.kind:
        wrong = [f"a crash without a fault: {crashes[0]}"] if crashes else []
        if status != 0 or verdict.get("verdict") != "PASS":
            wrong.append(f"status {status}, {verdict.get('verdict')}: {verdict.get('reason')}")
        return wrong
    if not crashes:
        return [f"not detected: status {status}, {verdict.get('reason')}"]
    wrong = []
    kinds = [crash["kind"] for crash in crashes]
    if kinds[0] != case.kind:
        wrong.append(f"expected class {case.kind}, got {kinds}: {crashes[0]['summary']}")
    if case.special != "kill" and status in (0, 5):
        wrong.append(f"expected a run that is not green, got status {status}")
    if not crashes[0].get("owner"):
        wrong.append("no owner")
    bundle = report / crashes[0]["bundle"] if crashes[0].get("bundle") else None
    if bundle is None or not (bundle / "bundle.json").is_file():
        wrong.append(f"no bundle: {crashes[0]}")
    else:
        index = json.loads((bundle / "bundle.json").read_text("utf-8"))
        silent = []
        for n, p in index["parts"].items():
            if not p.get("file") and not p.get("unavailable"):
                silent.append(n)
        wrong += [f"parts without a reason: {silent}"] if silent else []
        wrong += _without_stacks(bundle) if case.kind == "hang" else []
        if case.says and case.says not in json.dumps(index):
            wrong.append(f"expected {case.says!r} in the bundle, got {index['summary']!r}")
    if case.special != "kill" and output.count("] crash: ") < 1:
        wrong.append("no line in the terminal")
    return wrong


def _without_stacks(bundle: Path) -> list[str]:
    """Return the processes of a bundle for which it has no Python stack.

    All processes of these servers run Python."""
    file = bundle / "stacks.txt"
    sections = file.read_text("utf-8").split("## ")[1:] if file.is_file() else []
    if not sections:
        return ["no stacks"]
    wrong = []
    pids = set()
    for section in sections:
        title, _, stacks = section.partition("\n")
        pids.update(re.findall(r"\((\d+)\)$", title))
        if "hread " not in stacks:
            wrong.append(f"no stack of {title}: {stacks.strip()}")
    tree = bundle / "process-tree.txt"
    text = tree.read_text("utf-8") if tree.is_file() else ""
    for pid, status in re.findall(r"(?m)^ *(\d+) +\d+ (\S+)", text):
        if status not in ("zombie", "dead") and pid not in pids:
            wrong.append(f"no section in the stacks for process {pid}")
    return wrong


def table(outcomes: list[Outcome], clean: list[Outcome], seconds: float) -> str:
    """Return the table of all faults in Markdown."""
    return catalogue_rows.page(
        "stress-faults", found=outcomes, clean=clean, seconds=seconds, cases=CASES,
        without_place=lambda text: re.sub(r"/\S*/report\b", "REPORT", text),
    )  # fmt: skip


def main() -> int:
    """Run all faults, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the table there")
    parser.add_argument("--samples", type=Path, help="keep some bundles there, as samples")
    parser.add_argument("--clean", type=int, default=10, help="runs without a fault")
    parser.add_argument("--state", type=Path, help="what was right in it is not run again")
    parser.add_argument("names", nargs="*", choices=[[], *CASES])
    options = parser.parse_args()
    names = options.names or [*CASES, *["clean"] * (options.clean - 1)]
    is_resumed = options.state is not None and options.state.is_file()
    lines = options.state.read_text("utf-8").splitlines() if is_resumed else []
    done = [Outcome(**json.loads(line)) for line in lines]
    unclaimed = list(done)
    template = Template(ROOT)
    connection = WarmPytest(template.address)
    for name in names:
        earlier = next((outcome for outcome in unclaimed if outcome.case == name), None)
        if earlier is not None and not options.names:
            unclaimed.remove(earlier)
            continue
        samples = options.samples / name if options.samples else None
        outcome = run(CASES[name], connection, keep=samples if name in SAMPLES else None)
        print(f"{'ok' if not outcome.wrong else 'WRONG'} {outcome}", flush=True)
        done.append(outcome)
        if options.state and not outcome.wrong:
            with options.state.open("a") as stream:
                stream.write(json.dumps(asdict(outcome)) + "\n")
    connection.close()
    template.close()
    clean = [outcome for outcome in done if outcome.case == "clean"]
    latest = {outcome.case: outcome for outcome in done if outcome.case != "clean"}
    outcomes = [latest[name] for name in CASES if name in latest]
    if options.output:
        seconds = sum(outcome.seconds for outcome in [*outcomes, *clean])
        options.output.write_text(table(outcomes, clean, seconds), "utf-8")
    return 1 if any(outcome.wrong for outcome in [*outcomes, *clean]) else 0


#: The bundles in docs/bundles.
SAMPLES = ("engine-core-killed", "stopped", "oom-cgroup", "leak")

if __name__ == "__main__":
    sys.exit(main())
