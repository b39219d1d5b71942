"""Ways to a certificate that is none: options, variables, plugins and settings, tried one by one.

``python certificate_tricks.py FILE`` tries each of a JSON list of {"arguments", "environment",
"folder"} and prints a JSON list of {"status", "said", "certified"}. A way that is not refused is
ended when the options have been accepted, with status 0: nothing is ever started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from _pytest.assertion.rewrite import AssertionRewritingHook

ROOT = Path(__file__).parent.parent
_ACCEPTED = "accepted, and ended before anything is started"


@dataclass(frozen=True)
class Trick:
    """What is given beside ``--certify``, and a part of what must be said."""

    name: str
    arguments: tuple[str, ...]
    said: str
    environment: dict[str, str] = field(default_factory=dict)


def _given(*arguments: str, said: str | None = None, **environment: str) -> Trick:
    name = " ".join((*(f"{k}={v}" for k, v in environment.items()), *arguments))
    return Trick(name, arguments, said or arguments[0].partition("=")[0], environment)


#: Refused before anything is collected.
TRICKS = [
    _given("--depths", "0"),
    _given("--rounds", "1"),
    _given("--matrix-axes", "cpu"),
    _given("--kernel-provider", "torch"),
    _given("--benchmark-disable"),
    _given("--benchmark-skip"),
    _given("--benchmark-compare=0001"),
    _given("--resume"),
    _given("--shard", "1/2"),
    _given("-n", "2", said="-n"),
    _given("-o", "python_functions=test_health", said="python_functions"),
    _given("--override-ini=python_files=test_smoke.py", said="python_files"),
    _given("-o", "testpaths=meta_tests/scenarios", said="testpaths"),
    _given("-k", "health"),
    _given("-m", "smoke"),
    _given("-m", "cpu and not stress"),
    _given("--deselect", "tests/test_stress.py"),
    _given("--ignore=tests/test_stress.py"),
    _given("--ignore-glob=*stress*"),
    _given("tests/test_smoke.py", said="paths or node ids"),
    _given("tests/test_smoke.py::test_health", said="paths or node ids"),
    _given("--lf", said="--last-failed"),
    _given("--ff", said="--failed-first"),
    _given("--sw", said="--stepwise"),
    _given("--setup-only"),
    _given("--collect-only", said="--co"),
    _given("--runxfail"),
    _given("--continue-on-collection-errors"),
    _given("--assert=plain"),
    _given("--import-mode=importlib"),
    _given("--rootdir=tests"),
    _given("-c", "/dev/null", said="--certify"),
    _given("--noconftest", said="--certify"),
    _given("-p", "no:timeout"),
    _given("-p", "no:benchmark"),
    _given("-p", "no:skipping"),
    _given("-p", "no:threadexception"),
    _given("-p", "no:sm121.plugin.stress"),
    _given("-p", "foreign_plugin", said="-p foreign_plugin"),
    _given("--timeout=1"),
    _given("-W", "ignore", said="--pythonwarnings"),
    _given("--share-machine"),
    _given("--engine-arg=--enforce-eager"),
    _given("--engine-env", "VLLM_X=1"),
    _given("--engine-debug"),
    _given("--kernel-trace", "off"),
    _given("--reference", ".cache/canary/bf16"),
    _given("--ab", "", "X=1"),
]
#: Refused when it was collected what there is.
LATER = [
    _given("--matrix", "none"),
    _given("--model", ".cache/canary/mxfp4"),
    _given("--configuration", "bfloat16", said="so that the profile's own question is asked"),
    _given("--arch", "cpu", "-m", "sm121", said="-m 'sm121'"),
]
#: What the built run does not have: nothing of it is in its command line and variables.
WITHOUT_EFFECT = [
    _given("-v", PYTEST_ADDOPTS="--depths 0"),
    _given("-v", PYTEST_ADDOPTS="-k health"),
    _given("-v", PYTEST_PLUGINS="foreign_plugin"),
    _given("-v", PYTEST_TIMEOUT="1"),
    _given("-v", VLLM_X="1"),
    _given("-v", VLLM_ATTENTION_BACKEND="TRITON_ATTN", FLASHINFER_DISABLE="1"),
    _given("-v", PYTHONOPTIMIZE="1"),
    _given("-v", PYTHONWARNINGS="error"),
]
#: Nothing of it changes what is judged.
HONEST = [
    _given("-v", "--tb=short", "--durations=3", "-rA", "--color=no"),
    _given("-q", "--no-header", "-x", "--maxfail=3", "--show-capture=no"),
    _given("-m", "cpu", "--junitxml=build/junit.xml", "-s"),
    _given("--benchmark-autosave", "--benchmark-storage=build/history", "--basetemp=build/tmp"),
    _given("--engine-python", sys.executable, "--engine", "vllm", "--full-shapes", "--slow"),
    _given("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:some_plugin_of_mine"),
]


@dataclass(frozen=True)
class Tried:
    """How pytest ended, and what it said."""

    status: int
    said: str


def tried(tricks: list[Trick]) -> list[Tried]:
    """Try each way in a process of its own, with ``--certify --arch cpu``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tricks.json"
        file.write_text(json.dumps([[t.arguments, t.environment] for t in tricks]))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, __file__, str(file)],
            cwd=ROOT, env=kept, capture_output=True, text=True, timeout=600, check=True,
        )  # fmt: skip
    return [Tried(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def _try(arguments: list[str], environment: dict[str, str], folder: Path) -> dict[str, object]:
    output = folder / "output.txt"
    command = [
        "--certify", "--arch", "cpu", "--report-dir", str(folder / "report"), *arguments,
    ]  # fmt: skip
    plugin = "def pytest_collection_modifyitems(items):\n    del items[1:]\n"
    (folder / "foreign_plugin.py").write_text(plugin)
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.environ.update(environment)
            sys.path.insert(0, str(folder))
            stream = output.open("w")
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            status = _pytest(command)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = output.read_text("utf-8", "replace")
    if _ACCEPTED in said:
        status = 0
    return {"status": status, "said": said}


def _pytest(command: list[str]) -> int:
    import pytest

    from sm121.session import certified_run

    certified_run.is_this_process = lambda: True

    class Ender:
        """Ends the run when every plugin has accepted its options."""

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_collection(self):
            raise pytest.exit.Exception(_ACCEPTED, returncode=0)
            yield

    ender = [] if "SM121_META_COLLECT" in os.environ else [Ender()]
    return int(pytest.main(command, plugins=ender))


if __name__ == "__main__":
    # Imported once, and not by each process: pytest must not mind.
    import sm121.plugin.spine  # noqa: F401

    AssertionRewritingHook._warn_already_imported = lambda *_given: None
    with tempfile.TemporaryDirectory() as scratch:
        results = []
        for number, (given, variables) in enumerate(json.loads(Path(sys.argv[1]).read_text())):
            own = Path(scratch) / str(number)
            own.mkdir()
            results.append(_try(given, variables, own))
    print(json.dumps(results))
