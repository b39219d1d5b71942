"""Write docs/terminal/: the end of failing runs on a terminal of 40 lines and 100 columns, against
servers with known faults. ``python -m meta_tests.whole.terminal_samples`` starts the runs."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from meta_tests.fakes import servers
from meta_tests.folders import ROOT

FOLDER = ROOT / "docs" / "terminal"
LINES = 40
COLUMNS = 100
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CPU = ("--arch", "cpu")
#: For each sample, the arguments and the variables of its run, and whether the run attaches to a
#: server.
RUNS: dict[str, tuple[tuple[str, ...], dict[str, str], bool]] = {
    "failed-start": (
        (*_CPU, "--engine-python", "meta_tests/fakes/fake_python.py", "tests/test_smoke.py"),
        {"SM121_META_PYTHON": sys.executable, "SM121_META_SERVER": "failing_start.py"},
        False,
    ),
    "failed-gate": (
        ("--arch", "sm121", "meta_tests/whole/scenarios/measurements.py"),
        {"SM121_META_SAMPLES": json.dumps({"tg32@d0": [27.1, 27.4, 27.3, 27.2] * 10})},
        True,
    ),
    "wrong-answer": ((*_CPU, "tests/test_correctness.py::test_known_answers"), {}, True),
}


def sample(name: str, report: Path) -> str:
    """Return the last lines of a run, as a terminal shows them."""
    arguments, variables, attached = RUNS[name]
    with _server() if attached else nullcontext(()) as at:
        words = [*arguments, *at, "--report-dir", str(report)]
        written = on_a_terminal(words, environment=variables)
    return neutral(closing(written), report)


def closing(written: str) -> str:
    """Return the part of the last screen that begins with the suite's own heading."""
    plain = _ESCAPES.sub("", written).replace("\r\n", "\n").replace("\r", "\n")
    at = re.search(r"^=+ sm121 conformance =+$", plain, re.M)
    assert at is not None, plain
    return plain[at.start() :]


def neutral(text: str, report: Path) -> str:
    """Replace values that differ between machines: folders, ports, and seconds."""
    for folder, word in ((str(report), "conformance-report"), (f"{ROOT}/", "")):
        text = text.replace(folder, word)
    text = re.sub(r"\S+/sm121/canary-[\w-]+", "~/.cache/sm121/canary", text)
    text = re.sub(r"http://127\.0\.0\.1:\d+", "http://127.0.0.1:8000", text)
    text = re.sub(r"\bport \d+", "port 8000", text)
    return re.sub(r"\b\d+\.\d+ ?s\b", "1.0 s", text)


def rows(text: str) -> int:
    """Return the number of terminal rows of a text."""
    return sum(max(1, -(-len(line) // COLUMNS)) for line in text.splitlines())


def on_a_terminal(arguments: list[str], *, environment: dict[str, str] | None = None) -> str:
    """Return pytest's output on a terminal."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    left_out = ("PYTEST_", "GITHUB_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal,
        env={**inherited, "TERM": "xterm", **(environment or {})},
    )  # fmt: skip
    os.close(terminal)
    written = b""
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:  # the other end of the terminal is closed
            break
        if not part:
            break
        written += part
    os.close(controller)
    process.wait()
    return written.decode("utf-8", "replace")


@contextmanager
def _server() -> Iterator[tuple[str, ...]]:
    """Start the fault server without a fault. It always answers Paris."""
    with servers.fault_server(key="") as server:
        yield ("--base-url", server.base_url, "--served-model-name", "canary")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            text = sample(name, Path(folder) / "report")
        (FOLDER / f"{name}.txt").write_text(text, "utf-8")
        print(f"{name}: {rows(text)} rows")


if __name__ == "__main__":
    main()
