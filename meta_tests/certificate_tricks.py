"""Ways to a certificate that is none: options, variables, plugins and settings, tried one by one.
``python certificate_tricks.py FILE`` tries each of a JSON list of {"arguments", "environment",
"folder"} and prints a JSON list of {"status", "said", "certified"}. A way that is not refused is
ended when the options have been accepted, with status 0: nothing is ever started."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
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


#: Refused before anything is collected, and when it was collected what there is.
TRICKS, LATER = (
    [_given(*shlex.split(line), said=said or None) for line, said in rows.items()]
    for rows in tomllib.loads(
        (Path(__file__).parent / "data" / "certificate-tricks.toml").read_text("utf-8")
    ).values()
)
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
