"""Ways to a certificate that is none: options, variables, plugins and settings, tried one by one.
``python certificate_tricks.py FILE`` tries each of a JSON list of {"arguments", "environment",
"folder"} and prints a JSON list of {"status", "output"}. A way that is not refused is
ended when the options have been accepted, with status 0: nothing is ever started."""

import itertools
import json
import os
import re
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
    """What is given beside ``--certify``, and a part of what must be said: `expected`."""

    name: str
    arguments: tuple[str, ...]
    expected: str
    environment: dict[str, str] = field(default_factory=dict)


def _given(line: str, expected: str = "") -> Trick:
    """Of a line of the shell: variables, then arguments."""
    words = shlex.split(line.replace("PYTHON ", f"{sys.executable} "))
    count = len([*itertools.takewhile(re.compile(r"[A-Z]\w*=").match, words)])
    variables = dict(word.split("=", 1) for word in words[:count])
    arguments = tuple(words[count:])
    return Trick(" ".join(words), arguments, expected or arguments[0].partition("=")[0], variables)


_LINES = tomllib.loads(
    (Path(__file__).parent / "data" / "certificate-tricks.toml").read_text("utf-8")
)
#: Refused before anything is collected, and when it was collected what there is.
TRICKS, LATER = ([_given(*row) for row in _LINES[kind].items()] for kind in ("refused", "later"))
#: What the built run does not have: nothing of it is in its command line and variables.
WITHOUT_EFFECT = [_given(line) for line in _LINES["without_effect"]]
#: Nothing of it changes what is judged.
HONEST = [_given(line) for line in _LINES["honest"]]


@dataclass(frozen=True)
class Tried:
    """How pytest ended, and what it said."""

    status: int
    output: str


def tried(tricks: list[Trick]) -> list[Tried]:
    """Try each way in a process of its own, with ``--certify --arch cpu``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tricks.json"
        file.write_text(json.dumps([[t.arguments, t.environment] for t in tricks]))
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, __file__, str(file)],
            cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600, check=True,
        )  # fmt: skip
    return [Tried(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def _try(arguments: list[str], environment: dict[str, str], folder: Path) -> dict[str, object]:
    output = folder / "output.txt"
    report = str(folder / "report")
    command = ["--certify", "--arch", "cpu", "--report-dir", report, *arguments]
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
    text = output.read_text("utf-8", "replace")
    if _ACCEPTED in text:
        status = 0
    return {"status": status, "output": text}


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

    AssertionRewritingHook._warn_already_imported = lambda *_arguments: None
    with tempfile.TemporaryDirectory() as scratch:
        results = []
        for number, (arguments, variables) in enumerate(json.loads(Path(sys.argv[1]).read_text())):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            results.append(_try(arguments, variables, folder))
    print(json.dumps(results))
