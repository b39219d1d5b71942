"""``python -m sm121.clock`` works with only those packages that its page names."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from meta_tests.fakes import recorded_clock
from meta_tests.folders import ROOT
from meta_tests.texts import text_file

PAGE = (ROOT / "docs" / "python-api.md").read_text("utf-8")
OWN = "sm121-conformance"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_distributions() -> set[str]:
    """Return the distributions that the page tells the user to install, with their requirements."""
    (line,) = re.findall(r"^\$ pip install (httpx .*)$", PAGE, re.M)
    waiting = line.split()
    found = set()
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def blocked_modules() -> list[str]:
    """Return the top-level modules of all other distributions in this environment."""
    allowed = needed_distributions() | {OWN}
    blocked = []
    for module, owners in importlib.metadata.packages_distributions().items():
        if allowed.isdisjoint(map(_normal, owners)):
            blocked.append(module)
    return blocked


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, str]:
    """Return the variables of a process that, like its children, cannot import the other
    distributions."""
    return without(tmp_path_factory.mktemp("alone"), blocked_modules())


def without(folder: Path, modules: list[str]) -> dict[str, str]:
    """Return the variables of a process that cannot import some modules."""
    (folder / "sitecustomize.py").write_text(text_file("blocked-modules.txt"))
    (folder / "blocked").write_text("\n".join(modules))
    kept = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    return kept | {"PYTHONPATH": str(folder)}


def run(alone: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sm121.clock", *words]
    return subprocess.run(
        command, env=alone, capture_output=True, text=True, timeout=300, check=False
    )


NOT_NEEDED = [
    "pytest",
    "torch",
    "openai",
    "psutil",
    "pynvml",
    "aiohttp",
    "uvloop",
    "scipy",
    "pydantic",
]


@pytest.mark.parametrize("module", NOT_NEEDED)
def test_packages_that_the_clock_does_not_need_are_blocked(alone, module):
    command = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


def test_it_measures_alone(alone, timed_server):
    server = timed_server("--rate", "200")
    done = run(alone, f"{server.base_url}/v1", "--pp", "512", "--tg", "64", "--rounds", "3")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.startswith("| model | test | t/s | peak t/s | ttfr (ms) | est_ppt (ms) |")
    (rate,) = re.findall(r"^tg64@d0: ([\d.]+) tok/s", done.stdout, re.M)
    assert float(rate) == pytest.approx(200, rel=0.02)
    for name in ("pp512@d0", "ttft_p50", "tpot_p50"):
        assert f"\n{name}: " in done.stdout
    assert "\nclient: the event loop of asyncio, since uvloop is not installed\n" in done.stdout


def test_the_digits_are_those_of_the_suite(alone, timed_server, tmp_path):
    """The same answers give the same samples, values and intervals in `sm121.clock` and in the
    suite."""
    server = timed_server("--rate", "200", "--trap", "no-metrics")
    expected = recorded_clock.numbers_of_the_suite(server.base_url, tmp_path)
    shown = recorded_clock.digits_of_the_clock(
        [sys.executable], server.base_url, tmp_path, env=alone
    )
    assert [*shown] == ["pp512@d0", "tg16@d0", "tg64@d0", "ttft_p50", "tpot_p50"]
    assert shown == recorded_clock.digits(expected)
    assert shown["tg64@d0"]["estimate"]["value"] == pytest.approx(200, rel=0.02)


@pytest.mark.parametrize("package", ["httpx", "numpy"])
def test_a_missing_package_is_one_line(package, tmp_path):
    done = run(without(tmp_path, [*blocked_modules(), package]), "http://127.0.0.1:9")
    line = f"expected the package {package}, got none. Install it: pip install {package}"
    assert (done.returncode, done.stdout, done.stderr) == (4, "", f"sm121.clock: {line}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("http://127.0.0.1:9",), "got no answer from /v1/models", id="nobody answers"),
        pytest.param(("ftp://host",), "expected http://HOST:PORT", id="no address"),
        pytest.param(
            ("http://me:secret@host",),
            "Give the key in the variable OPENAI_API_KEY\n",
            id="a password",
        ),
        pytest.param((), "the following arguments are required: URL", id="no URL"),
    ],
)
def test_a_wrong_request_is_one_line(alone, words, message):
    done = run(alone, *words)
    assert done.returncode == 4 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and message in done.stderr
    assert "secret" not in done.stderr
